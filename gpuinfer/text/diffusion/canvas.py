"""Prompts under way in masked diffusion: each row is a canvas that is filled in block by block, with slots and pages;
and the composer of steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.generation import Logprob
from gpuinfer.text.checkpoint.memory_estimate import most_outputs
from gpuinfer.text.diffusion.unmasking_plan import WARM_STEPS, CanvasLayout, UnmaskingPlan, cache_reach
from gpuinfer.text.generator.answer import ResumedAnswer, VersionSpans, with_version
from gpuinfer.text.generator.page_pool import Ints, PagePool, pages_for
from gpuinfer.text.generator.prompts import NO_TOKENS, PromptWork, answer_watchers
from gpuinfer.text.language import Language
from gpuinfer.text.language.list_walks import ListedMatcher
from gpuinfer.text.transformer import Shape, Step, Vectors


class CanvasRow:
    """One sample. Positions are those of its canvas, but where they are said to be of the answer."""

    __slots__ = (
        "begun", "blended", "block", "computed_by", "given", "growing", "idle", "kept", "layout", "logprobs", "masks",
        "number", "plan", "revealed", "slot", "start", "step", "steps", "steps_done", "stop", "stored", "twin",
        "understood", "version", "waited", "walk", "work",
    )  # fmt: skip

    def __init__(
        self,
        language: Language,
        work: PromptWork[CanvasRow],
        number: int,
        plan: UnmaskingPlan,
        layout: CanvasLayout,
    ) -> None:
        """A resumed answer is computed from its beginning, as the tokens ahead of its end are not known; only what
        follows is given out.
        """
        prepared = work.prepared
        self.work, self.number, self.plan, self.layout = work, number, plan, layout
        self.slot = self.twin = -1  # the twin's canvas has masks in place of the prompt: classifier-free guidance
        self.begun: ResumedAnswer | None = prepared.begun[number] if prepared.begun else None
        # `growing` looks for stop strings, `given` gives the answer out while it grows
        self.growing, self.given = answer_watchers(language, prepared, number)
        self.walk: ListedMatcher | None = None  # there are no constraints
        self.logprobs: list[Logprob | None] | None = None  # of each token of the answer, as it was committed
        if prepared.sampling.logprobs is not None:
            self.logprobs = [None] * (layout.end - layout.prompt)
        self.kept: Any = None  # by its decoder
        self.version = len(work.versions) - 1  # which of the work's computes it now
        self.computed_by: NDArray[np.int16] | None = None  # which has, by token of the answer; None: none but that one
        self.revealed = 0  # tokens of the answer that have no mask before them, and will stay
        self.steps_done = 0  # that decided something
        self.waited = False  # for pages
        self.stored = 0  # positions from the beginning that will not change and are in the cache
        self.understood = 0  # of the prompt, those that have been computed
        self.enter_block(0)

    def enter_block(self, number: int) -> None:
        self.block, end = number, self.layout.end
        self.start, self.stop = self.layout.bounds(number) if number < self.layout.blocks else (end, end)
        self.masks: Ints = np.arange(self.start, self.stop, dtype=np.int32)  # ascending
        self.blended: NDArray[np.float32] | None = None  # [masks, hidden] what these enter the next step with
        self.step = self.idle = 0
        self.steps = self.plan.steps_of(number, self.layout.blocks, self.stop - self.start)

    @property
    def slots(self) -> tuple[int, ...]:
        return (self.slot,) if self.twin < 0 else (self.slot, self.twin)

    @property
    def asks(self) -> Ints:
        """The positions whose logits its next decision is made from."""
        return np.arange(self.start, self.stop, dtype=np.int32) if self.plan.decoder.edits else self.masks

    @property
    def known(self) -> int:
        """How many positions from the beginning will not change."""
        if self.plan.decoder.edits:
            return self.start
        return int(self.masks[0]) if len(self.masks) else self.stop

    @property
    def versions(self) -> VersionSpans:
        """The weights that have computed the answer's tokens."""
        if self.computed_by is None:
            return ((0, self.work.versions[self.version]),)
        found: VersionSpans = ()
        changes = np.flatnonzero(np.diff(self.computed_by[: self.revealed], prepend=-1)).tolist()
        for at in changes:
            found = with_version(found, at, self.work.versions[self.computed_by[at]])
        return found

    def change_version(self, version: int) -> None:
        """Another of the work's versions computes the row from now on."""
        if self.understood and self.computed_by is None:
            self.computed_by = np.full(self.layout.end - self.layout.prompt, self.version, np.int16)
        self.version = version

    def reach(self) -> tuple[int, int]:
        """The first position and the end of what the next step computes of the row."""
        first, last = cache_reach(
            self.plan.cache,
            self.layout,
            self.start,
            self.stop,
            fresh=not self.step,
            warm=self.steps_done < WARM_STEPS,
            stored=self.stored,
        )
        return (max(0, min(first, self.start - 1)) if self.plan.shifted else first), last

    def passed(self, last: int, *, decided: bool) -> None:
        """A step has computed the row up to `last`; all blocks before are done."""
        self.understood = max(self.understood, min(last, self.layout.prompt))
        if self.plan.cache == "exact" and self.layout.attention is not None:
            self.stored = self.start // self.layout.attention * self.layout.attention if decided else last


class CanvasSlots:
    """`tokens` int32 [slots, positions] are all canvases, `pages` int32 [slots, columns] where their keys and values
    lie: all that a canvas needs, from its beginning to its end. `active` are the rows that have one, as they came.
    """

    def __init__(self, slots: int, length: int, mask_token: int, pages: int | None = None) -> None:
        """`pages`: of the cache; None: enough for all slots."""
        self.tokens: NDArray[np.int32] = np.full((slots, length), mask_token, np.int32)
        self.rows: list[CanvasRow | None] = [None] * slots  # by slot; a guided row has two
        self.active: list[CanvasRow] = []
        self.pages: NDArray[np.int32] = np.zeros((slots, pages_for(length)), np.int32)
        self.held: NDArray[np.int32] = np.zeros(slots, np.int32)  # columns of `pages` that are the canvas's
        self.pool = PagePool(slots * pages_for(length) if pages is None else pages)
        self.waited = 0  # rows that there was a slot for, and too few pages
        self._mask_token = mask_token
        self._free = list(range(slots))[::-1]
        self._pending: deque[CanvasRow] = deque()
        self._promised = 0  # slots that the pending rows will take

    @property
    def free(self) -> int:
        """Slots that no added row will take. Waiting guided rows may need more slots than there are."""
        return max(0, len(self._free) - self._promised)

    def add(self, row: CanvasRow) -> None:
        """Queue a row for slots and pages; rows are placed in order of arrival."""
        self._pending.append(row)
        self._promised += row.plan.slots

    def place(self) -> list[CanvasRow]:
        """Place as many rows as there is room for, and return them."""
        placed = []
        while self._pending and self._pending[0].plan.slots <= len(self._free):
            row = self._pending[0]
            if row.plan.slots * pages_for(row.layout.end) > len(self.pool):
                self.waited += not row.waited
                row.waited = True
                break
            self._pending.popleft()
            self._promised -= row.plan.slots
            row.slot = self._free.pop()
            row.twin = self._free.pop() if row.plan.slots == 2 else -1
            for slot in row.slots:
                self.rows[slot] = row
                self.held[slot] = pages_for(row.layout.end)
                self.pages[slot, : self.held[slot]] = self.pool.take(int(self.held[slot]))
                self.tokens[slot, : row.layout.end] = self._mask_token
            self.tokens[row.slot, : row.layout.prompt] = row.work.prepared.tokens
            self.active.append(row)
            placed.append(row)
        return placed

    def has(self, row: CanvasRow) -> bool:
        """Whether the row is still under way."""
        return row.slot >= 0 and self.rows[row.slot] is row

    def leave(self, row: CanvasRow) -> None:
        """Free the row's slots and pages."""
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


class CanvasTurn:
    """What a step computes of one row: its positions from `first` to before `last`."""

    __slots__ = ("asked", "first", "last", "logits", "row", "twin_logits")

    def __init__(self, row: CanvasRow, first: int, last: int, asked: Ints) -> None:
        self.row, self.first, self.last = row, first, last
        self.asked = asked  # positions that are decided on; none while a long prompt is gone through in pieces
        self.logits = self.twin_logits = 0  # where theirs begin among those of the step, and the guiding twin's

    @property
    def tokens(self) -> int:
        return (self.last - self.first) * self.row.plan.slots

    @property
    def outputs(self) -> int:
        return len(self.asked) * self.row.plan.slots

    @property
    def positions(self) -> int:
        """The positions that would be computed without a cache."""
        return self.row.layout.seen(self.row.stop - 1) * self.row.plan.slots

    @property
    def prompt_tokens(self) -> int:
        """Prompt tokens that have not been computed before."""
        return max(0, min(self.last, self.row.layout.prompt) - max(self.first, self.row.understood))


@dataclass(frozen=True, slots=True)
class CanvasStepPlan:
    """A step and its turns. The twins' segments and logits come after all others."""

    step: Step
    turns: Sequence[CanvasTurn]
    outputs: int  # logits that are no twin's: the first ones
    positions: int  # of all canvases: what would be computed without a cache
    prompt_tokens: int  # of prompts, that have not been computed before
    held: bool  # rows wait for another step, as no more tokens may go in


class CanvasComposer:
    """Composes steps of at most `step_tokens` tokens, or of one row. What a row computes does not depend on it.

    The oldest rows go first: answers are complete sooner, on average, than if all took turns, at the same throughput.
    """

    def __init__(self, slots: CanvasSlots, shape: Shape, step_tokens: int) -> None:
        assert shape.masking is not None
        self.step_tokens = step_tokens
        self._slots, self._attention, self._shifted = slots, shape.masking.block, shape.masking.shifted
        self._most_outputs = most_outputs(shape)

    def compose(self, most: int | None, only: Collection[CanvasRow] | None) -> CanvasStepPlan | None:
        """The next step; None when there is no row. `most`: the most tokens that fit in memory, unless of a single row.
        `only`: no other rows than these.
        """
        active = self._slots.active
        rows = active if only is None else [row for row in active if row in only]
        room = self.step_tokens if most is None else min(most, self.step_tokens)
        turns = self._turns(rows, room)
        if not turns:
            return None
        return self._plan(turns, held=len(turns) < len(rows))

    def _turns(self, rows: Sequence[CanvasRow], room: int) -> list[CanvasTurn]:
        turns: list[CanvasTurn] = []
        left, outputs = room, self._most_outputs
        for row in rows:
            if left <= 0:
                break
            turn = self._turn(row, room)
            if not turns or (turn.tokens <= left and turn.outputs <= outputs):
                left, outputs = left - turn.tokens, outputs - turn.outputs
                turns.append(turn)
        return turns

    def _turn(self, row: CanvasRow, room: int) -> CanvasTurn:
        first, last = row.reach()
        if row.plan.cache == "exact" and self._attention is not None and last - first > room // row.plan.slots:
            # what lies before the block goes through in pieces, of whole blocks: these see themselves to their ends
            done, before = row.stored, row.start // self._attention * self._attention
            piece = done + max(self._attention, room // row.plan.slots // self._attention * self._attention)
            if piece <= before:
                return CanvasTurn(row, first, piece, NO_TOKENS)
        return CanvasTurn(row, first, last, row.asks)

    def _plan(self, turns: Sequence[CanvasTurn], held: bool) -> CanvasStepPlan:
        canvases = self._slots.tokens
        guided = [turn for turn in turns if turn.row.twin >= 0]
        segments = [*turns, *guided]
        slots = [turn.row.slot for turn in turns] + [turn.row.twin for turn in guided]
        texts = [canvases[slot, turn.first : turn.last] for slot, turn in zip(slots, segments, strict=True)]
        starts = np.array([turn.first for turn in segments], np.int32)
        lengths = np.array([turn.last for turn in segments], np.int32) - starts
        counts = np.array([len(turn.asked) for turn in segments], np.int32)
        adapters = [turn.row.work.adapter_number for turn in segments]
        places = np.cumsum(lengths, dtype=np.int32) - lengths  # of each segment among the tokens
        asked = np.concatenate([turn.asked for turn in segments])
        wanted: Ints = asked + np.repeat(places - starts - self._shifted, counts).astype(np.int32)
        step = Step(
            np.concatenate(texts),
            self._slots.pages[slots, : self._slots.held[slots].max()],
            starts,
            lengths,
            wanted,
            np.array(adapters, np.int32) if any(adapters) else None,
            self._seen(segments, starts, lengths, places),
            _vectors(segments, places),
        )
        ends = np.cumsum(counts)
        for turn, end, count in zip(turns, ends.tolist(), counts.tolist(), strict=False):
            turn.logits = end - count
        for turn, end in zip(guided, ends[len(turns) :].tolist(), strict=True):
            turn.twin_logits = end - len(turn.asked)
        positions, understood = sum(turn.positions for turn in turns), sum(turn.prompt_tokens for turn in turns)
        return CanvasStepPlan(step, turns, int(ends[len(turns) - 1]), positions, understood, held)

    def _seen(self, segments: Sequence[CanvasTurn], starts: Ints, lengths: Ints, places: Ints) -> Ints:
        ends = np.array([turn.row.layout.end for turn in segments], np.int32)
        seen: Ints = np.repeat(ends, lengths)
        if self._attention is None:
            return seen
        positions = np.arange(len(seen), dtype=np.int32) + np.repeat(starts - places, lengths)
        return np.minimum(seen, (positions // self._attention + 1) * self._attention).astype(np.int32)


def _vectors(segments: Sequence[CanvasTurn], places: Ints) -> Vectors | None:
    """Embeddings of blended masks."""
    found, values = [], []
    for turn, place in zip(segments, places.tolist(), strict=True):
        if turn.row.blended is not None:
            found.append(turn.row.masks + np.int32(place - turn.first))
            values.append(turn.row.blended)
    return Vectors(np.concatenate(found), np.concatenate(values)) if found else None
