"""Which units are pending, leased or kept: sets of intervals, whose size is that of their gaps and not of the run."""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator

from gpuinfer.division import Interval, WorkRange


class IntervalSet:
    """A set of units. 16 bytes for each maximal interval; an operation finds its place by bisection.

    The edges of the intervals ascend: those at even positions begin one, those at odd positions end it. So the number
    of edges before a unit is odd exactly where the unit is inside.
    """

    __slots__ = ("_edges", "units")

    def __init__(self, intervals: Iterable[Interval] = ()) -> None:
        self._edges = array("q")
        self.units = 0
        for start, stop in intervals:
            self.add(start, stop)

    def __iter__(self) -> Iterator[Interval]:
        """The maximal intervals, ascending."""
        return zip(self._edges[::2], self._edges[1::2], strict=True)

    def __len__(self) -> int:
        """How many maximal intervals there are; `units` says how many units."""
        return len(self._edges) // 2

    def add(self, start: int, stop: int) -> int:
        """These units are in it now. How many of them had not been."""
        new = stop - start - self.overlap(start, stop)
        if new > 0:
            self._replace(start, stop, outside=0)
            self.units += new
        return max(new, 0)

    def remove(self, start: int, stop: int) -> int:
        """None of these units is in it any more. How many had been."""
        gone = self.overlap(start, stop)
        if gone:
            self._replace(start, stop, outside=1)
            self.units -= gone
        return gone

    def _replace(self, start: int, stop: int, outside: int) -> None:
        """Put an edge at each end that has a neighbour of the other kind, in place of all edges from end to end."""
        edges = self._edges
        first, last = bisect_left(edges, start), bisect_right(edges, stop)
        ends = [at for at, place in ((start, first), (stop, last)) if place % 2 == outside]
        edges[first:last] = array("q", ends)

    def overlap(self, start: int, stop: int) -> int:
        """How many of these units are in it."""
        if start >= stop or not self.units:
            return 0
        first, last = bisect_right(self._edges, start), bisect_left(self._edges, stop)
        if first == last:  # no edge between
            return (stop - start) * (first % 2)
        return sum(end - begin for begin, end in self._between(start, stop, inside=1))

    def within(self, start: int, stop: int) -> list[Interval]:
        """The maximal intervals of those of these units that are in it."""
        return self._between(start, stop, inside=1)

    def gaps(self, start: int, stop: int) -> list[Interval]:
        """The maximal intervals of those of these units that are not in it."""
        return self._between(start, stop, inside=0)

    def _between(self, start: int, stop: int, inside: int) -> list[Interval]:
        if start >= stop:
            return []
        edges = self._edges
        first, last = bisect_right(edges, start), bisect_left(edges, stop)
        points = [start] if first % 2 == inside else []
        points += edges[first:last]
        if last % 2 == inside:
            points.append(stop)
        return list(zip(points[::2], points[1::2], strict=True))


class RangeSet:
    """Ranges with their items, no two of which share a unit, in order of their numbers."""

    __slots__ = ("_ranges", "_starts", "units")

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ranges: list[WorkRange] = []
        self.units = 0

    def __iter__(self) -> Iterator[WorkRange]:
        return iter(self._ranges)

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, work: WorkRange) -> None:
        """Raises `ValueError` if one of its units is in it already."""
        place = bisect_left(self._starts, work.start)
        before = self._ranges[place - 1].stop if place else work.start
        after = self._starts[place] if place < len(self._starts) else work.stop
        if before > work.start or after < work.stop:
            raise ValueError(f"some of the units {work.start} to {work.stop - 1} are in this set already")
        self._starts.insert(place, work.start)
        self._ranges.insert(place, work)
        self.units += len(work)

    def cut(self, start: int, stop: int) -> list[WorkRange]:
        """Remove these units, as far as they are in it: the ranges and parts of ranges that were."""
        first, last = self._places(start, stop)
        if first >= last or start >= stop:
            return []
        whole = self._ranges[first:last]
        found = [_part(work, max(work.start, start), min(work.stop, stop)) for work in whole]
        rest = []
        if whole[0].start < start:
            rest.append(whole[0].part(whole[0].start, start))
        if whole[-1].stop > stop:
            rest.append(whole[-1].part(stop, whole[-1].stop))
        self._ranges[first:last] = rest
        self._starts[first:last] = [work.start for work in rest]
        self.units -= sum(map(len, found))
        return found

    def take(self, most: int, block: int = 1) -> list[WorkRange]:
        """Remove the first units, at most so many: whole ranges and the beginning of one, up to a multiple of `block`
        where that leaves any of it.
        """
        taken = 0
        stop = None
        for work in self._ranges:
            if taken + len(work) > most:
                stop = work.start + most - taken
                aligned = stop - stop % block
                stop = aligned if aligned > work.start else stop
                break
            taken += len(work)
        else:
            stop = self._ranges[-1].stop if self._ranges else 0
        return self.cut(self._starts[0], stop) if self._starts else []

    def overlap(self, start: int, stop: int) -> int:
        """How many of these units are in it."""
        first, last = self._places(start, stop)
        return sum(max(0, min(work.stop, stop) - max(work.start, start)) for work in self._ranges[first:last])

    def _places(self, start: int, stop: int) -> tuple[int, int]:
        """The positions of the ranges that share units with these, from the first to before the second."""
        first = bisect_right(self._starts, start) - 1
        if first < 0 or self._ranges[first].stop <= start:
            first += 1
        return first, bisect_left(self._starts, stop)


def _part(work: WorkRange, start: int, stop: int) -> WorkRange:
    return work if (start, stop) == (work.start, work.stop) else work.part(start, stop)
