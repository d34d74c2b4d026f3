"""Slots and pages for rows: the queue for pages, waiting for another row's prefill, and preemption."""

from __future__ import annotations

import bisect
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.generator.page_pool import LEAST, Ints, PrefixMatch, pages_for
from gpuinfer.text.generator.prompts import NO_TOKENS, PromptWork, SampleRow
from gpuinfer.text.generator.slot_table import RowPages, SlotTable
from gpuinfer.text.language import Language
from gpuinfer.text.sampling import Sampler
from gpuinfer.text.transformer import PAGE, Decoder

AHEAD = 16  # positions before its page is full a row gets the next one: so few steps look for full pages
OWNERS_LOOKED_AT = 64  # rows that compute something that begins alike, the latest ones


class SlotAdmission:
    """Places prompts in order of arrival. Rows in the queue have a slot, and wait for pages or for another row that is
    computing their prefix; `prefilling` are the rows that have pages and are not prefilled yet, in the same order.

    Pages are given in order of arrival. When a decoding row needs a page and there is none, the youngest row is
    preempted: it gives all of its pages back and is computed again when there is room. So the oldest row always goes
    on. `changed` is called when other rows decode than before, or their pages are others.
    """

    def __init__(
        self,
        decoder: Decoder,
        table: SlotTable,
        sampler: Sampler,
        language: Language,
        changed: Callable[[], None],
    ) -> None:
        self._table, self._sampler, self._language, self._changed = table, sampler, language, changed
        self.pages = RowPages(decoder, table)
        self._free = list(range(table.slots - 1, -1, -1))  # slots; the lowest is taken first
        self._came = 0  # rows until now
        self._queue: list[SampleRow] = []  # the oldest first
        self.prefilling: list[SampleRow] = []
        self._beginnings: dict[tuple[int, bytes], dict[SampleRow, None]] = {}  # of those, by their first LEAST tokens
        self._steps_left = 0  # for which rows that answer have pages
        self.most = table.slots  # rows that have slots at once
        self.lookahead = 0  # positions beyond the next one that each row may fill in a step
        self.shares_prefixes = True  # a prompt takes over what others have computed
        self.cached = 0  # prompt tokens that were not computed, in all
        self.waited = self.preempted = 0  # rows that there were no pages for, and that had to give theirs back

    @property
    def free(self) -> int:
        """Slots for rows to come: up to `most`, or for one prompt of more samples all where no row has any."""
        taken = self._table.slots - len(self._free)
        return min(len(self._free), max(0, self.most - taken)) if taken else len(self._free)

    def preempt(self, pages: int) -> None:
        """Preempt the youngest rows until the others have so few pages, the oldest one aside. Between two steps."""
        tree = self.pages.tree
        while self.pages.in_use - tree.unused > pages:
            seated = sorted((one for one in self._table.rows if one is not None and one.node is not None), key=_age)
            if len(seated) < 2:
                break
            self._preempt(seated[-1])

    def preempt_all(self) -> None:
        """Take all pages from all rows, which are computed again."""
        for row in [one for one in self._table.rows if one is not None and one.node is not None]:
            self._preempt(row)

    def _preempt(self, row: SampleRow) -> None:
        self._suspend(row)
        self.preempted += 1
        self._steps_left = 0
        self._changed()

    def add(self, work: PromptWork[SampleRow]) -> None:
        """Slots for a prompt, of which there must be `free` ones for all its samples; its rows wait for pages. Raises
        what the sampler refuses it with, which leaves its slots free.
        """
        prepared = work.prepared
        rows = [SampleRow(self._language, work, n) for n in range(prepared.samples) if prepared.computes(n)]
        for row in rows:
            row.alone = not self.shares_prefixes
        together = [rows] if not prepared.begun else [[row] for row in rows]  # those that have begun differ
        for group in together:
            self._give_slots(group)
            group[0].followers = tuple(group[1:])
            work.rows += group
            self._queue.append(group[0])

    def place(self) -> None:
        """Before a step: pages for the rows that decode, then for as many rows in the queue as can be."""
        self._extend()
        if self._queue:
            self._seat_all()
            self.pages.carry_out()

    def withdraw(self, work: PromptWork[SampleRow]) -> None:
        """A prompt is cancelled, or has failed: its rows' slots and pages are free."""
        for row in work.rows:
            if self._table.rows[row.slot] is row:
                self._leave_prefill(row)
                self.release(row)
        if work.rows:
            self._queue[:] = [row for row in self._queue if row.work is not work]

    def release(self, row: SampleRow) -> None:
        """The row is done: its slot and its pages are free, and what these hold may serve others."""
        if row.draws:
            self._sampler.release(row.slot)
        self.pages.give_back(row)
        self._table.leave(row.slot)
        self._free.append(row.slot)

    def distrust(self, row: SampleRow) -> bool:
        """The row's logits are NaN. Returns whether shared pages may be the cause: then it is computed again without
        them.
        """
        self.pages.distrust(row)
        if not row.found:
            return False
        row.alone = True
        self._suspend(row)
        return True

    def forget(self) -> None:
        """The weights have changed: no page of now may serve another prompt. Between two steps."""
        self._table.outdated[:] = [row is not None for row in self._table.rows]
        self.pages.tree.forget()
        self._beginnings.clear()

    def prefilled(self, row: SampleRow) -> None:
        """The row is prefilled, and its followers with it."""
        self._leave_prefill(row)
        self.pages.follow(row)
        self._steps_left = 0

    def _give_slots(self, rows: list[SampleRow]) -> None:
        """Slots for these rows, which the sampler knows from then on. Raises `BadPrompt`, with nothing changed."""
        known: list[SampleRow] = []
        for row in rows:
            row.slot, row.age = self._free.pop(), self._came
            self._came += 1
        try:
            for row in rows:
                if row.draws:
                    prepared, begun = row.work.prepared, NO_TOKENS if row.begun is None else row.begun.tokens
                    number = prepared.first_sample + row.number
                    self._sampler.admit(row.slot, prepared.sampling, prepared.tokens, prepared.key, number, begun)
                    known.append(row)
        except BaseException:
            for row in known:
                self._sampler.release(row.slot)
            self._free += [row.slot for row in rows]
            raise
        for row in rows:
            self._table.occupy(row)

    def _seat_all(self) -> None:
        """Pages for those in the queue, in their order, until there are too few."""
        waiting: list[SampleRow] = []
        queue, self._queue, short = deque(self._queue), [], False
        while queue:
            row = queue.popleft()
            if short or self._waits_for_owner(row):
                waiting.append(row)
            elif not self._seat(row, queue):
                waiting.append(row)
                short = row.owner is None
            if short and not waiting[-1].waited:
                waiting[-1].waited = True
                self.waited += 1 + len(waiting[-1].followers)
        self._queue = waiting

    def _waits_for_owner(self, row: SampleRow) -> bool:
        """Whether another row is still computing this row's prefix."""
        owner, table = row.owner, self._table
        if owner is None:
            return False
        going = table.rows[owner.slot] is owner and owner.node is not None and not table.outdated[owner.slot]
        if going and table.filled[owner.slot] < min(row.shared, owner.first):
            return True
        row.owner = None
        return False

    def _seat(self, row: SampleRow, behind: deque[SampleRow]) -> bool:
        """Give a row pages for its prefill, beside those that the tree holds. False: it waits for pages, or for its
        `owner` if it has one now.
        """
        alone = not self._table.held.any()
        spare = self._spare(row, alone)
        if self.pages.available <= spare:
            return False
        match = self.pages.find(row)
        if self._finds_owner(row, match):
            return False
        if alone:
            self._split(row, behind)
        if not self.pages.seat(row, match, spare):
            return False
        self.prefilling.append(row)
        if row.first >= LEAST:
            self._beginnings.setdefault(_beginning(row), {})[row] = None
        if not row.computed and row.number == row.work.rows[0].number:
            row.work.cached = min(row.found, len(row.work.prepared.tokens))
        if not row.computed:
            self.cached += row.found
        return True

    def _spare(self, row: SampleRow, alone: bool) -> int:
        """Pages that must stay free when a row begins, so that it is not preempted at once: one for each sample, and
        half a page for each decoding row if it has been preempted before.
        """
        if alone:
            return 0
        return 1 + len(row.followers) + (int(np.count_nonzero(self._table.decodes)) // 2 if row.computed else 0)

    def _split(self, row: SampleRow, behind: deque[SampleRow]) -> None:
        """No row has pages, and there are too few for this one and its followers: put some of these off."""
        room = self.pages.available - pages_for(row.first)
        if row.first % PAGE and row.draws and len(row.followers) > room:
            later = row.followers[max(0, room) :]
            row.followers = row.followers[: max(0, room)]
            behind.extendleft(reversed(later))

    def _finds_owner(self, row: SampleRow, match: PrefixMatch) -> bool:
        """Whether a row is computing so much more of this row's prefix that waiting for it is worth a copy. That row
        came earlier, so waiting costs nothing.
        """
        most = row.may_share
        if most < LEAST or (alike := self._beginnings.get(_beginning(row))) is None:
            return False
        owners = [one for one in list(alike)[-OWNERS_LOOKED_AT:] if not self._table.outdated[one.slot]]
        if not owners:
            return False
        width = min(most, max(one.first for one in owners))
        slots = np.array([one.slot for one in owners], np.int32)
        differs = self._table.tokens[slots, :width] != row.known[:width]
        first = np.where(differs.any(axis=1), differs.argmax(axis=1), width)
        shared = np.minimum(first, [one.first for one in owners])
        best = int(shared.argmax())
        rest = int(shared[best]) % PAGE
        later = int(shared[best]) - (rest if rest < LEAST else 0)
        if later < match.tokens + LEAST:
            return False
        row.owner, row.shared = owners[best], -(-later // PAGE) * PAGE  # a page can be found when it is full
        return True

    def _extend(self) -> None:
        """Pages for the next positions of decoding rows."""
        if self._steps_left > 0:
            self._steps_left -= 1
            return
        table = self._table
        slots = np.flatnonzero(table.decodes)
        if not len(slots):
            return
        left = self._positions_left(slots)
        if left.min() <= self.lookahead:
            soon = left <= max(AHEAD, self.lookahead)
            if np.count_nonzero(soon) <= self.pages.available:
                self.pages.extend(slots[soon])
                left[soon] += PAGE
            else:
                self._extend_by_age(slots[left <= 0])
                left = self._positions_left(np.flatnonzero(table.decodes))
            self._changed()
        self._steps_left = int(left.min(initial=PAGE)) - self.lookahead - 1

    def advanced(self) -> None:
        """Rows have come further than a step takes them."""
        self._steps_left = 0

    @property
    def must_preempt(self) -> bool:
        """Whether the next step needs more pages for decoding rows than are available."""
        if self._steps_left > 0:
            return False
        left = self._positions_left(np.flatnonzero(self._table.decodes))
        return int(np.count_nonzero(left <= 0)) > self.pages.available

    def _positions_left(self, slots: NDArray[np.integer[Any]]) -> Ints:
        """How many more tokens each row's pages have room for; more than AHEAD for a row that needs no other page."""
        room = self._table.held[slots] * PAGE
        # the last token of an answer takes no place
        left: Ints = np.where(room < self._table.final[slots], room - self._table.filled[slots], AHEAD + PAGE)
        return left

    def _extend_by_age(self, slots: NDArray[np.integer[Any]]) -> None:
        """One page for each, the oldest first. While there is none the youngest row that has pages is preempted."""
        rows = [row for slot in slots.tolist() if (row := self._table.rows[slot]) is not None]
        for row in sorted(rows, key=_age):
            while row.node is not None and not self.pages.available:
                seated = [one for one in self._table.rows if one is not None and one.node is not None]
                self._preempt(max(seated, key=_age))
            if row.node is not None:
                self.pages.extend(np.array([row.slot], np.int32))

    def _suspend(self, row: SampleRow) -> None:
        """Take the row's pages: it is computed again when there is room, a decoding row with its whole answer, whose
        last token goes through the model next.
        """
        table, slot = self._table, row.slot
        tokens = table.tokens[slot, : table.known(slot)].copy() if table.decodes[slot] else None
        filled = int(table.filled[slot])
        self._leave_prefill(row)
        self.pages.give_back(row)
        row.suspend(filled, tokens)
        table.begin_anew(slot)
        if tokens is not None:
            table.last[slot] = tokens[-1]
            self._sampler.go_back(slot, len(tokens) - len(row.work.prepared.tokens))
        table.decodes[slot] = False
        table.filled[slot] = 0
        bisect.insort(self._queue, row, key=_age)

    def _leave_prefill(self, row: SampleRow) -> None:
        if row not in self.prefilling:
            return
        self.prefilling.remove(row)
        alike = self._beginnings.get(_beginning(row), {})
        alike.pop(row, None)
        if not alike:
            self._beginnings.pop(_beginning(row), None)


def _beginning(row: SampleRow) -> tuple[int, bytes]:
    return row.work.adapter_number, row.known[:LEAST].tobytes()


def _age(row: SampleRow) -> int:
    return row.age
