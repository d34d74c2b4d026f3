"""The tokens of the next step: of each row what its cache says, the oldest first, as far as there is room."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from gpuinfer.text.checkpoint.estimate import most_outputs
from gpuinfer.text.diffusion.rows import NO_TOKENS, Row
from gpuinfer.text.diffusion.slots import Slots
from gpuinfer.text.generator.seams import Ints
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import Step, Vectors


class Turn:
    """What a step computes of one row: its positions from `first` to before `last`."""

    __slots__ = ("asked", "first", "last", "logits", "row", "twin_logits")

    def __init__(self, row: Row, first: int, last: int, asked: Ints) -> None:
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
        """What would be computed without a cache."""
        return self.row.layout.seen(self.row.stop - 1) * self.row.plan.slots

    @property
    def prompt_tokens(self) -> int:
        """Of the prompt, those that have not been computed before."""
        return max(0, min(self.last, self.row.layout.prompt) - max(self.first, self.row.understood))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """A step, and whose it is. The twins' segments and logits come after all others."""

    step: Step
    turns: Sequence[Turn]
    outputs: int  # logits that are no twin's: the first ones
    positions: int  # of all canvases: what would be computed without a cache
    prompt_tokens: int  # of prompts, that have not been computed before
    held: bool  # rows wait for another step, as no more tokens may go in


class Composer:
    """Composes steps of at most `step_tokens` tokens, or of one row. What a row computes does not depend on it.

    Where rows compete for the room, the first come goes first: answers are complete sooner, on average, than if all
    took turns, and as much is computed in a second.
    """

    def __init__(self, slots: Slots, shape: Shape, step_tokens: int) -> None:
        assert shape.masking is not None
        self.step_tokens = step_tokens
        self._slots, self._attention, self._shifted = slots, shape.masking.block, shape.masking.shifted
        self._most_outputs = most_outputs(shape)

    def compose(self, most: int | None, only: Collection[Row] | None) -> StepPlan | None:
        """The next step; None when there is no row. `most`: no more tokens than that fit in memory, unless of a single
        row. `only`: none but these rows.
        """
        active = self._slots.active
        rows = active if only is None else [row for row in active if row in only]
        room = self.step_tokens if most is None else min(most, self.step_tokens)
        turns = self._turns(rows, room)
        if not turns:
            return None
        return self._plan(turns, held=len(turns) < len(rows))

    def _turns(self, rows: Sequence[Row], room: int) -> list[Turn]:
        turns: list[Turn] = []
        left, outputs = room, self._most_outputs
        for row in rows:
            if left <= 0:
                break
            turn = self._turn(row, room)
            if not turns or (turn.tokens <= left and turn.outputs <= outputs):
                left, outputs = left - turn.tokens, outputs - turn.outputs
                turns.append(turn)
        return turns

    def _turn(self, row: Row, room: int) -> Turn:
        first, last = row.reach()
        if row.plan.cache == "exact" and self._attention is not None and last - first > room // row.plan.slots:
            # what lies before the block goes through in pieces, of whole blocks: these see themselves to their ends
            done, before = row.stored, row.start // self._attention * self._attention
            piece = done + max(self._attention, room // row.plan.slots // self._attention * self._attention)
            if piece <= before:
                return Turn(row, first, piece, NO_TOKENS)
        return Turn(row, first, last, row.asks)

    def _plan(self, turns: Sequence[Turn], held: bool) -> StepPlan:
        canvases = self._slots.tokens
        guided = [turn for turn in turns if turn.row.twin >= 0]
        segments = [*turns, *guided]
        slots = [turn.row.slot for turn in turns] + [turn.row.twin for turn in guided]
        texts = [canvases[slot, turn.first : turn.last] for slot, turn in zip(slots, segments, strict=True)]
        starts = np.array([turn.first for turn in segments], np.int32)
        lengths = np.array([turn.last for turn in segments], np.int32) - starts
        counts = np.array([len(turn.asked) for turn in segments], np.int32)
        places = np.cumsum(lengths, dtype=np.int32) - lengths  # of each segment among the tokens
        asked = np.concatenate([turn.asked for turn in segments])
        wanted: Ints = asked + np.repeat(places - starts - self._shifted, counts).astype(np.int32)
        step = Step(
            np.concatenate(texts),
            self._slots.pages[slots, : self._slots.held[slots].max()],
            starts,
            lengths,
            wanted,
            self._adapters(segments),
            self._seen(segments, starts, lengths, places),
            _vectors(segments, places),
        )
        ends = np.cumsum(counts)
        for turn, end, count in zip(turns, ends.tolist(), counts.tolist(), strict=False):
            turn.logits = end - count
        for turn, end in zip(guided, ends[len(turns) :].tolist(), strict=True):
            turn.twin_logits = end - len(turn.asked)
        positions, understood = sum(turn.positions for turn in turns), sum(turn.prompt_tokens for turn in turns)
        return StepPlan(step, turns, int(ends[len(turns) - 1]), positions, understood, held)

    def _seen(self, segments: Sequence[Turn], starts: Ints, lengths: Ints, places: Ints) -> Ints:
        ends = np.array([turn.row.layout.end for turn in segments], np.int32)
        seen: Ints = np.repeat(ends, lengths)
        if self._attention is None:
            return seen
        positions = np.arange(len(seen), dtype=np.int32) + np.repeat(starts - places, lengths)
        return np.minimum(seen, (positions // self._attention + 1) * self._attention).astype(np.int32)

    def _adapters(self, segments: Sequence[Turn]) -> Ints | None:
        numbers = [turn.row.work.adapter_number for turn in segments]
        return np.array(numbers, np.int32) if any(numbers) else None


def _vectors(segments: Sequence[Turn], places: Ints) -> Vectors | None:
    """Of the masks that do not enter as any mask does."""
    found, values = [], []
    for turn, place in zip(segments, places.tolist(), strict=True):
        if turn.row.blended is not None:
            found.append(turn.row.masks + np.int32(place - turn.first))
            values.append(turn.row.blended)
    return Vectors(np.concatenate(found), np.concatenate(values)) if found else None
