"""Composes the next step: one token of each decoding row, and chunks of prompts in the room that is left."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.generation import Logprob
from gpuinfer.text.generator.page_pool import Ints
from gpuinfer.text.generator.prompts import SampleRow
from gpuinfer.text.generator.slot_table import SlotTable
from gpuinfer.text.generator.speculation import Proposal
from gpuinfer.text.sampling.sampler import PendingDraw
from gpuinfer.text.text_roofline import StepExtent, shared_positions
from gpuinfer.text.transformer import Step

Echo = tuple[Sequence[Logprob], Sequence[Logprob]]
"""Log-probabilities of tokens of a prompt, and of those that an answer has begun with."""
ECHO_BYTES = 64 * 2**20  # of logits of prompt tokens, in one step


class PromptChunk:
    """Tokens of a row's prefill, from `start` to before `end`."""

    __slots__ = ("draws", "echoes", "end", "last", "logits", "resumes", "row", "start")

    def __init__(self, row: SampleRow, start: int, end: int, logits: int) -> None:
        self.row, self.start, self.end = row, start, end
        self.logits = logits  # where its logits begin among those asked for
        self.last = end == row.first
        self.echoes = max(0, end - max(start, row.echoed_from))  # of its last tokens, those whose logits are wanted
        self.resumes = row.resumed  # the answer of its row goes on behind it
        self.draws = self.last and row.draws and not row.resumed  # its last logits give the first tokens of answers

    @property
    def rows(self) -> tuple[SampleRow, ...]:
        """The rows that are prefilled by it."""
        return (self.row, *self.row.followers)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step, and what its logits are for."""

    step: Step
    slots: Ints  # of its segments
    decoding: Ints  # slots of the rows that are past their prompts
    chunks: Sequence[PromptChunk]
    draws: Ints  # slots that a token is drawn for
    picks: Ints | None = None  # which logits each of them draws from; None: as they come
    again: int | None = None  # `counted_again`, of a step whose rows are the same for as long as it serves
    recomputed: int = 0  # tokens that had been computed before their rows gave back their pages
    proposals: Sequence[Proposal] = ()  # of each of `draws` the tokens that go behind its last one, if any go

    @property
    def rows(self) -> int:
        return len(self.slots)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of prompts that are computed for the first time."""
        return len(self.step.tokens) - len(self.decoding) - self.recomputed - self.proposed

    @property
    def proposed(self) -> int:
        """Tokens that have been proposed."""
        return sum(len(one.tokens) for one in self.proposals)


@dataclass(slots=True)
class LaunchedStep:
    """A step that has been launched, what it draws, and how things stood then."""

    plan: StepPlan
    drawing: PendingDraw | None
    echoes: Sequence[Echo]
    positions: Ints  # [draws] of the tokens that are drawn
    epochs: NDArray[np.int64]  # [draws] of their slots
    extent: StepExtent
    held: bool
    echoing: bool
    logits: Tensor | None = None  # of a step with proposals
    began: float = 0.0  # seconds on the clock of `time.perf_counter`
    drawn: int = 0  # tokens
    proposing_s: float = 0.0  # what it took to propose tokens
    spared_s: float = 0.0  # how much longer steps without proposals would have taken for these tokens


class StepComposer:
    """Composes steps of at most `step_tokens` tokens; decoding rows go in every step, even if they are more.

    While the rows stay the same the same arrays serve step after step, with new tokens and positions in them.

    `gather_steps`: beside decoding rows, prompts wait so many steps for other prompts, unless they would fill a
    sixteenth of the slots. For decoders whose steps are much faster without prompts, as CUDA graphs are.
    """

    def __init__(self, table: SlotTable, step_tokens: int, gather_steps: int) -> None:
        self._table = table
        self.step_tokens, self._gather_steps = step_tokens, gather_steps
        self.left = False  # prompts, or parts of them, that the last step had no room for
        self._gathered = 0  # steps that the prompts have waited
        self._begun = False  # they have waited enough, and go until all are through
        self._tokens, self._starts = np.zeros(table.slots, np.int32), np.zeros(table.slots, np.int32)
        self._ones, self._counting = np.ones(table.slots, np.int32), np.arange(table.slots, dtype=np.int32)
        self._echo_tokens = max(1, ECHO_BYTES // (4 * len(table.is_end)))
        self._steady: StepPlan | None = None
        self._turn = 0

    def changed(self) -> None:
        """Other rows decode than in the last step, or their pages are others."""
        self._steady = None

    def compose(
        self, prefilling: Sequence[SampleRow], most: int | None, only: Collection[SampleRow] | None
    ) -> StepPlan | None:
        """The next step; None when there is nothing to compute.

        `most`: the most tokens that fit in memory, decoding rows included. `only`: no other rows than these.
        """
        if most is None and only is None and self._gathers(prefilling):
            prefilling = ()
        if self._steady is None or prefilling or most is not None or only is not None or self._last_drawn(self._steady):
            decoding = self._decoding(most, only)
            chunks = self._chunks(prefilling, len(decoding), most, only)
            self._begun = self.left = len(chunks) < len(prefilling) or not all(chunk.last for chunk in chunks)
            if chunks:
                self._steady = None
                return self._mixed(decoding, chunks)
            if not len(decoding):
                return None
            plan = self._plain(decoding)
            self._steady = plan if most is None and only is None else None
        else:
            plan, self.left = self._steady, False
        np.take(self._table.last, plan.slots, out=plan.step.tokens, mode="clip")
        np.take(self._table.filled, plan.slots, out=plan.step.starts, mode="clip")
        return plan

    def with_proposals(self, plan: StepPlan, proposals: Sequence[Proposal]) -> StepPlan:
        """The same step of decoding rows, with proposed tokens behind the last ones, and logits of all tokens."""
        table, slots = self._table, plan.decoding
        lengths = np.array([1 + len(one.tokens) for one in proposals], np.int32)
        lasts = table.last[slots]
        tokens = [part for last, one in zip(lasts, proposals, strict=True) for part in ((last,), one.tokens)]
        firsts = (np.cumsum(lengths) - lengths).astype(np.int32)
        step = replace(
            plan.step,
            tokens=np.concatenate(tokens, dtype=np.int32),
            starts=plan.step.starts.copy(),
            lengths=lengths,
            wanted=np.arange(lengths.sum(), dtype=np.int32),
        )
        return replace(plan, step=step, picks=firsts, again=None, proposals=proposals)

    def room_for_proposals(self, rows: int) -> int:
        """Tokens that may go in a step of so many decoding rows, each with its logits."""
        return min(self.step_tokens - rows, self._echo_tokens)

    def _gathers(self, prefilling: Sequence[SampleRow]) -> bool:
        """Whether the prompts wait for more prompts."""
        if not self._gather_steps:
            return False
        enough = sum(1 + len(row.followers) for row in prefilling) >= max(1, self._table.slots // 16)
        if self._begun or enough or self._gathered >= self._gather_steps or not self._table.decodes.any():
            self._gathered = 0
            return False
        self._gathered += bool(prefilling)
        return True

    def _decoding(self, most: int | None, only: Collection[SampleRow] | None) -> Ints:
        """Slots of the decoding rows; in turns when not all may go."""
        table = self._table
        if only is None:  # a row whose last token is being drawn has nothing more to compute
            slots = np.flatnonzero(table.decodes & (table.filled < table.final)).astype(np.int32)
        else:
            slots = np.array(sorted(row.slot for row in only if table.decodes[row.slot]), np.int32)
        if most is None or len(slots) <= most:
            return slots
        self._turn = (self._turn + most) % len(slots)
        return np.roll(slots, -self._turn)[:most].copy()

    def _chunks(
        self, prefilling: Sequence[SampleRow], decoding: int, most: int | None, only: Collection[SampleRow] | None
    ) -> list[PromptChunk]:
        """In order of arrival, as much of each prompt as there is room for."""
        room = max(1, self.step_tokens - decoding)
        if most is not None:
            room = min(room, most - decoding)
        echo_room, logits, chunks = self._echo_tokens, decoding, []
        for row in prefilling:
            if room <= 0:
                break
            if only is not None and row not in only:
                continue
            start = int(self._table.filled[row.slot])
            end = min(start + room, row.first, max(start, row.echoed_from) + echo_room)
            if end == start:
                continue
            chunk = PromptChunk(row, start, end, logits)
            chunks.append(chunk)
            echo_room -= chunk.echoes
            logits += chunk.echoes or chunk.draws
            room -= end - start
        return chunks

    def _last_drawn(self, plan: StepPlan) -> bool:
        """Whether the last token of some row of the plan is being drawn."""
        return bool((self._table.filled[plan.slots] >= self._table.final[plan.slots]).any())

    def _plain(self, decoding: Ints) -> StepPlan:
        rows = len(decoding)
        counting = self._counting[:rows]
        adapters = self._table.adapter[decoding] if self._table.adapted else None
        pages = self._pages(decoding)
        step = Step(self._tokens[:rows], pages, self._starts[:rows], self._ones[:rows], counting, adapters)
        again = shared_positions(pages, self._table.filled[decoding])
        return StepPlan(step, decoding, decoding, (), draws=decoding, again=again)

    def _pages(self, slots: Ints) -> Ints:
        """The pages of these rows, in as many columns as the longest has."""
        pages: Ints = self._table.pages[slots, : self._table.held[slots].max()]
        return pages

    def _mixed(self, decoding: Ints, chunks: Sequence[PromptChunk]) -> StepPlan:
        table, rows = self._table, len(decoding)
        texts = [table.tokens[chunk.row.slot, chunk.start : chunk.end] for chunk in chunks]
        numbers = [chunk.row.work.adapter_number for chunk in chunks]
        adapters = followed(table.adapter[decoding], numbers) if table.adapted else None
        seats = followed(decoding, [chunk.row.slot for chunk in chunks])
        step = Step(
            np.concatenate([table.last[decoding], *texts]),
            self._pages(seats),
            followed(table.filled[decoding], [chunk.start for chunk in chunks]),
            followed(self._ones[:rows], [chunk.end - chunk.start for chunk in chunks]),
            followed(self._counting[:rows], wanted_logits(chunks, rows)),
            adapters,
        )
        slots, picks = first_draws(chunks)
        draws = followed(decoding, slots)
        again = sum(max(0, min(chunk.end, chunk.row.computed) - chunk.start) for chunk in chunks)
        if len(draws) == len(step.wanted) and picks == list(range(rows, len(draws))):
            return StepPlan(step, seats, decoding, chunks, draws, recomputed=again)
        return StepPlan(step, seats, decoding, chunks, draws, followed(self._counting[:rows], picks), recomputed=again)


def followed(first: Ints, then: list[int]) -> Ints:
    return np.concatenate([first, np.array(then, np.int32)])


def wanted_logits(chunks: Sequence[PromptChunk], first: int) -> list[int]:
    """Which of the step's tokens have their logits asked for; the chunks' begin at `first`."""
    found: list[int] = []
    for chunk in chunks:
        end = first + chunk.end - chunk.start
        if chunk.echoes:
            found.extend(range(end - chunk.echoes, end))
        elif chunk.draws:
            found.append(end - 1)
        first = end
    return found


def first_draws(chunks: Sequence[PromptChunk]) -> tuple[list[int], list[int]]:
    """Slots that draw their first token, and which of the logits they draw from: all samples of a prompt the same."""
    slots: list[int] = []
    picks: list[int] = []
    for chunk in chunks:
        if chunk.draws:
            pick = chunk.logits + max(chunk.echoes, 1) - 1
            for row in chunk.rows:
                slots.append(row.slot)
                picks.append(pick)
    return slots, picks
