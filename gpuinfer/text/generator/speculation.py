"""Speculative decoding: tokens that are likely to come next go through the decoder together with a row's last token
(Leviathan, Kalman, Matias 2023, "Fast inference from transformers via speculative decoding").

Each token is drawn as always, from the logits at its position and with that position's random number. While what is
drawn is what was proposed, the next position's logits are there already. So proposals change how many steps an answer
takes, and never which tokens it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.generator.page_pool import Ints
from gpuinfer.text.generator.slot_table import SlotTable
from gpuinfer.text.transformer import PAGE

Floats = NDArray[np.float64]
GRADES = 5  # of proposals, by how well founded they are


@dataclass(frozen=True, slots=True)
class Proposal:
    """Tokens, int32, that may follow a row's last one. `grade`: 0 to GRADES - 1; those of a grade are alike in how
    likely they are to come.
    """

    tokens: Ints
    grade: int = 0


NOTHING = Proposal(np.zeros(0, np.int32))


class Proposer(ABC):
    """Guesses what rows go on with."""

    @abstractmethod
    def propose(self, slots: Ints, rooms: Ints) -> Sequence[Proposal]:
        """For each of these slots at most so many tokens as there is room for. All that they have drawn is known."""

    def step_share(self, rows: int, times: StepTimes) -> float:
        """How long it takes to propose one token more of so many rows, as a share of a step of theirs."""
        return 0.0

    def close(self) -> None:  # noqa: B027  most have nothing to free
        """Free threads and memory."""


LONGEST_MATCH = 8


class PromptLookup(Proposer):
    """Proposes what came after the same tokens before, in prompt or answer (Saxena 2023, "Prompt lookup decoding"):
    after the longest run that ends as the text does, and of several the last. A run that reaches the end of the text is
    taken to go on repeating. The grade is the length of the match, 4 for longer ones.
    """

    def __init__(self, table: SlotTable) -> None:
        self._table = table

    def propose(self, slots: Ints, rooms: Ints) -> Sequence[Proposal]:
        table = self._table
        known = table.filled[slots] + 1
        return [
            continuation_of(table.tokens[slot, :count], room) if room > 0 else NOTHING
            for slot, count, room in zip(slots.tolist(), known.tolist(), rooms.tolist(), strict=True)
        ]


def continuation_of(tokens: Ints, most: int) -> Proposal:
    """At most so many tokens that may follow these."""
    last = len(tokens) - 1
    ends = np.flatnonzero(tokens[:last] == tokens[last])  # of matches: at first of one token
    if not len(ends):
        return NOTHING
    length = 1
    while length < LONGEST_MATCH:
        longer = ends[ends >= length]
        longer = longer[tokens[longer - length] == tokens[last - length]] if last >= length else longer[:0]
        if not len(longer):
            break
        ends, length = longer, length + 1
    begin = int(ends[-1]) + 1
    period = last + 1 - begin
    return Proposal(tokens[begin + np.arange(most) % period], min(length, GRADES - 1))


FIRST_CHANCES = np.array([0.7, 0.4, 0.55, 0.65, 0.8])  # of a proposed token to be drawn, by grade, in a new row
FIRST_WEIGHT = 4.0  # of them, in tokens
MOST_WEIGHT = 12.0  # tokens that are remembered
DRIFT = 0.05  # with each step that it is not tried, a chance comes so much nearer to the first one


class Acceptance:
    """How likely proposed tokens are drawn, by slot and grade."""

    def __init__(self, slots: int) -> None:
        self._chance = np.tile(FIRST_CHANCES, (slots, 1))
        self._weight = np.full((slots, GRADES), FIRST_WEIGHT)
        self._epoch = np.full(slots, -1, np.int64)  # of the row that they are known of

    def chances(self, slots: Ints, grades: Sequence[int], epochs: NDArray[np.int64]) -> Floats:
        """Of a token whose predecessors have been drawn, for each of these slots. Of a new row nothing is known."""
        new = slots[self._epoch[slots] != epochs]
        self._chance[new], self._weight[new] = FIRST_CHANCES, FIRST_WEIGHT
        self._epoch[slots] = epochs
        found: Floats = self._chance[slots, np.array(grades, np.int64)]
        return found

    def tried(self, slot: int, grade: int, drawn: int, proposed: int) -> None:
        """Of so many proposed tokens the first `drawn` were drawn."""
        missed = int(drawn < proposed)
        weight = self._weight[slot, grade]
        total = weight + drawn + missed
        self._chance[slot, grade] = (weight * self._chance[slot, grade] + drawn) / total
        self._weight[slot, grade] = min(MOST_WEIGHT, total)

    def passed_over(self, slot: int, grade: int) -> None:
        """There was a proposal, and it was not worth a try."""
        self._chance[slot, grade] += DRIFT * (FIRST_CHANCES[grade] - self._chance[slot, grade])


SLOPE = 1 / 32  # of the seconds of the smallest step, that a token adds where nothing is known
RISE, FALL = 0.03, 0.5  # how far a figure follows a slower step, and a faster one: others disturb steps, and help none
MIXED = 0.1  # how far the mean tokens of a size follow those of a step
OUTLIER = 2.0  # times what is known: no step counts for more
STALE = 24  # steps after which a size that has not come is tried as if nothing were known of it


class StepTimes:
    """Seconds of a step by how many tokens it has, learned from the steps of a run: one figure for steps of 1, 2, 3 to
    4, 5 to 8, 9 to 16 … tokens, and straight lines between.
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float, int]] = {}  # by size: tokens, seconds, when last seen
        self._steps = 0

    @property
    def known(self) -> bool:
        """Whether any step has been seen."""
        return bool(self._known)

    def took(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        self._steps += 1
        size = (tokens - 1).bit_length()
        mean, usual, _ = self._known.get(size, (float(tokens), seconds, 0))
        usual += (RISE if seconds > usual else FALL) * (min(seconds, OUTLIER * usual) - usual)
        self._known[size] = mean + MIXED * (tokens - mean), usual, self._steps
        least = min(self._known)
        self._known = {n: one for n, one in self._known.items() if n == least or one[2] > self._steps - STALE}

    def of(self, tokens: NDArray[np.int64]) -> Floats:
        """Seconds of steps of so many tokens, ascending; of no unit before a step was seen."""
        known = sorted(self._known.values()) or [(1.0, 1.0, 0)]
        counts, seconds = np.array([one[0] for one in known]), np.array([one[1] for one in known])
        seconds = np.maximum.accumulate(seconds)
        slope = SLOPE * seconds[0]
        beyond = slope * (np.maximum(tokens - counts[-1], 0) + np.minimum(tokens - counts[0], 0))
        found: Floats = np.interp(tokens, counts, seconds) + beyond
        least: Floats = np.maximum(found, seconds[0] / 2)
        return least


LIKELY = 0.8  # the chance of a good proposal


class Speculation:
    """Decides which proposed tokens go in a step: as many as make the most tokens in a second of all the step's rows
    together, by how likely each is drawn and what steps of so many tokens take. In full batches, where every token
    takes its time, that is none.
    """

    def __init__(self, table: SlotTable, proposer: Proposer, most: int, times: StepTimes) -> None:
        """`most` tokens for a row."""
        self._table, self._proposer, self.most, self.times = table, proposer, most, times
        self.close = proposer.close
        self._acceptance = Acceptance(table.slots)

    def pays(self, rows: int, room: int) -> bool:
        """Whether any of `room` tokens that are likely would be worth their while in a step of so many rows."""
        more = np.arange(max(0, min(room, rows * self.most)) + 1)
        rates = (rows + LIKELY * more) / self.times.of(rows + more)
        return bool(rates.argmax() > 0)

    def proposals(self, slots: Ints, room: int) -> Sequence[Proposal] | None:
        """What goes in the next step with the last tokens of these rows, `room` tokens at most; None: nothing does."""
        if not self.pays(len(slots), room):
            return None
        table = self._table
        held, filled = table.held[slots] * PAGE, table.filled[slots]
        # The last token of an answer takes no place, and nothing is drawn after it.
        most = self._depth(slots, self._proposer.step_share(len(slots), self.times))
        rooms = np.minimum(np.minimum(held, table.final[slots]) - filled - 1, most).astype(np.int32)
        if not most:
            for slot in slots.tolist():
                self._acceptance.passed_over(slot, 0)
            return None
        found = self._proposer.propose(slots, rooms)
        grades = [one.grade for one in found]
        chances = self._acceptance.chances(slots, grades, table.epoch[slots])
        counts = self._worth([len(one.tokens) for one in found], chances, room)
        if not any(counts):
            for slot, one in zip(slots.tolist(), found, strict=True):
                if len(one.tokens):
                    self._acceptance.passed_over(slot, one.grade)
            return None
        return [Proposal(one.tokens[:count], one.grade) for one, count in zip(found, counts, strict=True)]

    def _depth(self, slots: Ints, share: float) -> int:
        """How many tokens to propose of each of these rows, where each takes such a share of a step to propose."""
        if not share:
            return self.most
        rows, depths = len(slots), np.arange(self.most + 1)
        chances = self._acceptance.chances(slots, [0] * rows, self._table.epoch[slots])
        drawn = rows + np.append(0.0, np.cumsum((chances[:, None] ** depths[1:]).sum(0)))
        seconds = self.times.of(rows * (1 + depths)) + depths * share * self.times.of(np.array([rows]))
        return int((drawn / seconds).argmax())

    def _worth(self, lengths: Sequence[int], chances: Floats, room: int) -> list[int]:
        """How many of each row's tokens make the most of the step."""
        rows = np.repeat(np.arange(len(lengths)), lengths)
        places = np.concatenate([np.arange(1, length + 1) for length in lengths])
        reached = chances[rows] ** places
        order = np.argsort(-reached, kind="stable")[:room]
        drawn = len(lengths) + np.append(0.0, np.cumsum(reached[order]))
        rates = drawn / self.times.of(np.arange(len(lengths), len(lengths) + len(drawn)))
        best = order[: int(rates.argmax())]
        found: list[int] = np.bincount(rows[best], minlength=len(lengths)).tolist()
        return found

    def settled(
        self, slots: Ints, proposals: Sequence[Proposal], drawn: NDArray[np.int64], ended: NDArray[np.bool_]
    ) -> None:
        """Of each row's proposed tokens so many have been drawn; `ended`: the rows that are gone."""
        for slot, one, count, gone in zip(slots.tolist(), proposals, drawn.tolist(), ended.tolist(), strict=True):
            if len(one.tokens) and not gone:
                self._acceptance.tried(slot, one.grade, count, len(one.tokens))
