"""The rows under way, by slot, in arrays (`SlotTable`): their tokens and their pages; and the pages that rows find in
the prefix tree, take, and leave for others (`RowPages`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.generator.page_pool import LEAST, Ints, PagePool, PrefixMatch, PrefixTree, pages_for, prefix_cost
from gpuinfer.text.generator.prompts import SampleRow
from gpuinfer.text.language.list_walks import ListWalks
from gpuinfer.text.transformer import PAGE, Decoder


class SlotTable:
    """`slots` slots of `length` positions. All arrays are indexed by slot. `tokens` takes memory only where it is
    written.
    """

    def __init__(self, slots: int, length: int, vocabulary: int, end_tokens: Sequence[int]) -> None:
        self.slots, self.length = slots, length
        self.tokens = np.empty((slots, length), np.int32)  # of prompt and answer
        self.flat = self.tokens.reshape(-1)
        self.pages = np.zeros((slots, pages_for(length)), np.int32)  # which page holds which positions, as in a `Step`
        self.held = np.zeros(slots, np.int32)  # so many columns of `pages` are the row's
        self.filled = np.zeros(slots, np.int32)  # positions that the cache holds
        self.prompt = np.zeros(slots, np.int32)  # tokens of the living row's prompt; 0: free
        self.last = np.zeros(slots, np.int32)  # the token drawn last: what the next step takes; see `Step.drawn`
        self.unread = np.zeros(slots, np.int32)  # tokens that have been drawn for it and that the host has not seen
        self.epoch = np.zeros(slots, np.int64)  # grows when a row moves in, out, or begins anew
        self.final = np.zeros(slots, np.int32)  # the position of the last token that the answer may have
        self.decodes = np.zeros(slots, np.bool_)  # past its prompt: one token a step
        self.ends = np.zeros(slots, np.bool_)  # the end token ends it
        self.watched = np.zeros(slots, np.bool_)  # every token of it is looked at
        self.constrained = np.zeros(slots, np.bool_)
        self.adapter = np.zeros(slots, np.int32)  # the number of that which has computed it; 0: none has
        self.adapted = 0  # living rows that have one
        self.outdated = np.zeros(slots, np.bool_)  # other weights than the present ones have computed some of it
        self.processed: NDArray[np.float64] | None = (
            None  # [slots, length] once a row wants it: what each token was worth
        )
        self.walks: ListWalks | None = None  # once there is a row with a list
        self.listed = 0  # slots with one
        self.read = np.zeros(slots, np.bool_)  # its answer is given out while it grows
        self.readers = 0  # slots of which it is
        self._no_lists = np.zeros(slots, np.int8)
        self.rows: list[SampleRow | None] = [None] * slots
        self.bases = np.arange(slots, dtype=np.int64) * length  # of each slot in `flat`
        self.is_end = np.zeros(vocabulary, np.bool_)
        self.is_end[[token for token in end_tokens if 0 <= token < vocabulary]] = True

    def occupy(self, row: SampleRow) -> None:
        """Put a row in its slot, with the tokens of its prompt and those it resumes with; none is computed."""
        slot, prepared = row.slot, row.work.prepared
        self.begin_anew(slot)
        sampling, prompt = prepared.sampling, len(prepared.tokens)
        self.tokens[slot, : row.first] = row.known[: row.first]
        self.filled[slot] = 0
        self.outdated[slot] = False
        self.adapter[slot] = number = row.work.adapter_number
        self.adapted += int(number > 0)
        self.prompt[slot] = prompt
        self.final[slot] = prompt + prepared.limit - 1
        self.ends[slot] = not sampling.ignore_eos
        if row.walk is not None:
            self.walks = self.walks or row.walk.new_walks(self.slots)
            self.walks.seat(slot, row.walk)
            self.listed += 1
        if row.matcher is not None:
            self.constrained[slot] = self.watched[slot] = True
        elif row.growing is not None or row.logprobs is not None or sampling.stop_token_ids:
            self.watched[slot] = True
        if sampling.processed_logprobs:
            if self.processed is None:
                self.processed = np.zeros((self.slots, self.length))
            if row.begun is not None:
                self.processed[slot, prompt : prompt + len(row.begun.processed)] = row.begun.processed
        if row.given is not None:
            self.read[slot] = True
            self.readers += 1
        self.rows[slot] = row

    def leave(self, slot: int) -> None:
        """Empty the slot."""
        row, self.rows[slot] = self.rows[slot], None
        self.begin_anew(slot)
        if row is not None and row.walk is not None and self.walks is not None:
            self.walks.leave(slot)
            self.listed -= 1
        self.adapted -= int(self.adapter[slot] > 0)
        self.prompt[slot] = 0
        self.decodes[slot] = False
        if self.watched[slot]:
            self.watched[slot] = self.constrained[slot] = False
        if self.read[slot]:
            self.read[slot] = False
            self.readers -= 1

    def begin_anew(self, slot: int) -> None:
        """Discard what steps under way draw for this slot."""
        self.unread[slot] = 0
        self.epoch[slot] += 1

    def known(self, slot: int) -> int:
        """Tokens of prompt and answer that the host knows, of a row that is past its prompt."""
        return int(self.filled[slot] + 1 - self.unread[slot])

    def walked(self, slots: Ints, tokens: Ints) -> NDArray[np.int8]:
        """Advance these rows' lists by these tokens. int8 [rows]: 0, 1 when its list is complete, 2 when it forbids the
        token.
        """
        if not self.listed or self.walks is None:
            return self._no_lists[: len(slots)]
        return self.walks.advance(slots, tokens)


logger = logging.getLogger("gpuinfer")


class RowPages:
    """Writes `SlotTable.pages`. A row has the pages of its first `held` columns; no other row writes into the last one.

    A page that rows share is full. It is never written: what a row takes over of a page that is not full, or not wholly
    its own, is copied. Copies that have been promised are carried out before the next step computes.
    """

    def __init__(self, decoder: Decoder, table: SlotTable) -> None:
        self._decoder, self._table = decoder, table
        self.pool = PagePool(decoder.pages)
        self.tree = PrefixTree(self.pool, prefix_cost(decoder.shape))
        self._copies: list[tuple[int, int, SampleRow]] = []  # source, target, whose target it is

    @property
    def available(self) -> int:
        """Pages that can be taken: free ones, and those of the tree that no row has."""
        return len(self.pool) + self.tree.unused

    @property
    def in_use(self) -> int:
        """Pages that rows have, or that are kept for rows to come."""
        return self.pool.pages - self.pool.withheld - len(self.pool)

    def evict_unused(self) -> int:
        """Free all pages that no row has; how many were kept."""
        kept = self.tree.unused
        while self.tree.unused:
            self.tree.evict()
        return kept

    def return_memory(self) -> None:
        """The memory of free pages goes back, where it can page by page."""
        if self._decoder.pages_go_back:
            self._decoder.give_back(self.pool.free_pages)

    def limit(self, pages: int) -> None:
        """Let rows have so many pages in all, or as few more as they have now; the memory of the others goes back."""
        wanted = self.pool.pages - pages - self.pool.withheld
        if wanted < 0:
            self.pool.restore(-wanted)
            return
        while len(self.pool) < wanted and self.tree.unused:
            self.tree.evict()
        self._decoder.give_back(self.pool.withhold(min(wanted, len(self.pool))))

    def renew(self, pages: int) -> None:
        """A cache of another size, all empty: no row may have pages. Raises what `Decoder.resize` raises."""
        self._decoder.resize(self._decoder.slots, pages)
        self.pool = PagePool(self._decoder.pages)
        self.tree = PrefixTree(self.pool, prefix_cost(self._decoder.shape))

    def find(self, row: SampleRow) -> PrefixMatch:
        """The longest prefix of the row's shareable tokens that pages hold."""
        return self.tree.find(row.work.adapter_number, row.known[: row.may_share])

    def seat(self, row: SampleRow, match: PrefixMatch, spare: int) -> bool:
        """Give a row pages for its prefill, and one for each follower's copy of the last page, if so many and `spare`
        more are available. It begins behind the `match`.
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
        pages = self.take(own + copies)
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
        """Take one more page for each of these rows. So many must be available."""
        table = self._table
        table.pages[slots, table.held[slots]] = self.take(len(slots))
        table.held[slots] += 1

    def carry_out(self) -> None:
        """Make the promised copies. If copying fails, their positions are computed."""
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

    def computed(self, row: SampleRow) -> None:
        """A chunk of the row's prefill is computed: its full pages can be found now; all, if it was the last."""
        slot = row.slot
        if not self._table.outdated[slot]:
            self._make_known(row, int(self._table.filled[slot]) == row.first)

    def follow(self, row: SampleRow) -> None:
        """The row is prefilled: its followers share its full pages, and get a copy of the last one."""
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

    def distrust(self, row: SampleRow) -> None:
        """Something that the row has computed, or taken over, is NaN. Masked values are multiplied with zero, and NaN
        times zero is NaN: so NaN may stand in pages of healthy tokens too. None of the pages can be found any more, and
        rows that have such pages leave nothing for others.
        """
        self.tree.distrust(row.work.adapter_number, self._table.tokens[row.slot])
        self._table.outdated[row.slot] = True
        for one in self._table.rows:
            if one is not None and one.node is not None and one.node.key and one.node.parent is None:
                self._table.outdated[one.slot] = True

    def give_back(self, row: SampleRow) -> None:
        """Take all pages from a row; those that serve others stay in the tree."""
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

    def give(self, pages: list[int]) -> None:
        """Free pages that were taken for no row."""
        self.tree.leave(np.array(pages, np.int32))

    def take(self, count: int) -> list[int]:
        """Pages, of which so many must be available."""
        while len(self.pool) < count:
            self.tree.evict()
        return self.pool.take(count)

    def _make_known(self, row: SampleRow, last: bool) -> None:
        """Put the row's computed pages in the tree. A page that is there already takes the place of the row's own, as
        all pages behind it must share it too. `last`: the partial page as well.
        """
        table, slot = self._table, row.slot
        filled = int(table.filled[slot] - max(0, table.unread[slot] - 1))  # positions whose tokens the host knows
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
        """More has been written into the page than its node holds: drop the node."""
        node = self.tree.at(page)
        if node is not None:
            self.tree.drop(node)


def _one(page: int) -> Ints:
    return np.array([page], np.int32)
