"""How the compiled decoder computes a step: which rows share pieces of attention, and how many threads compute a step
that is bound by memory bandwidth.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.attention_plan import Integers, any_shared, shared_nodes
from gpuinfer.text.decoder.cpu_attention import PAGES, QUERIES, SPAN
from gpuinfer.text.decoder.cpu_step import FEW_ROWS
from gpuinfer.text.transformer import Step

Numbers = NDArray[np.int32] | Integers
WORTH = 4  # spans that a group saves: with fewer the barrier behind its wave costs more


@dataclass(frozen=True)
class AttentionPlan:
    """`pieces` int64 [pieces, PIECE], wave after wave, of which the first ones begin at `waves` [waves + 1]; `members`
    int32 names the rows of each, by their places among the rows that go on.
    """

    pieces: NDArray[np.int64]
    members: NDArray[np.int32]
    waves: list[int]


class AttentionPlanner:
    """Plans the attention of `group` heads that share keys. Steps of lone tokens in the very same pages have the same
    plan.
    """

    def __init__(self, group: int) -> None:
        self._together = most_members(group)
        self._known: tuple[Step, Numbers, AttentionPlan] | None = None

    def plan(self, step: Step, going: Numbers, owners: Numbers, sees: Numbers) -> AttentionPlan:
        """`going`: the rows that go on, ascending; of each row of the step `owners` is its segment, and it sees so many
        positions as `sees` says.
        """
        seen = sees[going]
        known = self._known
        same = known is not None and known[0].pages is step.pages and known[0].lengths is step.lengths
        if known is not None and same and len(known[1]) == len(seen) and (seen >= known[1]).all():
            return known[2]
        plan = self._planned(step, owners[going], seen)
        lone = len(step.tokens) == len(step.lengths) == len(going) and step.sees is None
        self._known = (step, seen, plan) if lone else None
        return plan

    def _planned(self, step: Step, tables: Numbers, seen: Numbers) -> AttentionPlan:
        lone = step.lengths[tables] == 1
        begins = np.zeros(len(tables), np.int64)  # the span from which on a row goes by itself
        waves: list[list[tuple[Integers, int, int, int]]] = []
        for rows, first, end, wave in self._shared(step, tables, np.where(lone, seen // SPAN, 0)):
            begins[rows] = end
            while len(waves) <= wave:
                waves.append([])
            for part in self._cut(rows):
                waves[wave].append((part, int(tables[part[0]]), first, end))
        pieces: list[tuple[int, ...]] = []
        members: list[int] = []
        ends = [0]
        for found in waves:
            found.sort(key=lambda piece: len(piece[0]) * (piece[2] - piece[3]))
            for part, table, first, end in found:
                pieces.append((len(members), len(part), table, first, end, 0))
                members.extend(part.tolist())
            ends.append(len(pieces))
        own = self._own(tables, lone, begins, len(members))
        return AttentionPlan(
            np.concatenate([np.array(pieces, np.int64).reshape(-1, at.PIECE), own]),
            np.concatenate([np.array(members, np.int32), np.arange(len(tables), dtype=np.int32)]),
            [*ends, len(pieces) + len(own)],
        )

    def _own(self, tables: Numbers, lone: NDArray[np.bool_], begins: Integers, offset: int) -> NDArray[np.int64]:
        """The last piece of each row: alone, or with others of its segment."""
        count = len(tables)
        changes = np.flatnonzero(np.append(True, (tables[1:] != tables[:-1]) | lone[1:]))
        if len(changes) == count:
            firsts, lengths = np.arange(count), np.ones(count, np.int64)
        else:
            runs = np.diff(np.append(changes, count))
            parts = -(-runs // self._together)
            firsts = np.concatenate(
                [first + np.arange(n) * self._together for first, n in zip(changes, parts, strict=True)]
            )
            lengths = np.diff(np.append(firsts, count))
        found = np.empty((len(firsts), at.PIECE), np.int64)
        found[:, at.MEMBERS], found[:, at.MEMBER_COUNT] = firsts + offset, lengths
        found[:, at.TABLE], found[:, at.FIRST_SPAN] = tables[firsts], begins[firsts]
        found[:, at.END_SPAN], found[:, at.LAST] = at.TO_THE_END, 1
        return found

    def _shared(self, step: Step, tables: Numbers, full: Integers) -> list[tuple[Integers, int, int, int]]:
        """Rows that share spans, from the first to before the last of them, and their wave. `full`: of each row the
        spans that it sees whole.
        """
        found: list[tuple[Integers, int, int, int]] = []
        spans = step.pages[tables][:, PAGES - 1 :: PAGES]  # the last page of a span names it
        if np.count_nonzero(full) < 2 or not any_shared(spans, full):
            return found
        begins, waves = np.zeros(len(full), np.int64), np.zeros(len(full), np.int64)
        for ends, names in zip(*shared_nodes(spans, full), strict=True):
            nodes, counts = np.unique(names, return_counts=True)
            for name in nodes[(counts > 1) & (nodes >= 0)].tolist():
                rows = np.flatnonzero(names == name)
                first, end = int(begins[rows[0]]), int(ends[rows[0]])
                if (len(rows) - 1) * (end - first) >= WORTH:
                    found.append((rows, first, end, int(waves[rows[0]])))
                    begins[rows] = end
                    waves[rows] += 1
        return found

    def _cut(self, rows: Integers) -> list[Integers]:
        return np.array_split(rows, -(-len(rows) // self._together))


def most_members(group: int) -> int:
    """Rows of a piece, at most, where so many heads share keys."""
    return max(1, QUERIES // group)


SETTLE = 32  # such steps before the first trial: a short run is not worth one
TURNS = 4  # steps with each of two numbers of threads, in turn
AS_FAST = 1.03  # times the seconds of more threads
FAR_SLOWER = 1.2  # times: no more turns are needed
AGAIN = 2048  # such steps between two trials: what else reads memory comes and goes


class FewestThreads:
    """Ask `threads_for` before each step, and tell it with `took` how long the step took."""

    def __init__(self) -> None:
        self._most = self._chosen = 0  # of how many, and so many of them are enough
        self._until_trial = SETTLE
        self._rows = 0  # of the trial's steps
        self._seconds: dict[int, list[float]] = {}  # of the trial, by threads; empty: there is none now

    def threads_for(self, rows: int, most: int) -> int:
        """How many of `most` threads compute a step of `rows` tokens."""
        if most != self._most:
            self._most, self._chosen, self._until_trial, self._seconds = most, most, SETTLE, {}
        if rows > FEW_ROWS or most == 1:
            return most
        if self._seconds and rows == self._rows:
            return min(self._seconds, key=lambda threads: (len(self._seconds[threads]), -threads))
        return self._chosen

    def took(self, rows: int, threads: int, seconds: float) -> None:
        """A step of `rows` tokens has taken so many seconds with so many threads."""
        if rows > FEW_ROWS or self._most == 1:
            return
        if self._seconds and rows == self._rows:
            self._seconds[threads].append(seconds)
            self._judge()
            return
        self._until_trial -= 1
        if self._until_trial <= 0:
            self._rows = rows
            self._try(self._most)

    def _try(self, threads: int) -> None:
        """Begin the turns of so many threads and of half as many."""
        self._seconds = {threads: [], threads // 2: []}

    def _judge(self) -> None:
        """Whether half as many threads are as fast: then half of those are tried, else the trial is over."""
        more, fewer = max(self._seconds), min(self._seconds)
        if not self._seconds[fewer]:
            return
        ratio = min(self._seconds[fewer]) / min(self._seconds[more])
        complete = len(self._seconds[fewer]) == TURNS
        if ratio > FAR_SLOWER or (complete and ratio > AS_FAST):
            self._end(more)
        elif complete and fewer > 1:
            self._try(fewer)
        elif complete:
            self._end(fewer)

    def _end(self, threads: int) -> None:
        self._chosen, self._until_trial, self._seconds = threads, AGAIN, {}
