"""A workload's task, followed from its generator of progress."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

LOOK_S = 0.1  # between two words on how it goes


async def followed(task: asyncio.Task[Any], stopping: asyncio.Event) -> AsyncIterator[None]:
    """Comes back now and then until the task has ended; asked to stop, it cancels the task. Raises what that raises."""
    stop = asyncio.create_task(stopping.wait())
    try:
        while not task.done():
            await asyncio.wait({task, stop}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
            if stop.done() and not task.done():
                task.cancel()
                await asyncio.wait({task})
            yield
        with contextlib.suppress(asyncio.CancelledError):
            task.result()
    finally:
        stop.cancel()
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # seen, though something else is being raised
