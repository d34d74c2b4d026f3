"""Waits that end when they should: timers of uvloop are of whole milliseconds, and half of one is much of an answer."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable

from gpuinfer.bench.serve.record import clock

MONOTONIC, FLAGS, ABSOLUTE = 1, os.O_NONBLOCK | os.O_CLOEXEC, 1  # of <sys/timerfd.h>; the clock is that of `record`
LEAST_S = 1e-6

SleepUntil = Callable[[float], Awaitable[None]]


class _Spec(ctypes.Structure):
    _fields_ = (("every_s", ctypes.c_long), ("every_ns", ctypes.c_long), ("s", ctypes.c_long), ("ns", ctypes.c_long))


@contextlib.asynccontextmanager
async def waking() -> AsyncIterator[SleepUntil]:
    """A function that sleeps until a time of `clock`, for one task at a time. By the loop's timers where there is no
    timer of the kernel's to be had.
    """
    loop = asyncio.get_running_loop()
    try:
        library = ctypes.CDLL(None, use_errno=True)
        descriptor = library.timerfd_create(MONOTONIC, FLAGS) if sys.platform == "linux" else -1
    except (AttributeError, OSError):
        descriptor = -1
    if descriptor < 0:
        yield lambda until: asyncio.sleep(max(0.0, until - clock()))
        return
    rung: asyncio.Future[None] | None = None

    def ring() -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(descriptor, 8)
        if rung is not None and not rung.done():
            rung.set_result(None)

    async def sleep_until(until: float) -> None:
        nonlocal rung
        if until - clock() < LEAST_S:
            await asyncio.sleep(0)
            return
        rung = loop.create_future()
        seconds = int(until)
        spec = _Spec(0, 0, seconds, int((until - seconds) * 1e9))
        library.timerfd_settime(descriptor, ABSOLUTE, ctypes.byref(spec), None)
        await rung

    loop.add_reader(descriptor, ring)
    try:
        yield sleep_until
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
