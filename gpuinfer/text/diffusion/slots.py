"""Which slot and which pages each row has, and its canvas."""

from __future__ import annotations

from collections import deque

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.diffusion.rows import Row
from gpuinfer.text.generator.pages import PagePool, pages_for


class Slots:
    """`tokens` int32 [slots, positions] are all canvases, `pages` int32 [slots, columns] where their keys and values
    lie: all that a canvas needs, from its beginning to its end. `active` are the rows that have one, as they came.
    """

    def __init__(self, slots: int, length: int, mask_token: int, pages: int | None = None) -> None:
        """`pages`: of the cache; None: enough for all slots."""
        self.tokens: NDArray[np.int32] = np.full((slots, length), mask_token, np.int32)
        self.rows: list[Row | None] = [None] * slots  # whose each is; a guided row has two
        self.active: list[Row] = []
        self.pages: NDArray[np.int32] = np.zeros((slots, pages_for(length)), np.int32)
        self.held: NDArray[np.int32] = np.zeros(slots, np.int32)  # columns of `pages` that are the canvas's
        self.pool = PagePool(slots * pages_for(length) if pages is None else pages)
        self.waited = 0  # rows that there was a slot for, and too few pages
        self._mask_token = mask_token
        self._free = list(range(slots))[::-1]
        self._pending: deque[Row] = deque()
        self._promised = 0  # slots that these will take

    @property
    def free(self) -> int:
        """For rows that nobody has added yet. Guided ones may have been promised more than there are: they wait."""
        return max(0, len(self._free) - self._promised)

    def add(self, row: Row) -> None:
        """It is placed as soon as there is room, slots and pages; rows are, in the order they came."""
        self._pending.append(row)
        self._promised += row.plan.slots

    def place(self) -> list[Row]:
        """Give slots to all that there is room for. They begin now."""
        placed = []
        while self._pending and self._pending[0].plan.slots <= len(self._free):
            row = self._pending[0]
            if row.plan.slots * pages_for(row.layout.end) > len(self.pool):
                self.waited += not row.waited
                row.waited = True
                break
            self._pending.popleft()
            self._promised -= row.plan.slots
            self._occupy(row)
            placed.append(row)
        return placed

    def has(self, row: Row) -> bool:
        """Whether it is under way still."""
        return row.slot >= 0 and self.rows[row.slot] is row

    def leave(self, row: Row) -> None:
        """Nobody goes on with it: its slots are free."""
        if row in self._pending:
            self._pending.remove(row)
            self._promised -= row.plan.slots
        if not self.has(row):
            return
        self.active.remove(row)
        for slot in row.slots:
            self.rows[slot] = None
            self._free.append(slot)
            self.pool.free(self.pool.leave(self.pages[slot, : self.held[slot]]))
            self.held[slot] = 0

    def _occupy(self, row: Row) -> None:
        row.slot = self._free.pop()
        row.twin = self._free.pop() if row.plan.slots == 2 else -1
        for slot in row.slots:
            self.rows[slot] = row
            self.held[slot] = pages_for(row.layout.end)
            self.pages[slot, : self.held[slot]] = self.pool.take(int(self.held[slot]))
            self.tokens[slot, : row.layout.end] = self._mask_token
        self.tokens[row.slot, : row.layout.prompt] = row.work.planned.tokens
        self.active.append(row)
