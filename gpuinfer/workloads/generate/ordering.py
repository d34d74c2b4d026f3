"""Lines in the order of their places, however they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from gpuinfer.workloads.generate.writing import Outlet

LEAST_ASIDE = 16 << 20  # bytes that lie aside, before those that wait no more are thrown out
SHARE = 4  # and how many times as many as those that still wait


class InOrder:
    """Holds lines back until all before them have been written; meanwhile they lie aside.

    `window` bounds how far ahead of the first that is missing a line may come. `others` are lines that lie aside too.
    """

    def __init__(self, outlet: Outlet, window: int, others: Callable[[], Iterable[bytes]] = tuple) -> None:
        self._outlet, self._window, self._others = outlet, window, others
        self._held: dict[int, bytes] = {}
        self._next = 0
        self._moved = asyncio.Event()
        self._bytes_aside = self._bytes_held = 0

    def add(self, place: int, line: bytes, kept: bool = False) -> None:
        """Each place from 0 comes exactly once. `kept`: the line is on the disk elsewhere."""
        if place != self._next:
            self._hold(place, line, kept)
            return
        self._outlet.add(line)
        self._next += 1
        while (held := self._held.pop(self._next, None)) is not None:
            self._outlet.add(held)
            self._bytes_held -= len(held)
            self._next += 1
        self._moved.set()

    def _hold(self, place: int, line: bytes, kept: bool) -> None:
        self._held[place] = line
        self._bytes_held += len(line)
        if kept:
            return
        self._outlet.put_aside(line)
        self._bytes_aside += len(line)
        if self._bytes_aside > max(LEAST_ASIDE, SHARE * self._bytes_held):
            self._outlet.keep_aside([*self._others(), *self._held.values()])
            self._bytes_aside = self._bytes_held

    async def near(self, place: int) -> None:
        """Wait until this place is within the window."""
        while place >= self._next + self._window:
            self._moved.clear()
            await self._moved.wait()

    def let_go(self) -> int:
        """Write what is held although lines before it are missing: none will come. How many there were."""
        held = [self._held.pop(place) for place in sorted(self._held)]
        for line in held:
            self._outlet.add(line)
        return len(held)

    @property
    def waiting(self) -> int:
        """How many lines are held."""
        return len(self._held)


class AsDone:
    """Writes each line as it comes."""

    waiting = 0

    def __init__(self, outlet: Outlet) -> None:
        self._outlet = outlet

    def add(self, place: int, line: bytes, kept: bool = False) -> None:
        self._outlet.add(line)

    async def near(self, place: int) -> None:
        return

    def let_go(self) -> int:
        return 0
