"""Any turn-based game of OpenSpiel, as a game whose rules are Python calls into its library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import pyspiel
from pydantic import Field

from gpuinfer import api
from gpuinfer.workloads.selfplay.draw import Draw
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER, PythonGame
from gpuinfer_openspiel import loading, size

NOBODY = {pyspiel.PlayerId.TERMINAL: OVER, pyspiel.PlayerId.CHANCE: CHANCE}


class OpenSpiel(PythonGame):
    """One of its games, with parameters: `connect_four`, `go(board_size=9)`.

    Features are OpenSpiel's tensor for the player to move; returns are shares of the most that one can win or lose.
    """

    class Options(api.Options):
        name: str = Field(
            "connect_four", min_length=1, description="a game of OpenSpiel, with its parameters, as go(board_size=9)"
        )

    variant: ClassVar[str | None] = "name"
    options: Options

    def __init__(self, setup: api.Setup | None = None, /, **options: object) -> None:
        super().__init__(setup, **options)
        self.game = game = loading.load(self.options.name)
        loading.refuse(game, self.options.name)
        self.hidden = game.get_type().information != pyspiel.GameType.Information.PERFECT_INFORMATION  # type: ignore[misc]
        self._observation = loading.observation(game, self.hidden)
        self._write, self._tensor = self._observation.set_from, self._observation.tensor
        self.seats = game.num_players()
        self.actions = self.max_legal = game.num_distinct_actions()
        self.max_moves = max(1, game.max_game_length())
        self.features = self.actions + len(self._tensor)
        self.position_bytes = size.position_bytes(game)
        self._scale = 1.0 / loading.highest(game)
        self.won_or_lost = loading.is_won_or_lost(game)  # type: ignore[misc]

    def deal(self, draw: Draw) -> pyspiel.State:
        return self.game.new_initial_state()

    def to_move(self, position: pyspiel.State) -> int:
        player: int = position.current_player()
        return player if player >= 0 else NOBODY[player]

    def legal(self, position: pyspiel.State) -> Sequence[int]:
        actions: Sequence[int] = position.legal_actions()
        return actions

    def chances(self, position: pyspiel.State) -> Sequence[tuple[int, float]]:
        outcomes: Sequence[tuple[int, float]] = position.chance_outcomes()
        return outcomes

    def apply(self, position: pyspiel.State, action: int) -> pyspiel.State:
        return position.child(action)

    def returns(self, position: pyspiel.State) -> Sequence[float]:
        return [value * self._scale for value in position.returns()]

    def observe(self, position: pyspiel.State, row: np.ndarray) -> None:
        self._write(position, position.current_player())
        row[:] = self._tensor

    def determinize(self, position: pyspiel.State, draw: Draw) -> pyspiel.State:
        if not self.hidden:
            return position
        return position.resample_from_infostate(position.current_player(), draw.unit)

    def show(self, position: pyspiel.State, seat: int) -> str:
        """As OpenSpiel shows it; where something is hidden, what the seat may see."""
        if not self.hidden:
            return str(position)
        if self.game.get_type().provides_observation_string:
            return str(position.observation_string(seat))
        return str(position.information_state_string(seat))

    def action_name(self, position: pyspiel.State, action: int) -> str:
        return str(position.action_to_string(position.current_player(), action))
