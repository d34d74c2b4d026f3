"""Hands things from one thread over to another, or to a coroutine on another event loop."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from gpuinfer.errors import UsageError

T = TypeVar("T")


class ReadTwice(UsageError):
    """Another thread or task reads already, and goes on."""


class Mailbox(Generic[T]):
    """What one thread puts, another takes: a thread that blocks, or a coroutine on a loop of its own."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._lock = threading.Lock()
        self._wake: Callable[[], object] | None = None  # of the reader that waits

    def put(self, item: T) -> None:
        self._items.append(item)
        with self._lock:
            wake, self._wake = self._wake, None
        if wake is not None:
            wake()

    def take(self) -> T | None:
        """What came first; None where nothing is there."""
        return self._items.popleft() if self._items else None

    def wait(self) -> None:
        """Until something is there."""
        arrived = threading.Event()
        if self._expects(arrived.set):
            try:
                arrived.wait()
            finally:
                self._wake = None

    async def arrival(self) -> None:
        """The same on a loop."""
        loop = asyncio.get_running_loop()
        arrived = loop.create_future()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the reader's loop is closed
                loop.call_soon_threadsafe(_finish, arrived)

        if self._expects(wake):
            try:
                await arrived
            finally:
                self._wake = None

    def _expects(self, wake: Callable[[], object]) -> bool:
        with self._lock:
            if self._items:
                return False
            if self._wake is not None:
                raise ReadTwice("these answers are being read already. Let one thread or task read them.")
            self._wake = wake
            return True


def _finish(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
