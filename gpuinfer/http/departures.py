"""Who is gone, and who has only said all.

A side that sends no more (FIN) may still read; one that reads no more resets the connection (RST), at the latest when
something is written to it. A loop that does not read hears of no reset. Linux tells of it by epoll (EPOLLERR,
EPOLLHUP); elsewhere it is noticed when something is written.

A side that closed its socket before anything was written to it looks as one that has said all, until its system forgets
the connection (after 60 s on Linux) and resets whatever comes: so it is asked by keep-alives.
"""

from __future__ import annotations

import asyncio
import contextlib
import select
import socket
import struct
from collections.abc import Callable
from typing import cast

ASK_S = 5  # between two keep-alives
AT_ONCE = struct.pack("ii", 1, 0)  # SO_LINGER of no seconds: to close is to reset


def leave(transport: asyncio.BaseTransport) -> None:
    """Close a connection so that the other side knows at once that nobody waits for its answer."""
    end = transport.get_extra_info("socket")
    if end is not None and end.fileno() >= 0:
        with contextlib.suppress(OSError):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
    cast("asyncio.WriteTransport", transport).abort()


def say_all(transport: asyncio.Transport) -> None:
    """End this side alone. Where that cannot be (TLS), or the other is gone already, the connection ends as a whole."""
    if not transport.can_write_eof():
        transport.close()
        return
    try:
        transport.write_eof()
    except OSError:
        transport.abort()


class Departures:
    """Watches sockets for a reset."""

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

    def watch(self, transport: asyncio.BaseTransport, call: Callable[[], None]) -> None:
        """Call once the other side is gone."""
        fd = _fd(transport)
        if self._epoll is None or fd < 0:
            return
        self.forget(transport)
        self._epoll.register(fd, select.EPOLLONESHOT)  # errors and hang-ups are told without being asked for
        self._calls[fd] = call

    def watch_half(self, transport: asyncio.BaseTransport, call: Callable[[], None]) -> None:
        """The same of a side that has said all."""
        end = transport.get_extra_info("socket")
        if end is not None and end.family != socket.AF_UNIX and hasattr(socket, "TCP_KEEPIDLE"):
            with contextlib.suppress(OSError):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
                for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
                    end.setsockopt(socket.IPPROTO_TCP, option, ASK_S)
        self.watch(transport, call)

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
    end = transport.get_extra_info("socket")
    return -1 if end is None else int(end.fileno())
