"""One timer of the event loop for many times to wake: it rings at the earliest."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable


class Alarm:
    """Calls `ring`, in the context of whoever made the alarm. After it has rung it must be set again.

    It may ring early, for a time that no longer matters: `ring` looks at the clock for itself.
    """

    __slots__ = ("_context", "_loop", "_ring", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._context = contextvars.copy_context()
        self._timer: asyncio.TimerHandle | None = None

    def ring_within(self, seconds: float) -> None:
        """Ring after this time, unless it rings earlier anyway."""
        if self._timer is not None:
            if self._timer.when() <= self._loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._go_off, context=self._context)

    def ring_soon(self) -> None:
        """Ring once the present turn of the loop is over; for each call, whatever else is set."""
        self._loop.call_soon(self._ring, context=self._context)

    def clear(self) -> None:
        """Do not ring after all, as far as `ring_within` set it."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _go_off(self) -> None:
        self._timer = None
        self._ring()
