"""Asyncio on a virtual clock: a wait takes no time, and code under test sees the seconds pass all the same."""

from __future__ import annotations

import asyncio
import math
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

THREAD_WAIT_S = 10.0  # real seconds that a thread may take when nothing else is left to wait for


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def advance(self, seconds: float) -> None:
        self.now += seconds


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that jumps to its next timer. Raises `RuntimeError` when all that is left would wait for ever."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        super().__init__(_JumpingSelector(self.clock))

    def time(self) -> float:
        now = self.clock()
        # What asyncio takes for the same moment: its nanosecond would join timers that are not, and less than a float
        # can add would have it wait for a timer that is due.
        self._clock_resolution = math.ulp(now)
        return now


class _JumpingSelector(selectors.SelectSelector):
    def __init__(self, clock: VirtualClock) -> None:
        super().__init__()
        self._clock = clock

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(0)
        if events or timeout == 0:
            return events
        if timeout is not None:
            self._clock.advance(timeout)
            return []
        events = super().select(THREAD_WAIT_S)
        if not events:
            raise RuntimeError("everything waits, and nothing is left that could end it. Give each wait an owner.")
        return events


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Like `asyncio.run`, on a virtual clock: `asyncio.get_running_loop().time` reads it."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
