"""One half of a worker's games: slots for games, a queue of games to come, counters, the block of leaves, and for
compiled rules the arrays and the calls into the compiled search.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import ModuleType

import numpy as np

from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.game import Game

LOGGED_GAMES = 256  # at least; a full log makes slots wait until it is collected


class GameSlots(ABC):
    """Games in lockstep. `play` → a block of leaves; its answers go into the next `play`, which looks at all of them.

    `features` is where the leaves are written: [slots × determinizations, features], by default memory of its own.
    """

    games: np.ndarray  # int64 [slots]: the number of the game in each, or `arrays.IDLE`
    _moves: np.ndarray  # int64 [slots]: moves of it that were made

    def __init__(self, game: Game, search: arrays.Search, slots: int, features: np.ndarray | None = None) -> None:
        self.game = game
        self.slots = slots
        self.search = search
        self.trees = slots * search.determinizations
        self.counters = np.zeros(7, np.int64)
        self.features = np.zeros((self.trees, game.features), game.feature_dtype) if features is None else features
        self._log_room = max(LOGGED_GAMES, 2 * slots)
        self._queue = np.zeros(0, np.int64)
        self._no_logits = np.zeros((0, game.actions), np.float32)
        self._no_values = np.zeros((0, game.seats), np.float32)

    def add_games(self, ids: Sequence[int]) -> None:
        """Queue games; a slot that falls free takes the next."""
        left = self._queue[self.counters[arrays.NEXT] :]
        self._queue = np.concatenate([left, np.asarray(ids, np.int64)])
        self.counters[arrays.NEXT], self.counters[arrays.END] = 0, len(self._queue)

    @property
    def queued(self) -> int:
        """Games that no slot has taken yet."""
        return int(self.counters[arrays.END] - self.counters[arrays.NEXT])

    @property
    def begun(self) -> float:
        """The games under way as shares of the longest possible one, added up."""
        return float(self._moves[self.games != arrays.IDLE].sum()) / self.game.max_moves

    def spare(self, busy: int) -> int:
        """How many more games to queue: for each free slot one, and a few so that none waits for the next round."""
        ahead = max(1, self.slots // 16) if self.search.evaluator == arrays.NETWORK else 4 * self.slots
        return max(0, self.slots - busy + ahead - self.queued)

    @property
    def busy(self) -> int:
        """Slots with a game."""
        return int(np.count_nonzero(self.games != arrays.IDLE))

    @abstractmethod
    def play(self, logits: np.ndarray | None = None, values: np.ndarray | None = None, rounds: int = 1) -> int:
        """One round: how many rows of `features` now want an evaluation; 0 when no game goes on, or the log is full.

        logits: float32 [rows, actions], values: float32 [rows, seats], for the rows of the round before. Evaluators
        inside the search need neither and may take many rounds at once.
        """

    @abstractmethod
    def roots(self) -> tuple[np.ndarray, np.ndarray]:
        """Of each row of the last block, int [rows] each: its slot, and the seat that moves at the root of its tree."""

    @abstractmethod
    def play_out(self, rows: np.ndarray, logits: np.ndarray, values: np.ndarray) -> None:
        """Answer these rows of the last block by a random playout each. rows: int [n]; the others stay as in `play`."""

    @abstractmethod
    def collect(self) -> dict[str, np.ndarray] | None:
        """Copies of what games that finished since the last call left behind, as `arrays.Log` describes it; None when
        there were none.
        """


class Arena(GameSlots):
    """Games whose rules are compiled."""

    def __init__(
        self, game: Game, kernels: ModuleType, search: arrays.Search, slots: int, features: np.ndarray | None = None
    ) -> None:
        super().__init__(game, search, slots, features)
        self._kernels = kernels
        self._games = arrays.allocate_games(game, slots, search.record)
        self.games, self._moves = self._games.game, self._games.moves
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
        answers = (self._no_logits if logits is None else logits, self._no_values if values is None else values)
        logged = (self._log, self._queue, self.counters, self._scratch, self._work, self.features)
        played = self._kernels.play(self.game.config, self.search, self._games, self._trees, *logged, *answers, rounds)
        return int(played)

    def play_out(self, rows: np.ndarray, logits: np.ndarray, values: np.ndarray) -> None:
        chosen = np.asarray(np.flatnonzero(self._trees.row >= 0)[rows], np.int64)
        told = (self.game.config, self.search, self._games, self._trees, self._work)
        self._kernels.play_out(*told, chosen, logits, values)

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
