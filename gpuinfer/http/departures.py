"""Notices that the other side of a socket has gone while nobody reads from it.

A loop that does not read hears of nothing. Linux tells by epoll of a side that was shut (EPOLLRDHUP) and of a
connection that was reset (EPOLLERR, EPOLLHUP) without reading. Elsewhere nothing is noticed until something is read or
written.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
from collections.abc import Callable


class Departures:
    """Watches sockets, each for one event."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._epoll = select.epoll() if hasattr(select, "epoll") else None
        self._calls: dict[int, Callable[[], None]] = {}
        if self._epoll is not None:
            loop.add_reader(self._epoll.fileno(), self._look)

    @property
    def watched(self) -> int:
        """How many sockets are watched."""
        return len(self._calls)

    def watch(self, transport: asyncio.BaseTransport, call: Callable[[], None], *, half: bool) -> None:
        """Call when the connection is gone; with `half`, also when the other side sends no more."""
        fd = _fd(transport)
        if self._epoll is None or fd < 0:
            return
        self.forget(transport)
        wanted = select.EPOLLONESHOT | (select.EPOLLRDHUP if half else 0)
        self._epoll.register(fd, wanted)
        self._calls[fd] = call

    def forget(self, transport: asyncio.BaseTransport) -> None:
        """Watch it no longer."""
        if not self._calls:
            return
        fd = _fd(transport)
        if self._calls.pop(fd, None) is not None and self._epoll is not None:
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)

    def close(self) -> None:
        """Watch nothing any more."""
        if self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._calls.clear()

    def _look(self) -> None:
        if self._epoll is None:
            return
        for fd, _ in self._epoll.poll(0):
            call = self._calls.pop(fd, None)
            with contextlib.suppress(OSError):
                self._epoll.unregister(fd)
            if call is not None:
                call()


def _fd(transport: asyncio.BaseTransport) -> int:
    socket = transport.get_extra_info("socket")
    return -1 if socket is None else int(socket.fileno())
