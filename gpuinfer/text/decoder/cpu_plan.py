"""Which pieces of attention a step has: rows that share pages go through them together, then each through its own.

Rows of one token whose tables begin with the same pages are a group; within a group those that share further ones are
groups again, and so on: a system prompt, a game, a power, a sample. Pieces of a wave may be computed in any order and
by any thread; a row's waves follow one another. What is shared decides which rows go through a span together, never
their sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_attention import PAGES, QUERIES, SPAN
from gpuinfer.text.decoder.segments import Integers
from gpuinfer.text.step import Step

Numbers = NDArray[np.int32] | Integers
WORTH = 4  # spans that a group saves: with fewer the barrier behind its wave costs more


@dataclass(frozen=True)
class Plan:
    """`pieces` int64 [pieces, PIECE], wave after wave, of which the first ones begin at `waves` [waves + 1]; `members`
    int32 names the rows of each, by their places among the rows that go on.
    """

    pieces: NDArray[np.int64]
    members: NDArray[np.int32]
    waves: list[int]


@dataclass(frozen=True)
class _Group:
    """Rows, by their places, that share all spans before `span`."""

    rows: Integers
    span: int
    wave: int


class Planner:
    """Plans the attention of `group` heads that share keys. Steps of lone tokens in the very same pages have the same
    plan.
    """

    def __init__(self, group: int) -> None:
        self._together = most_members(group)
        self._known: tuple[Step, Numbers, Plan] | None = None

    def plan(self, step: Step, going: Numbers, owners: Numbers, sees: Numbers) -> Plan:
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

    def _planned(self, step: Step, tables: Numbers, seen: Numbers) -> Plan:
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
        return Plan(
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
        candidates = np.flatnonzero(full)
        if len(candidates) < 2:
            return found
        last_pages = step.pages[tables][:, PAGES - 1 :: PAGES]
        groups = [_Group(candidates, 0, 0)]
        while groups:
            group = groups.pop()
            rows = group.rows[full[group.rows] > group.span]
            if len(rows) < 2:
                continue
            for page in _repeated(last_pages[rows, group.span]):
                alike = rows[last_pages[rows, group.span] == page]
                most = int(full[alike].min())
                same = (last_pages[alike, :most] == last_pages[alike[0], :most]).all(axis=0)
                end = most if same.all() else int(same.argmin())
                if (len(alike) - 1) * (end - group.span) < WORTH:
                    continue
                found.append((alike, group.span, end, group.wave))
                groups.append(_Group(alike, end, group.wave + 1))
        return found

    def _cut(self, rows: Integers) -> list[Integers]:
        return np.array_split(rows, -(-len(rows) // self._together))


def most_members(group: int) -> int:
    """Rows of a piece, at most, where so many heads share keys."""
    return max(1, QUERIES // group)


def _repeated(pages: NDArray[np.int32]) -> list[int]:
    found, counts = np.unique(pages, return_counts=True)
    repeated: list[int] = found[counts > 1].tolist()
    return repeated
