"""The positions of a step's tokens and what they see, and the prefix plan of CUDA kernels: which keys and values of a
decode step are read once for several rows. Plain arithmetic on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.transformer import PAGE, Step

Integers = NDArray[np.int64]


def firsts_of(step: Step) -> Integers:
    """The index of each segment's first token."""
    found: Integers = np.cumsum(step.lengths, dtype=np.int64) - step.lengths
    return found


def segments_of(step: Step) -> Integers:
    """The number of the segment that each token is of."""
    return np.repeat(np.arange(len(step.lengths)), step.lengths)


def adapters_of(step: Step) -> NDArray[np.int32]:
    """The number of each token's adapter, 0: none."""
    return np.repeat(np.zeros_like(step.lengths) if step.adapters is None else step.adapters, step.lengths)


def positions_of(step: Step) -> Integers:
    """The position of each token."""
    offsets = np.repeat(step.starts - firsts_of(step), step.lengths)
    found: Integers = np.arange(len(step.tokens), dtype=np.int64) + offsets
    return found


def sees_of(step: Step) -> Integers:
    """How many positions each token attends to."""
    return positions_of(step) + 1 if step.sees is None else step.sees.astype(np.int64)


def ends_of(step: Step) -> Integers:
    """Of each segment, how many positions there are with it: its own, and those that it sees."""
    ends: Integers = (step.starts + step.lengths).astype(np.int64)
    return ends if step.sees is None else np.maximum(ends, np.maximum.reduceat(step.sees, firsts_of(step)))


class StaleValues:
    """What an earlier row has left in pages of a cache that rows only ever write into: weights of 0 are multiplied with
    it, and it might be no number.
    """

    def __init__(self) -> None:
        self._copied: NDArray[np.int32] = np.zeros(0, np.int32)  # pages with more than is known of their row

    def copied(self, pages: Sequence[int]) -> None:
        """These pages are copies, of all that others hold."""
        self._copied = np.union1d(self._copied, np.array(pages, np.int32))

    def of(self, step: Step, positions: NDArray[np.int32], sees: NDArray[np.int32]) -> Integers:
        """Of each token from where on in its page the values of an earlier row are to be cleared; -1: from nowhere. It
        is the last token of a segment that clears, what lies behind all that it sees, unless that is clear since the
        segment before: it is not where the segment begins in a page that is a copy, which has all that its source has,
        and that none has written into since.
        """
        in_copies = np.zeros(len(step.starts), np.bool_)
        if len(self._copied):
            pages = step.pages[np.arange(len(in_copies)), step.starts // PAGE]
            in_copies = np.isin(pages, self._copied)
            self._copied = np.setdiff1d(self._copied, pages)
        places = np.maximum(positions + 1, sees) - positions // PAGE * PAGE
        due = (places < PAGE) & ((positions % PAGE == 0) | np.repeat(in_copies, step.lengths))
        if len(positions) > len(step.lengths):
            last = np.zeros(len(positions), np.bool_)
            last[firsts_of(step) + step.lengths - 1] = True
            due = last & (places < PAGE) & (due | np.repeat(step.lengths > 1, step.lengths))
        return np.where(due, places, -1)


WORTH = 4  # pages that need not be read again: with fewer the partial results take longer
LEVELS = 7  # nodes on a row's way down the tree, at most; what is shared below is read by each row
LEAST_SLOTS = LEVELS + 1  # of a row: of its nodes, and of what it reads by itself
FIRST, COUNT, ROW, BEGIN, END, SLOT = range(6)  # of an item; see `PrefixPlan.items`
FIELDS = 6


@dataclass(frozen=True)
class PrefixPlan:
    """`items` [FIELDS, items]: the place in `members` of an item's first row, how many rows it has, one of them, the
    positions from BEGIN to before END that it reads in that row's pages, and the slot of its partial results.
    """

    items: Integers
    members: Integers  # [rows] all rows in the order of items
    begins: Integers  # [rows] the position from which on a row reads by itself; 0: nothing is shared
    slots: Integers  # [rows] partial results of each row: in its slots 0, 1, …

    def positions_read(self, sees: Integers) -> int:
        """Positions whose keys and values are read, by items and by rows that see so many each."""
        return int((self.items[END] - self.items[BEGIN]).sum() + (sees - self.begins).sum())


def nothing_shared(rows: int) -> PrefixPlan:
    zeros = np.zeros(rows, np.int64)
    return PrefixPlan(np.zeros((FIELDS, 0), np.int64), np.arange(rows), zeros, zeros)


@dataclass(frozen=True)
class PrefixPlanner:
    """Items of at most `tile` rows. They are cut at multiples of `split` positions, or of that times a power of two
    where items or slots do not suffice: a row's partial results are of the same positions whatever shares them, but for
    where its nodes end.
    """

    tile: int
    split: int
    least: int = 0  # positions that all rows of a step together need not read, for anything to be shared
    few: int = 0  # with fewer rows than that the device has room for several items a row
    worth: int = WORTH

    def plan(
        self, pages: NDArray[np.int32], whole: Integers, items: int, slots: int, apart: bool = False
    ) -> PrefixPlan:
        """For rows with such `pages` [rows, columns], of which each may share its first `whole` [rows] ones. At most so
        many `items` of all rows, and `slots` of a row, LEAST_SLOTS or more; where there are too few, the rows of a node
        read more of their pages apart from others, or by themselves: first those that save least of a level of the
        tree. With `apart`, long rows are items of their own too, where rows are few.
        """
        rows = len(whole)
        order, begins = np.arange(rows), np.zeros(rows, np.int64)
        groups = np.zeros((0, 5), np.int64)
        if items and any_shared(pages, whole):
            ends, names = shared_nodes(pages, whole)
            order = np.lexsort(names[::-1])
            begins, groups = self._groups(ends[:, order], names[:, order], items)
            _, _, count, begin, end = groups.T
            if ((count - self._tiles(count)) * (end - begin)).sum() * PAGE < self.least:
                begins, groups = np.zeros(rows, np.int64), groups[:0]
        if apart and rows < self.few:
            begins, groups = self._own(whole[order], begins, groups, items)
        if not len(groups):
            return nothing_shared(rows)
        found, used = self._items(groups, rows, items, slots)
        found[ROW] = order[found[FIRST]]
        back = np.empty_like(order)
        back[order] = np.arange(rows)
        return PrefixPlan(found, order, begins[back] * PAGE, used[back])

    def _tiles(self, counts: Integers) -> Integers:
        return -(-counts // self.tile)

    def _own(self, whole: Integers, begins: Integers, groups: Integers, items: int) -> tuple[Integers, Integers]:
        """As `_groups`, and with them of each row the portions behind its nodes, where there are several: the longest
        rows first, as far as there are items.
        """
        ends = whole * PAGE // self.split * self.split // PAGE
        left = items - int(self._tiles(groups[:, 2]).sum())
        longest = np.argsort(begins - ends, kind="stable")[:left]
        rows = longest[(ends - begins)[longest] * PAGE >= 2 * self.split]
        own = np.stack((np.full(len(rows), LEVELS), rows, np.ones(len(rows), np.int64), begins[rows], ends[rows]), 1)
        begins = begins.copy()
        begins[rows] = ends[rows]
        return begins, np.concatenate((groups, own))

    def _groups(self, ends: Integers, names: Integers, items: int) -> tuple[Integers, Integers]:
        """Of rows in their order: the column from which on each reads by itself, and the nodes that are worth it, of as
        many tiles as there are items: [nodes, 5] level, first row, rows, first column, last one's end.
        """
        begins, found = np.zeros(ends.shape[1], np.int64), list[Integers]()
        for level, (end, name) in enumerate(zip(ends, names, strict=True)):
            firsts = np.flatnonzero(np.append(True, name[1:] != name[:-1]))
            counts = np.diff(np.append(firsts, len(name)))
            tiles = self._tiles(counts)
            saved = (end[firsts] - begins[firsts]) * (counts - tiles)
            kept = (end[firsts] > 0) & (counts > 1) & (saved >= self.worth)
            if tiles[kept].sum() > items:
                best = np.argsort(-saved, kind="stable")
                best = best[kept[best]]
                kept[best[np.cumsum(tiles[best]) > items]] = False
            items -= int(tiles[kept].sum())
            one = np.full(int(kept.sum()), level)
            found.append(np.stack((one, firsts[kept], counts[kept], begins[firsts[kept]], end[firsts[kept]]), 1))
            begins = np.where(np.repeat(kept, counts), end, begins)
        return begins, np.concatenate(found)

    def _items(self, groups: Integers, rows: int, items: int, slots: int) -> tuple[Integers, Integers]:
        """The items of these nodes, and the slots that each row uses, in their order."""
        level, first, count, begin, end = groups.T
        begin, end, tiles = begin * PAGE, end * PAGE, self._tiles(count)
        cut = self.split
        while True:
            portions = (end - 1) // cut - begin // cut + 1
            used = np.zeros((LEVELS + 1, rows + 1), np.int64)  # a row's portions on each level, as differences of rows
            np.add.at(used, (level, first), portions)
            np.subtract.at(used, (level, first + count), portions)
            used = np.cumsum(used[:, :-1], axis=1)
            if (portions == 1).all() or ((tiles * portions).sum() <= items and used.sum(0).max() <= slots):
                break
            cut *= 2
        before = (np.cumsum(used, axis=0) - used)[level, first]
        # Items of the same positions are neighbours, so that the later ones find them in the device's cache.
        each = np.repeat(np.arange(len(groups)), tiles * portions)
        number = np.arange(len(each)) - np.repeat(np.cumsum(tiles * portions) - tiles * portions, tiles * portions)
        portion, tile = number // tiles[each], number % tiles[each]
        size = -(-count // tiles)
        found = np.empty((FIELDS, len(each)), np.int64)
        found[FIRST] = first[each] + tile * size[each]
        found[COUNT] = np.minimum(size[each], count[each] - tile * size[each])
        start = (begin[each] // cut + portion) * cut
        found[BEGIN], found[END] = np.maximum(begin[each], start), np.minimum(end[each], start + cut)
        found[SLOT] = before[each] + portion
        return found, used.sum(0)


def whole_pages(positions: NDArray[np.int32], sees: Integers) -> Integers:
    """How many pages each of some rows may share that bring a token at `positions` each and see so many: those before
    the one that it writes into, or of which it does not see all.
    """
    found: Integers = np.minimum(positions.astype(np.int64), sees - 1) // PAGE
    return found


def any_shared(pages: NDArray[np.int32], whole: Integers) -> bool:
    """Whether some of these rows have the same first page, of the `whole` [rows] ones that each may share."""
    ordered = np.sort(pages[whole > 0, 0])
    return bool((ordered[1:] == ordered[:-1]).any())


def shared_nodes(pages: NDArray[np.int32], whole: Integers) -> tuple[Integers, Integers]:
    """Each row's way down the tree, [levels, rows]: the column before which the pages of a node end, and a name that
    its rows alone have; 0 and -1 below a row's last node.

    A node ends where fewer rows have the next page. Two rows with the same page in the same column have the same pages
    before: so the column and its page name a node, whatever else is in the table.
    """
    columns = int(whole.max())
    held = np.arange(columns) < whole[:, None]
    pages = pages[:, :columns]
    having = np.bincount(pages[held])[np.where(held, pages, 0)]
    having[~held] = 0
    ending = having > 1
    ending[:, :-1] &= having[:, 1:] != having[:, :-1]
    rows, last = np.nonzero(ending)
    firsts = np.searchsorted(rows, np.arange(len(whole)))
    level = np.arange(len(rows)) - firsts[rows]
    near = level < LEVELS
    rows, last, level = rows[near], last[near], level[near]
    form = int(level.max(initial=0)) + 1, len(whole)
    ends, names = np.zeros(form, np.int64), np.full(form, -1, np.int64)
    ends[level, rows] = last + 1
    names[level, rows] = (last + 1) * (1 << 32) + pages[rows, last]
    return ends, names
