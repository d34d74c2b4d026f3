"""The connections to one replica, each carrying one request at a time, and the requests that wait for one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, cast

from gpuinfer.fleet.router.http_message import CHUNKED, BrokenResponse, ResponseHead
from gpuinfer.http.network import reset_connection
from gpuinfer.http.parser import ChunkDecoder, Malformed

if TYPE_CHECKING:
    from gpuinfer.fleet.router.proxied_request import ProxiedRequest

LONGEST_HEAD = 64 << 10
INTERIM = 8  # answers of 1xx before the real one

_HEAD, _SIZED, _CHUNKS, _OPEN_END = range(4)


class ReplicaConnection(asyncio.Protocol):
    """One connection to a replica, and the request that it carries."""

    __slots__ = (
        "_chunks",
        "_head",
        "_interim",
        "_last_head",
        "_last_method",
        "_last_raw",
        "_left",
        "_part",
        "_pool",
        "_state",
        "_transport",
        "answering",
        "idle_since",
        "is_open",
        "received",
        "request",
        "reused",
    )

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._transport = cast(asyncio.Transport, None)
        self._state, self._left, self._part, self._interim = _HEAD, 0, b"", 0
        self._chunks: ChunkDecoder | None = None
        self._head: ResponseHead | None = None
        self._last_raw = self._last_method = b""  # of the head before, and what it was read as
        self._last_head = cast(ResponseHead, None)
        self.request: ProxiedRequest | None = None
        self.is_open = False
        self.reused = False  # it has carried a request before
        self.answering = False  # whether anything of the answer has come
        self.received = b""  # the latest piece, as it came
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def carry(self, request: ProxiedRequest, message: bytes) -> None:
        """Send a request's bytes; its answer is passed to it."""
        self.request = request
        self.answering = False
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        request = self.request
        if request is None:  # bytes that answer no request
            self._transport.abort()
            return
        self.answering = True
        self.received = data
        try:
            if self._state == _HEAD:
                rest = self._take_head(request, self._part + data if self._part else data)
                if rest is None:
                    return
                data = rest
                if self.request is not request:  # given up meanwhile
                    return
            self._take_body(request, data)
        except (BrokenResponse, Malformed):
            request, self.request = self.request, None
            self._close(abort=True)
            if request is not None:
                request.lost("broken")

    def _take_head(self, request: ProxiedRequest, data: bytes) -> bytes | None:
        """Take the answer's head; returns the bytes behind it, None while the head is incomplete or nothing follows."""
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > LONGEST_HEAD or not data.startswith(b"HTTP/1."[: len(data)]):
                    raise BrokenResponse
                self._part = data
                return None
            raw = data[:end]
            if raw != self._last_raw or request.method != self._last_method:
                self._last_head, self._last_raw, self._last_method = (
                    ResponseHead(raw, request.method),
                    raw,
                    request.method,
                )
            head = self._last_head  # answers within one second often have the same, which is parsed once
            if head.status >= 200:
                break
            data = data[end:]
            self._interim += 1
            if head.status == 101 or self._interim > INTERIM:
                raise BrokenResponse
            if not data:
                self._part = b""
                return None
        self._part = b""
        self._head = head
        if head.length == len(data) - end:
            self._release()
            request.answered_whole(head, data[end:])
            return None
        if head.length >= 0:
            self._state, self._left = _SIZED, head.length
        elif head.length == CHUNKED:
            self._state, self._chunks = _CHUNKS, ChunkDecoder()
        else:
            self._state = _OPEN_END
        request.answered(head)
        return data[end:] if end < len(data) else None

    def _take_body(self, request: ProxiedRequest, data: bytes) -> None:
        if self._state == _SIZED:
            self._left -= len(data)
            if self._left < 0:
                raise BrokenResponse
            if data:
                request.content(data, False)
            if not self._left:
                self._release()
                request.ended()
        elif self._chunks is not None:
            chunks = self._chunks
            content = chunks.feed(data)
            if content:
                request.content(content, chunks.whole and data is self.received)
            if chunks.complete and self.request is request:
                if chunks.rest:
                    raise BrokenResponse
                if chunks.trailer:
                    request.trailer(chunks.trailer)
                self._release()
                request.ended()
        else:
            request.content(data, False)

    def _release(self) -> None:
        """The answer is complete: give the connection back to the pool, or close it."""
        head, self._head, self._chunks = self._head, None, None
        self._state, self._interim = _HEAD, 0
        self.request, self.received, self.reused = None, b"", True
        if head is None or not head.keep or self._transport.get_write_buffer_size():
            self._close()  # also after an answer to a request that is not all sent
        else:
            self._pool.take_back(self)

    def drop(self) -> None:
        """The answer is not wanted any more: reset the connection, so that the replica notices."""
        self.request = None
        self._close(abort=True)

    def _close(self, abort: bool = False) -> None:
        if self.is_open:
            self.is_open = False
            self._pool.gone(self)
        reset_connection(self._transport) if abort else self._transport.close()

    def pause(self) -> None:
        """Read no more for now."""
        if self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        was_open, self.is_open = self.is_open, False
        if was_open:
            self._pool.gone(self)
        request, self.request = self.request, None
        if request is None:
            return
        if self._state == _OPEN_END and error is None:
            request.ended()
        else:
            request.lost("reset")


CONNECTING = 32  # at once: a burst of requests takes connections that come free instead of opening one each
FREELY = 256  # connections that are made whenever one is wanted; more only if those in use are not free soon
SOON = 4  # times the span between two ticks
IDLE_S = 30.0  # an idle connection is closed after it


class ConnectionPool:
    """Makes connections as they are needed, some at a time. If one cannot be made, all waiting requests are `lost`."""

    def __init__(
        self,
        open_connection: Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]],
        connect_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._open_connection, self._connect_s, self._loop = open_connection, connect_s, loop
        self._idle: list[ReplicaConnection] = []
        self._waiting: deque[ProxiedRequest] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._open = 0  # connections, idle or in use
        self._returned = self._returns = (
            0  # connections that came free since the last tick, and between the two before it
        )

    def take(self, request: ProxiedRequest) -> None:
        """Send a request over an idle connection, or over the next one that is free."""
        if self._idle:
            connection = self._idle.pop()
            connection.carry(request, request.attach(connection))
            return
        self._waiting.append(request)
        self._connect()

    def take_back(self, connection: ReplicaConnection) -> None:
        """A connection is free: give it to a waiting request, or keep it."""
        self._returned += 1
        while self._waiting:
            request = self._waiting.popleft()
            if request.waits:
                connection.carry(request, request.attach(connection))
                return
        if self._closed:
            connection.drop()
        else:
            connection.idle_since = time.monotonic()
            self._idle.append(connection)

    def gone(self, connection: ReplicaConnection) -> None:
        """A connection is closed."""
        self._open -= 1
        if connection.request is None and connection in self._idle:
            self._idle.remove(connection)

    def _connect(self) -> None:
        if self._open >= FREELY and self._returns * SOON >= len(self._waiting):
            return  # more connections do not speed up a replica that answers faster than requests come
        if len(self._tasks) < min(CONNECTING, len(self._waiting)):
            task = self._loop.create_task(self._connect_one())
            self._tasks.add(task)
            task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._connect()

    async def _connect_one(self) -> None:
        connection = ReplicaConnection(self)
        try:
            async with asyncio.timeout(self._connect_s):
                await self._open_connection(lambda: connection)
        except (TimeoutError, OSError) as error:
            self._fail("timeout" if isinstance(error, TimeoutError) else "refused")
        else:
            self._open += 1  # before `gone` may have subtracted it
            if connection.is_open:
                self.take_back(connection)

    def _fail(self, kind: str) -> None:
        waiting, self._waiting = self._waiting, deque()
        for request in waiting:
            if request.waits:
                request.lost(kind)

    def tick(self) -> None:
        """Called at each tick of the timer."""
        self._returns, self._returned = self._returned, 0
        if self._waiting:
            self._connect()

    def tidy(self, now: float) -> None:
        """Close connections that have been idle for long; those idle the longest are first in the list."""
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.pop(0).drop()

    def close(self) -> None:
        """Close idle connections now, and those in use once they are free."""
        self._closed = True
        while self._idle:
            self._idle.pop().drop()
        for task in list(self._tasks):
            task.cancel()
        self._fail("refused")
