"""The event loop of servers and clients: uvloop's where it is installed."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from gpuinfer.host import loop

T = TypeVar("T")


def new_loop() -> asyncio.AbstractEventLoop:
    """A loop of uvloop's; where there is none, the ordinary one with precise timers."""
    try:
        import uvloop
    except ImportError:  # no such wheel for this machine
        return loop.new_loop()
    made: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return made


def run(main: Coroutine[Any, Any, T]) -> T:
    """Like `host.loop.run`, on `new_loop()`. Timers are of whole milliseconds there."""
    return loop.run(main, new_loop)
