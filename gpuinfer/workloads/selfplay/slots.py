"""What every kind of arena has: slots for games, a queue of games to come, counters, and the block of leaves."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.game import Game

LOGGED_GAMES = 256  # at least; a full log makes slots wait until it is collected


class Slots(ABC):
    """Games in lockstep. `play` → a block of leaves; its answers go into the next `play`, which looks at all of them.

    `features` is where the leaves are written: [slots × determinizations, features], by default memory of its own.
    """

    _under_way: np.ndarray  # int64 [slots]: the number of the game in each, or `arrays.IDLE`
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
        return float(self._moves[self._under_way != arrays.IDLE].sum()) / self.game.max_moves

    def spare(self, busy: int) -> int:
        """How many more games to queue: for each free slot one, and a few so that none waits for the next round."""
        ahead = max(1, self.slots // 16) if self.search.evaluator == arrays.NETWORK else 4 * self.slots
        return max(0, self.slots - busy + ahead - self.queued)

    @property
    def games(self) -> np.ndarray:
        """int64 [slots]: the number of the game in each, or `arrays.IDLE`."""
        return self._under_way

    @property
    def busy(self) -> int:
        """Slots with a game."""
        return int(np.count_nonzero(self._under_way != arrays.IDLE))

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
