"""A timer of the kernel's, for event loops whose own are of whole milliseconds, as uvloop's are: half of one is much of
an answer, and a wait of 0.3 ms would end at once, again and again.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import Callable

MONOTONIC, FLAGS, ABSOLUTE = 1, os.O_NONBLOCK | os.O_CLOEXEC, 1  # of <sys/timerfd.h>
LEAST_S = 1e-6  # a time of nought would disarm it


class _Spec(ctypes.Structure):
    _fields_ = (("every_s", ctypes.c_long), ("every_ns", ctypes.c_long), ("s", ctypes.c_long), ("ns", ctypes.c_long))


class KernelTimer:
    """Calls `ring` on the loop once the time that was set last has come. Close it before the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        """Raises `OSError` where there is no such timer."""
        try:
            self._library = ctypes.CDLL(None, use_errno=True)
            descriptor = self._library.timerfd_create(MONOTONIC, FLAGS) if sys.platform == "linux" else -1
        except AttributeError:
            descriptor = -1
        if descriptor < 0:
            raise OSError("no timers of the kernel here")
        self._descriptor, self._loop, self._ring = descriptor, loop, ring
        loop.add_reader(descriptor, self._rung)

    def set(self, at: float) -> None:
        """`at` is a time of `time.monotonic`; one that is past means now."""
        seconds = int(at := max(at, LEAST_S))
        spec = _Spec(0, 0, seconds, int((at - seconds) * 1e9))
        self._library.timerfd_settime(self._descriptor, ABSOLUTE, ctypes.byref(spec), None)

    def close(self) -> None:
        """It does not ring any more."""
        if self._descriptor >= 0:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.remove_reader(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1

    def _rung(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it was set anew meanwhile
            os.read(self._descriptor, 8)
            self._ring()
