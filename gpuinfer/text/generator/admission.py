"""Which slot a row gets, what it takes over from others, and whom it waits for."""

from __future__ import annotations

from collections import deque

import numpy as np

from gpuinfer.text.generator.cache import LEAST, Copies, Places, Prefixes, PrefixMatch, SlotTable
from gpuinfer.text.generator.prepared import NO_TOKENS, PromptWork, Row, row_of
from gpuinfer.text.generator.seams import Language, Sampler
from gpuinfer.text.step import Decoder


class Admission:
    """Places prompts in the order they came. `prefilling` are the rows that go through their prompts, in that order."""

    def __init__(self, decoder: Decoder, table: SlotTable, sampler: Sampler, language: Language) -> None:
        self._table, self._sampler, self._language = table, sampler, language
        self._places, self._prefixes = Places(table.slots), Prefixes(table)
        self._copies = Copies(decoder, table)
        self._pending: deque[PromptWork] = deque()
        self._reserved = 0  # slots that pending prompts will take
        self.prefilling: list[Row] = []
        self.cached = 0  # prompt tokens that were not computed, in all

    @property
    def free(self) -> int:
        return len(self._places) - self._reserved

    def add(self, work: PromptWork) -> None:
        """It is placed before the next step. There must be `free` slots for all its samples."""
        self._pending.append(work)
        self._reserved += work.prepared.samples

    def place(self) -> list[tuple[PromptWork, Exception]]:
        """Give slots to all that is pending. Those that the sampler refuses come back with the reason."""
        self._end_waits()
        refused: list[tuple[PromptWork, Exception]] = []
        while self._pending:
            work = self._pending.popleft()
            self._reserved -= work.prepared.samples
            try:
                self._place(work)
            except Exception as error:  # noqa: BLE001  of this prompt's own making
                refused.append((work, error))
        self._copies.carry_out()
        return refused

    def withdraw(self, work: PromptWork) -> None:
        """Nobody wants it any more: its rows' slots are free."""
        if not work.rows and work in self._pending:
            self._pending.remove(work)
            self._reserved -= work.prepared.samples
        for row in work.rows:
            if self._table.rows[row.slot] is row:
                self.release(row)
        if work.rows:
            self.prefilling[:] = [row for row in self.prefilling if row.work is not work]

    def release(self, row: Row) -> None:
        """The row is done: its slot is free, and what it holds may serve others."""
        if row.draws:
            self._sampler.release(row.slot)
        self._table.leave(row.slot)
        self._give_back(row.slot)

    def forget(self) -> None:
        """The weights have changed: nothing that a slot holds now may serve another prompt. Between two steps."""
        self._table.outdated[:] = [row is not None for row in self._table.rows]
        self._prefixes.clear()
        self._places.forget()
        for row in self.prefilling:
            row.owner = None  # it computes itself what it waited for

    def forget_adapter(self, number: int) -> None:
        """It has been unloaded: no prompt will begin with what it has computed."""
        for slot in np.flatnonzero(self._table.adapter == number).tolist():
            if self._table.rows[slot] is None:
                self._prefixes.drop(slot)
                self._places.spoil(slot)

    def _give_back(self, slot: int) -> None:
        if self._table.filled[slot] >= LEAST and not self._table.outdated[slot]:
            self._prefixes.add(slot)
            self._places.keep(slot)
        else:
            self._prefixes.drop(slot)
            self._places.give(slot)

    def prefilled(self, row: Row) -> None:
        """It has gone through its first tokens, and they are copied to the slots of its followers."""
        self.prefilling.remove(row)
        for one in (row, *row.followers):
            self._table.filled[one.slot] = row.first
            if row.first >= LEAST:
                self._prefixes.add(one.slot)

    def _place(self, work: PromptWork) -> None:
        prepared = work.prepared
        rows = [row_of(self._language, work, n) for n in range(prepared.samples) if prepared.computes(n)]
        if not prepared.begun:
            self._place_together(rows)
            return
        for row in rows:  # each finds what it shares with those before it
            self._place_together([row])

    def _place_together(self, rows: list[Row]) -> None:
        """Rows that go through the same tokens at first."""
        leader, *others = rows
        # Tokens whose logits are wanted may not come from a copy: the last one, and those that are echoed.
        fresh = leader.known[: min(leader.first, leader.echoed_from + 1)]
        match = self._prefixes.find(fresh, leader.work.adapter_number)
        slots = self._take(match, len(rows))
        for row, slot in zip(rows, slots, strict=True):
            row.slot = slot
        try:
            self._introduce(rows)
        except BaseException:
            for slot in slots:
                self._give_back(slot)
            raise
        for row in rows:
            self._prefixes.drop(row.slot)
            self._copies.before_overwriting(row.slot)
            self._table.occupy(row)
        leader.work.rows += rows
        leader.followers = tuple(others)
        self.prefilling.append(leader)
        if match is not None:
            self._take_over(leader, match)
        if leader.first >= LEAST:
            self._prefixes.add(leader.slot)

    def _take(self, match: PrefixMatch | None, count: int) -> list[int]:
        """Slots for a prompt's samples, the one that goes through the prompt first.

        That is the slot with the beginning itself if it is free, unless most of what it holds would be lost there.
        """
        if match is not None and match.ready and self._places.holds(match.slot):
            if 2 * match.shared >= self._table.filled[match.slot] or self._places.scarce(match.slot):
                self._places.take_this(match.slot)
                return [match.slot] + [self._places.take() for _ in range(count - 1)]
            self._places.used(match.slot)
        return [self._places.take() for _ in range(count)]

    def _introduce(self, rows: list[Row]) -> None:
        """Make them known to the sampler. Raises `BadPrompt`, with none of them known."""
        known = []
        try:
            for row in rows:
                if row.draws:
                    prepared, begun = row.work.prepared, NO_TOKENS if row.begun is None else row.begun.tokens
                    number = prepared.first_sample + row.number
                    self._sampler.admit(row.slot, prepared.sampling, prepared.tokens, prepared.key, number, begun)
                    known.append(row.slot)
        except BaseException:
            for slot in known:
                self._sampler.release(slot)
            raise

    def _take_over(self, row: Row, match: PrefixMatch) -> None:
        """Begin after what is there already, or wait for it."""
        if not match.ready:
            row.owner, row.source, row.shared = self._table.rows[match.slot], match.slot, match.shared
            return
        if match.slot == row.slot:
            self._table.filled[row.slot] = match.shared
        else:
            self._copies.promise(match.slot, row.slot, match.shared)
        self._count(row, match.shared)

    def _end_waits(self) -> None:
        """Rows take over the beginning that they wait for once it has been computed; what there is of it, if its owner
        is gone.

        It runs before slots are given away, so that what an owner left is still there.
        """
        for row in self.prefilling:
            if row.owner is None:
                continue
            shared = min(row.shared, int(self._table.filled[row.source]))
            if shared < row.shared and self._table.rows[row.source] is row.owner:
                continue
            row.owner = None
            if shared >= LEAST:
                self._copies.promise(row.source, row.slot, shared)
                self._count(row, shared)

    def _count(self, row: Row, shared: int) -> None:
        if row.number == row.work.rows[0].number:
            row.work.cached = min(shared, len(row.work.prepared.tokens))
        self.cached += shared
