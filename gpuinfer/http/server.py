"""The HTTP/1.1 server: listens, bounds its connections, ends what has lasted too long, drains."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Mapping
from typing import Any

from gpuinfer.http import network
from gpuinfer.http.http_exchange import Handler, Quick
from gpuinfer.http.network import Certificate, DisconnectWatcher
from gpuinfer.http.parser import HttpLimits, overflow_connections
from gpuinfer.http.server_connection import ServerConnection

log = logging.getLogger(__name__)

WARN_S = 10.0  # from one line of the log about too many connections to the next
CHECK_S = 1.0  # between two checks of deadlines, at most


class HttpServer:
    """Serves a handler. Made and used in one event loop.

    `counts`: connections (open now), accepted, requests, refused, slow, unread, cancelled, broken_off, crowded.
    """

    def __init__(
        self,
        handler: Handler,
        limits: HttpLimits | None = None,
        *,
        quick: Quick | None = None,
        behind_router: bool = False,
    ) -> None:
        """`behind_router`: what our router sends is logged there, and not here."""
        self.handler = handler
        self.behind_router = behind_router
        self.quick = quick
        self.limits = limits or HttpLimits()
        self.loop = asyncio.get_running_loop()
        self.disconnects = DisconnectWatcher(self.loop)
        self.bodies = 0
        self.closing = False
        self._connections: set[ServerConnection] = set()
        self._lingering: set[ServerConnection] = set()  # last response written, client not closed yet
        self._servers: list[asyncio.Server] = []
        self._sockets: list[socket.socket] = []
        self._tls: dict[str, Any] = {}
        self._paths: list[str] = []
        self._late: set[asyncio.Task[object]] = set()  # that accept connections of the backlog at the stop
        self._counts: Counter[str] = Counter()
        self._warned_at = -WARN_S
        self._emptied = asyncio.Event()
        times = (self.limits.head_s, self.limits.body_s, self.limits.idle_s, self.limits.write_s)
        self._every = max(0.01, min(CHECK_S, min(times) / 4))
        self._look_again()

    async def listen(
        self,
        host: str,
        port: int,
        *,
        reuse_port: bool = False,
        tls: Certificate | None = None,
        flags: network.ListenFlags = network.SERVER_FLAGS,
    ) -> int:
        """Listen; returns the port. Raises UsageError: it is in use (by whom, and which one is free), or not ours.
        `flags`: those that name a place.
        """
        sockets = network.bind_tcp(host, port, reuse_port, flags)
        if tls is not None:
            self._tls = tls.of_server(self.limits.head_s)
        for one in sockets:
            made = await self.loop.create_server(self._connection, sock=one, backlog=network.BACKLOG, **self._tls)
            self._servers.append(made)
            self._sockets.append(one)
        return int(sockets[0].getsockname()[1])

    async def listen_unix(self, path: str) -> None:
        """Listen at a path that only this user can connect to. Raises UsageError."""
        one = network.bind_unix(path)
        self._sockets.append(one)
        self._servers.append(await self.loop.create_unix_server(self._connection, sock=one, backlog=network.BACKLOG))
        self._paths.append(path)

    def stop_accepting(self) -> None:
        """No more connections; those that are open end after their present response."""
        self.closing = True
        for made in [made for listener in self._sockets for made in network.take_backlog(listener)]:
            taken = self.loop.connect_accepted_socket(self._connection, made, **self._tls)
            task = self.loop.create_task(taken)
            self._late.add(task)
            task.add_done_callback(self._late.discard)
        self._sockets.clear()
        for server in self._servers:
            server.close()
        self._servers.clear()
        for path in self._paths:
            with contextlib.suppress(OSError):
                os.unlink(path)
        self._paths.clear()
        for connection in list(self._connections):
            connection.drain()

    async def drain(self, within_s: float) -> bool:
        """Stop accepting, and wait for the responses under way. Whether all were complete in time."""
        self.stop_accepting()
        return await self._empty(within_s)

    async def close(self) -> None:
        """Stop now: what is under way is cancelled and broken off."""
        self.stop_accepting()
        tasks = [one for one in (connection.end() for connection in list(self._connections)) if one is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=1.0)
        for connection in [*self._connections, *self._lingering]:
            connection.transport.abort()
        await self._empty(1.0)
        self._look_at.cancel()
        self.disconnects.close()

    @property
    def counts(self) -> Mapping[str, int]:
        return {**self._counts, "connections": len(self._connections) + len(self._lingering), "body_bytes": self.bodies}

    # For its connections

    def opened(self, connection: ServerConnection) -> None:
        """A connection is open; over the limit it is refused."""
        self._counts["accepted"] += 1
        self._connections.add(connection)
        beyond = len(self._connections) + len(self._lingering) - self.limits.connections
        if self.closing:
            connection.drain()
        if beyond > 0:
            self._counts["crowded"] += 1
            if self.loop.time() - self._warned_at >= WARN_S:
                self._warned_at = self.loop.time()
                log.warning(
                    "more than %d connections at once: %d have been refused so far, with 503.",
                    self.limits.connections,
                    self._counts["crowded"],
                )
            connection.limit(heard=beyond <= overflow_connections(self.limits.refusals))

    def may_linger(self, connection: ServerConnection) -> bool:
        """The last response is written. Whether the connection may wait until the client closes too."""
        self._leave(connection)
        self._lingering.add(connection)
        return len(self._connections) + len(self._lingering) <= self.limits.connections + self.limits.refusals

    def closed(self, connection: ServerConnection) -> None:
        """A connection is closed."""
        self._lingering.discard(connection)
        self._leave(connection)

    def count(self, what: str) -> None:
        self._counts[what] += 1

    def _leave(self, connection: ServerConnection) -> None:
        self._connections.discard(connection)
        if not self._connections:
            self._emptied.set()

    async def _empty(self, within_s: float) -> bool:
        """Wait until all connections have had their last response."""
        if self._late:
            await asyncio.wait(self._late, timeout=1.0)
        if self._connections:
            self._emptied.clear()
            try:
                await asyncio.wait_for(self._emptied.wait(), within_s)
            except TimeoutError:
                return False
        return True

    def _connection(self) -> ServerConnection:
        return ServerConnection(self)

    def _look(self) -> None:
        now = self.loop.time()
        late = now - self._look_due
        for connection in [*self._connections, *self._lingering]:
            if late > self._every:  # this process was suspended or busy: bytes that came meanwhile are not read yet
                connection.extend(late)
            connection.check_timeout(now)
        self._look_again()

    def _look_again(self) -> None:
        self._look_due = self.loop.time() + self._every
        self._look_at = self.loop.call_later(self._every, self._look)
