"""How many rows may be under way at once; whoever came first is let in first."""

from __future__ import annotations

import asyncio
from collections import deque


class Room:
    """Room for so many rows. What is wider than all of it gets in alone."""

    def __init__(self, rows: int) -> None:
        self._rows = self._free = rows
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def take(self, rows: int) -> int:
        """Wait for room; returns what to give back."""
        rows = min(rows, self._rows)
        if self._free >= rows and not self._waiting:
            self._free -= rows
            return rows
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((rows, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self.give(rows)
            raise
        return rows

    def give(self, rows: int) -> None:
        self._free += rows
        while self._waiting and (self._waiting[0][1].cancelled() or self._waiting[0][0] <= self._free):
            wanted, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._free -= wanted
                turn.set_result(None)
