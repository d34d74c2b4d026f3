"""The pages that rows have: what they find in the prefix tree, what they take, and what they leave for others."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.generator.cache import SlotTable
from gpuinfer.text.generator.pages import PagePool, pages_for
from gpuinfer.text.generator.prefixes import LEAST, Match, PrefixTree, cost_of
from gpuinfer.text.generator.prepared import Row
from gpuinfer.text.generator.seams import Ints
from gpuinfer.text.step import PAGE, Decoder

logger = logging.getLogger("gpuinfer")


class RowPages:
    """Writes `SlotTable.pages`. A row has the pages of its first `held` columns; no other row writes into the last one.

    A page that rows share is full. It is never written: what a row takes over of a page that is not full, or not wholly
    its own, is copied. Copies that have been promised are carried out before the next step computes.
    """

    def __init__(self, decoder: Decoder, table: SlotTable) -> None:
        self._decoder, self._table = decoder, table
        self.pool = PagePool(decoder.pages)
        self.tree = PrefixTree(self.pool, cost_of(decoder.shape))
        self._copies: list[tuple[int, int, Row]] = []  # source, target, whose target it is

    @property
    def available(self) -> int:
        """Pages that can be had: free ones, and those of the tree that no row has."""
        return len(self.pool) + self.tree.unused

    def find(self, row: Row) -> Match:
        """What there is of its first tokens. Those that it may not share are computed."""
        return self.tree.find(row.work.adapter_number, row.known[: row.may_share])

    def seat(self, row: Row, match: Match, spare: int) -> bool:
        """Give a row pages for all that it goes through at first, and one for each follower's copy of the last page, if
        so many and `spare` more can be had. It begins behind the `match`.
        """
        slot, found = row.slot, np.array(match.pages, np.int32)
        copies = len(row.followers) if row.first % PAGE and row.draws else 0
        own = pages_for(row.first) - len(found)
        self.tree.share(found)
        if self.available < own + copies + spare:
            self.tree.leave(found)
            return False
        partly, more = match.partly, match.more
        if partly is not None:  # which must not go while it is waited for
            self.tree.share(_one(partly.page))
            if self.available < own + copies:
                self.tree.leave(_one(partly.page))
                partly, more = None, 0
        pages = self._take(own + copies)
        table, held = self._table, len(found) + own
        table.pages[slot, :held] = [*match.pages, *pages[:own]]
        table.held[slot] = held
        table.filled[slot] = row.found = len(found) * PAGE + more
        table.outdated[slot] = row.alone
        row.spares = pages[own:]
        row.node = match.node or self.tree.root(row.work.adapter_number)
        if partly is not None:
            self._copies.append((partly.page, pages[0], row))
        return True

    def extend(self, slots: NDArray[np.integer[Any]]) -> None:
        """One more page for each of these rows. So many must be available."""
        table = self._table
        table.pages[slots, table.held[slots]] = self._take(len(slots))
        table.held[slots] += 1

    def carry_out(self) -> None:
        """What has been promised. Should copying fail, what was to be copied is computed."""
        if not self._copies:
            return
        copies, self._copies = self._copies, []
        try:
            self._decoder.copy_pages([source for source, _, _ in copies], [target for _, target, _ in copies])
        except Exception as error:  # noqa: BLE001  a copy only saves work
            logger.warning("a shared prefix could not be copied and is computed again: %s", error)
            for _, _, row in copies:
                self._table.filled[row.slot] -= self._table.filled[row.slot] % PAGE
        for source, _, _ in copies:
            self.tree.leave(_one(source))

    def computed(self, row: Row) -> None:
        """A chunk of its first tokens has been computed: what is full can be found from now on; all, if it was the last
        chunk.
        """
        slot = row.slot
        if not self._table.outdated[slot]:
            self._make_known(row, int(self._table.filled[slot]) == row.first)

    def follow(self, row: Row) -> None:
        """It has gone through its first tokens: its followers share its full pages, and have a copy of the last one."""
        table, leader = self._table, row.slot
        full = row.first // PAGE
        pages = table.pages[leader, :full]
        for one in row.followers:
            self.pool.share(pages)
            table.pages[one.slot, :full] = pages
            table.held[one.slot] = full
            if row.spares:
                table.pages[one.slot, full] = row.spares.pop()
                table.held[one.slot] += 1
            table.filled[one.slot] = min(row.first, int(table.held[one.slot]) * PAGE)
            table.outdated[one.slot] = table.outdated[leader]
            one.node, one.found = row.node, row.found

    def distrust(self, row: Row) -> None:
        """Something that it has computed, or taken over, is no number. What masks hide is multiplied with zero, and NaN
        times zero is NaN: so this may stand in pages of tokens that are healthy. None of it can be found any more, and
        rows that have such pages leave nothing for others.
        """
        self.tree.distrust(row.work.adapter_number, self._table.tokens[row.slot])
        self._table.outdated[row.slot] = True
        for one in self._table.rows:
            if one is not None and one.node is not None and one.node.key and one.node.parent is None:
                self._table.outdated[one.slot] = True

    def give_back(self, row: Row) -> None:
        """The row has no pages any more; what others may want of them stays in the tree."""
        slot, table = row.slot, self._table
        held = int(table.held[slot])
        if not held:
            return
        if not table.outdated[slot]:
            self._make_known(row, last=True)
        pages = np.array([*table.pages[slot, :held].tolist(), *row.spares], np.int32)
        table.held[slot] = 0
        row.node, row.spares = None, []
        self.tree.leave(pages)

    def _take(self, count: int) -> list[int]:
        while len(self.pool) < count:
            self.tree.evict()
        return self.pool.take(count)

    def _make_known(self, row: Row, last: bool) -> None:
        """Have what the row has computed found in the tree. A page that is there already takes the place of the row's
        own, as all behind it must share it too. `last`: the page that is not full as well.
        """
        table, slot = self._table, row.slot
        filled = table.known_filled(slot)
        assert row.node is not None
        column = (row.node.start + PAGE) // PAGE if row.node.key else 0
        while column < filled // PAGE:
            key = table.tokens[slot, column * PAGE : (column + 1) * PAGE].tobytes()
            page, there = int(table.pages[slot, column]), row.node.children.get(key)
            if there is None:
                self._unknown(page)
                there = self.tree.add(row.node, key, page)
            elif there.page != page:
                self._unknown(page)
                self.tree.share(_one(there.page))
                table.pages[slot, column] = there.page
                self.tree.leave(_one(page))
            row.node = there
            column += 1
        if last and filled % PAGE >= LEAST:
            key, page = table.tokens[slot, column * PAGE : filled].tobytes(), int(table.pages[slot, column])
            self._unknown(page)
            if not self.tree.covers(row.node, key):
                self.tree.add(row.node, key, page)

    def _unknown(self, page: int) -> None:
        """More has been written into it than what it is known for."""
        node = self.tree.at(page)
        if node is not None:
            self.tree.drop(node)


def _one(page: int) -> Ints:
    return np.array([page], np.int32)
