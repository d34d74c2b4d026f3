"""One timer for all connections: each is looked at once in a while, and says itself whether it is late."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

TICK_S = 0.125
SLOTS = 8  # each thing is looked at once in SLOTS ticks


class Looked(Protocol):
    def look(self, now: float) -> None:
        """It is `now`: end what has taken too long."""


class Wheel:
    """`now` is `time.monotonic()` at the last tick: near enough for limits of seconds, and free."""

    def __init__(self, loop: asyncio.AbstractEventLoop, every_tick: Callable[[float], None]) -> None:
        self._loop, self._every_tick = loop, every_tick
        self._slots: list[set[Looked]] = [set() for _ in range(SLOTS)]
        self._at = self._next = 0
        self._timer: asyncio.TimerHandle | None = None
        self.now = time.monotonic()

    def start(self) -> None:
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def add(self, thing: Looked) -> int:
        """Returns what `remove` takes."""
        self._next = (self._next + 1) % SLOTS
        self._slots[self._next].add(thing)
        return self._next

    def remove(self, thing: Looked, slot: int) -> None:
        self._slots[slot].discard(thing)

    def everything(self) -> list[Looked]:
        return [thing for slot in self._slots for thing in slot]

    def _tick(self) -> None:
        self.start()
        self.now = time.monotonic()
        self._every_tick(self.now)
        self._at = (self._at + 1) % SLOTS
        for thing in list(self._slots[self._at]):
            thing.look(self.now)
