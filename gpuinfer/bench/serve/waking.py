"""Waits that end when they should, on any event loop."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

from gpuinfer.bench.serve.record import clock
from gpuinfer.host.kernel_timer import LEAST_S, KernelTimer

SleepUntil = Callable[[float], Awaitable[None]]


@contextlib.asynccontextmanager
async def waking() -> AsyncIterator[SleepUntil]:
    """A function that sleeps until a time of `clock`, for one task at a time. By the loop's timers where there is no
    timer of the kernel's to be had.
    """
    rung: asyncio.Future[None] | None = None

    def ring() -> None:
        if rung is not None and not rung.done():
            rung.set_result(None)

    loop = asyncio.get_running_loop()
    try:
        timer = KernelTimer(loop, ring)
    except OSError:
        yield lambda until: asyncio.sleep(max(0.0, until - clock()))
        return

    async def sleep_until(until: float) -> None:
        nonlocal rung
        if until - clock() < LEAST_S:
            await asyncio.sleep(0)
            return
        rung = loop.create_future()
        timer.set(until)
        await rung

    try:
        yield sleep_until
    finally:
        timer.close()
