"""What a process holds when a series of allocations and frees goes through the C library's allocator, replayed.

Resident memory is more than what is in use: freed pieces stay, and lie where the next one may not fit. The rules are
those of glibc's malloc (Lea 1996, "A memory allocator"; Gloger's ptmalloc): a piece comes from the heap's smallest hole
that is large enough, else from its end; where that would have to grow, a large piece gets pages of its own instead,
which go back to the system when it is freed. Neighbouring holes become one.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from dataclasses import dataclass

from gpuinfer.models.memory import LARGEST_OF_ROWS, STEP

ALIGNED = 96  # bytes: an aligned piece is looked for as so much larger, so that the hole it leaves is too small for it


@dataclass(frozen=True, slots=True)
class Event:
    """One step of a series: `size` bytes are taken as piece number `piece`, or that piece is freed (size -1)."""

    piece: int
    size: int


class Heap:
    """Starts empty. Bytes."""

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = []  # start and size, ascending, no two of them neighbours
        self._top = self._highest = self._end = 0  # of what is in use; of all that ever was; of what the system gave
        self._apart = 0  # in pages of their own
        self._places: dict[int, tuple[int, int]] = {}  # of a piece: start (-1: apart) and size
        self.peak = 0

    @property
    def taken(self) -> int:
        """What is in use now."""
        return sum(size for _, size in self._places.values())

    def replay(self, events: Sequence[Event]) -> None:
        """What is not freed in it stays taken."""
        for event in events:
            if event.size < 0:
                self._free(event.piece)
            elif event.size:
                self._take(event.piece, event.size)

    def free_from(self, number: int) -> None:
        """All pieces of this number and above."""
        for piece in [one for one in self._places if one >= number]:
            self._free(piece)

    def _take(self, piece: int, size: int) -> None:
        start = self._place_for(size)
        self._places[piece] = start, size
        if start < 0:
            self._apart += size
        self.peak = max(self.peak, self._highest + self._apart)

    def _place_for(self, size: int) -> int:
        fitting = [hole for hole in self._holes if hole[1] >= size + ALIGNED]
        if fitting:
            hole = min(fitting, key=lambda one: one[1])
            self._holes.remove(hole)
            insort(self._holes, (hole[0] + size, hole[1] - size))
            return hole[0]
        start = self._top
        if start + size + ALIGNED > self._end:
            if size >= LARGEST_OF_ROWS:
                return -1
            self._end = start + size + STEP
        self._top += size
        self._highest = max(self._highest, self._top)
        return start

    def _free(self, piece: int) -> None:
        start, size = self._places.pop(piece, (0, 0))
        if start < 0:
            self._apart -= size
            return
        insort(self._holes, (start, size))
        joined: list[tuple[int, int]] = []
        for begin, length in self._holes:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((begin, length))
        if joined and sum(joined[-1]) == self._top:
            self._top = joined.pop()[0]
        self._holes = joined
