"""Lines in the order of their places, however they come."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class InOrder:
    """Holds lines back until all before them have been written. `write` takes them in order.

    `window` bounds how far ahead of the first that is missing anybody may go.
    """

    def __init__(self, write: Callable[[bytes], None], window: int) -> None:
        self._write, self._window = write, window
        self._held: dict[int, bytes] = {}
        self._next = 0
        self._moved = asyncio.Event()

    def add(self, place: int, line: bytes) -> None:
        """Each place from 0 comes exactly once."""
        if place != self._next:
            self._held[place] = line
            return
        self._write(line)
        self._next += 1
        while (held := self._held.pop(self._next, None)) is not None:
            self._write(held)
            self._next += 1
        self._moved.set()

    async def near(self, place: int) -> None:
        """Wait until this place is within the window."""
        while place >= self._next + self._window:
            self._moved.clear()
            await self._moved.wait()


class AsDone:
    """Writes each line as it comes."""

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self._write = write

    def add(self, place: int, line: bytes) -> None:
        self._write(line)

    async def near(self, place: int) -> None:
        return
