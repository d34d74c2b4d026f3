"""Which slot a row gets, what it takes over from others, and whom it waits for."""

from __future__ import annotations

from collections import deque

from gpuinfer.text.generator.cache import LEAST, Copies, Places, Prefixes, PrefixMatch, SlotTable
from gpuinfer.text.generator.giving import Given
from gpuinfer.text.generator.prepared import Language, PromptWork, Row, Sampler
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
        if work.rows and work.rows[0] in self.prefilling:
            self.prefilling.remove(work.rows[0])

    def release(self, row: Row) -> None:
        """The row is done: its slot is free, and what it holds may serve others."""
        if row.work.prepared.limit:
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

    def _give_back(self, slot: int) -> None:
        if self._table.filled[slot] >= LEAST and not self._table.outdated[slot]:
            self._prefixes.add(slot)
            self._places.keep(slot)
        else:
            self._prefixes.drop(slot)
            self._places.give(slot)

    def prefilled(self, row: Row) -> None:
        """A prompt is through, and copied to the slots of its other samples."""
        self.prefilling.remove(row)
        prompt = len(row.work.prepared.tokens)
        for other in row.work.rows:
            self._table.filled[other.slot] = prompt
            if prompt >= LEAST:
                self._prefixes.add(other.slot)

    def _place(self, work: PromptWork) -> None:
        prepared = work.prepared
        long = len(prepared.tokens) >= LEAST
        # All of a prompt's logits are wanted when it is echoed, so none of it may come from a copy.
        echoed = prepared.sampling.prompt_logprobs is not None
        match = self._prefixes.find(prepared.tokens) if long and not echoed else None
        slots = self._take(match, prepared.samples)
        try:
            rows = self._rows(work, slots)
        except BaseException:
            for slot in slots:
                self._give_back(slot)
            raise
        for row in rows:
            self._prefixes.drop(row.slot)
            self._copies.before_overwriting(row.slot)
            self._table.occupy(row)
        work.rows = rows
        self.prefilling.append(rows[0])
        if match is not None:
            self._take_over(rows[0], match)
        if long:
            self._prefixes.add(rows[0].slot)

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

    def _rows(self, work: PromptWork, slots: list[int]) -> list[Row]:
        """The rows, known to the sampler. Raises `BadPrompt`, with none of them known."""
        prepared, rows = work.prepared, []
        sampling = prepared.sampling
        for number, slot in enumerate(slots):
            row = Row(work, number, slot)
            if sampling.stop or prepared.parts:
                growing = self._language.growing(sampling.stop, not sampling.skip_special_tokens)
                row.growing = growing if sampling.stop else None
                row.given = Given(number, growing, pushed=bool(sampling.stop)) if prepared.parts else None
            if prepared.matcher is not None:
                row.matcher = prepared.matcher.copy()
            if sampling.logprobs is not None:
                row.logprobs = []
            rows.append(row)
        if prepared.limit:
            self._introduce(work, slots)
        return rows

    def _introduce(self, work: PromptWork, slots: list[int]) -> None:
        prepared, known = work.prepared, []
        try:
            for number, slot in enumerate(slots, prepared.first_sample):
                self._sampler.admit(slot, prepared.sampling, prepared.tokens, prepared.key, number)
                known.append(slot)
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
        row.work.cached = shared
        self.cached += shared
