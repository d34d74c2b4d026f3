"""A game on the table: one position, played by hand through the compiled rules that the search uses."""

from __future__ import annotations

import importlib

import numpy as np

from gpuinfer.workloads.selfplay import bits
from gpuinfer.workloads.selfplay.game import Game


class Table:
    """Deals at once; the same `seed` and `number` give the same deal as the search's game of that number."""

    def __init__(self, game: Game, seed: int = 0, number: int = 0) -> None:
        self.game = game
        self.rules = importlib.import_module(game.rules)
        self.state = np.zeros(game.words, np.int64)
        self.stream = np.zeros(2, np.uint64)
        self._actions = np.zeros(game.max_legal, np.int16)
        self._scratch = np.zeros(game.scratch[0], np.int64), np.zeros(game.scratch[1], np.float64)
        bits.seed_stream(self.stream, seed, number)
        self.rules.deal(game.config, self.state, self.stream)

    @property
    def mover(self) -> int:
        return int(self.rules.to_move(self.game.config, self.state))

    @property
    def over(self) -> bool:
        return self.mover < 0

    def legal(self) -> list[int]:
        count = self.rules.legal(self.game.config, self.state, self._actions)
        legal: list[int] = self._actions[:count].tolist()
        return legal

    def play(self, *actions: int) -> None:
        for action in actions:
            self.rules.apply(self.game.config, self.state, np.int16(action))

    def returns(self) -> list[float]:
        values = np.zeros(self.game.seats, np.float32)
        self.rules.returns(self.game.config, self.state, values)
        told: list[float] = values.tolist()
        return told

    def observe(self) -> np.ndarray:
        """What the player to move sees, [features]."""
        row = np.zeros(self.game.features, self.game.feature_dtype)
        count = self.rules.legal(self.game.config, self.state, self._actions)
        self.rules.observe(self.game.config, self.state, self._actions, count, row)
        return row

    def guesses(self, count: int) -> np.ndarray:
        """Positions that the player to move thinks possible, int64 [count, words]."""
        samples = np.zeros((count, self.game.words), np.int64)
        self.rules.determinize(self.game.config, self.state, samples, self.stream, *self._scratch)
        return samples
