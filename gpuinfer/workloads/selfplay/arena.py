"""One half of a worker's games: the arrays, the block that travels, and the calls into the compiled search."""

from __future__ import annotations

from types import ModuleType

import numpy as np

from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.game import Game
from gpuinfer.workloads.selfplay.slots import Slots


class Arena(Slots):
    """Games whose rules are compiled."""

    def __init__(
        self, game: Game, kernels: ModuleType, search: arrays.Search, slots: int, features: np.ndarray | None = None
    ) -> None:
        super().__init__(game, search, slots, features)
        self._kernels = kernels
        self._games = arrays.allocate_games(game, slots, search.record)
        self._under_way, self._moves = self._games.game, self._games.moves
        self._trees = arrays.allocate_trees(game, self.trees, search.simulations)
        self._log = arrays.allocate_log(game, self._log_room, search.record)
        self._scratch = (np.zeros(game.scratch[0], np.int64), np.zeros(game.scratch[1], np.float64))
        self._work = (
            np.zeros(game.words, np.int64),
            np.zeros(game.max_legal, np.int16),
            np.zeros(game.seats, np.float32),
            np.zeros(game.max_legal, np.float32),
        )

    def roots(self) -> tuple[np.ndarray, np.ndarray]:
        # the search writes rows in the order of their trees
        trees = np.flatnonzero(self._trees.row >= 0)
        return trees // self.search.determinizations, self._trees.nodes["mover"][trees, 0]

    def play(self, logits: np.ndarray | None = None, values: np.ndarray | None = None, rounds: int = 1) -> int:
        return int(
            self._kernels.play(
                self.game.config,
                self.search,
                self._games,
                self._trees,
                self._log,
                self._queue,
                self.counters,
                self._scratch,
                self._work,
                self.features,
                self._no_logits if logits is None else logits,
                self._no_values if values is None else values,
                rounds,
            )
        )

    def play_out(self, rows: np.ndarray, logits: np.ndarray, values: np.ndarray) -> None:
        self._kernels.play_out(
            self.game.config,
            self.search,
            self._games,
            self._trees,
            self._work,
            np.asarray(np.flatnonzero(self._trees.row >= 0)[rows], np.int64),
            logits,
            values,
        )

    def collect(self) -> dict[str, np.ndarray] | None:
        games, rows = int(self.counters[arrays.LOG_GAMES]), int(self.counters[arrays.LOG_ROWS])
        if not games:
            return None
        self.counters[arrays.LOG_GAMES] = self.counters[arrays.LOG_ROWS] = 0
        return {
            name: array[: games if name in arrays.OF_GAMES else rows].copy()
            for name, array in self._log._asdict().items()
            if self.search.resign or name not in arrays.OF_RESIGNATION
        }
