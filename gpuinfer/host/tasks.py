"""Ending tasks of the event loop, surely."""

from __future__ import annotations

import asyncio
from typing import Any

AGAIN_S = 0.5


async def ended(task: asyncio.Task[Any] | None) -> None:
    """Cancel a task until it has ended. A cancellation can get lost: that of one that awaits `asyncio.wait_for`, when
    what it waits for happens in the same moment (Python 3.11; bpo-37658). What the task raises is not raised here.
    """
    while task is not None and not task.done():
        task.cancel()
        await asyncio.wait({task}, timeout=AGAIN_S)
    if task is not None and not task.cancelled():
        task.exception()  # seen
