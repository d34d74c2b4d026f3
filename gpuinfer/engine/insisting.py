"""Asking again while a queue is full: others may ask the same backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from gpuinfer.errors import QueueFull

AGAIN_S = 0.05  # between two tries, where the queue does not say when there may be room

Answer = TypeVar("Answer")


async def insist(ask: Callable[[], Awaitable[Answer]], tries: int) -> Answer:
    """What `ask` answers. Raises the last `QueueFull` after so many, and at once whatever else `ask` raises."""
    full = QueueFull()
    for _ in range(tries):
        try:
            return await ask()
        except QueueFull as error:
            full = error
            await asyncio.sleep(error.retry_after_s or AGAIN_S)
    raise full
