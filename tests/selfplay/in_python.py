"""Games whose rules are Python: any compiled game once more, and one of chance whose values are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from gpuinfer.workloads.selfplay import kernels
from gpuinfer.workloads.selfplay.drawing import Draw
from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER, PythonGame


class AsPython(PythonGame):
    """A compiled game's rules, asked from Python. A position is its state, int64 [words]."""

    original: ClassVar[Game]

    def __init__(self, setup: Any = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        game = self.original
        for name in ("seats", "actions", "max_legal", "max_moves", "features", "feature_dtype", "hidden"):
            setattr(self, name, getattr(game, name))
        self._game, self._rules = game, kernels.rules_of(game.rules)
        self._actions = np.zeros(game.max_legal, np.int16)

    def deal(self, draw: Draw) -> np.ndarray:
        state = np.zeros(self._game.words, np.int64)
        self._rules.deal(self._game.config, state, draw.stream)
        return state

    def to_move(self, position: np.ndarray) -> int:
        return int(self._rules.to_move(self._game.config, position))

    def legal(self, position: np.ndarray) -> list[int]:
        count = self._rules.legal(self._game.config, position, self._actions)
        return self._actions[:count].tolist()

    def apply(self, position: np.ndarray, action: int) -> np.ndarray:
        after = position.copy()
        self._rules.apply(self._game.config, after, np.int16(action))
        return after

    def returns(self, position: np.ndarray) -> np.ndarray:
        values = np.zeros(self.seats, np.float32)
        self._rules.returns(self._game.config, position, values)
        return values

    def observe(self, position: np.ndarray, row: np.ndarray) -> None:
        whole = np.zeros(self.features, self.feature_dtype)
        count = self._rules.legal(self._game.config, position, self._actions)
        self._rules.observe(self._game.config, position, self._actions, count, whole)
        row[:] = whole[self.actions :]

    def determinize(self, position: np.ndarray, draw: Draw) -> np.ndarray:
        samples = np.zeros((1, self._game.words), np.int64)
        scratch = np.zeros(self._game.scratch[0], np.int64), np.zeros(self._game.scratch[1], np.float64)
        self._rules.determinize(self._game.config, position, samples, draw.stream, *scratch)
        return samples[0]


class PythonConnectFour(AsPython):
    original = ConnectFour()


class PythonBlob(AsPython):
    original = Blob(None, players=3, cards=3)


class Wager(PythonGame):
    """One player, one choice: 0.3 for sure, or a wheel that brings 1 in three of four cases, else -1: 0.5 on average.

    The wheel is turned twice: the first turn brings it to a halt with probability 0.5, else the second one does.
    """

    hidden: ClassVar[bool] = False
    SURE, WHEEL = 0, 1

    def __init__(self, setup: Any = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        self.seats, self.actions, self.max_legal, self.max_moves, self.features = 1, 2, 2, 1, 3

    def deal(self, draw: Draw) -> tuple[str, ...]:
        return ()

    def to_move(self, position: tuple[str, ...]) -> int:
        if not position:
            return 0
        return CHANCE if position[-1] in ("wheel", "turns on") else OVER

    def legal(self, position: tuple[str, ...]) -> Sequence[int]:
        return [self.SURE, self.WHEEL]

    def chances(self, position: tuple[str, ...]) -> Sequence[tuple[int, float]]:
        return [(0, 0.125), (1, 0.375), (2, 0.5)] if position[-1] == "wheel" else [(0, 0.25), (1, 0.75)]

    def apply(self, position: tuple[str, ...], action: int) -> tuple[str, ...]:
        return (*position, ("lost", "won", "turns on")[action] if position else ("sure", "wheel")[action])

    def returns(self, position: tuple[str, ...]) -> Sequence[float]:
        return [{"sure": 0.3, "won": 1.0, "lost": -1.0}[position[-1]]]

    def observe(self, position: tuple[str, ...], row: np.ndarray) -> None:
        row[0] = len(position)
