"""The connections to one replica, each carrying one request at a time, and the requests that wait for one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol, cast

from gpuinfer.fleet.router.http_message import CHUNKED, BadChunk, BrokenResponse, ChunkReader, ResponseHead
from gpuinfer.http.network import reset_connection

LONGEST_HEAD = 64 << 10
INTERIM = 8  # answers of 1xx before the real one

_HEAD, _SIZED, _CHUNKS, _OPEN_END = range(4)


class ConnectionUser(Protocol):
    """A request under way, as the connection that carries it sees it."""

    method: bytes

    def answered(self, head: ResponseHead) -> None:
        """The answer's head is here."""

    def answered_whole(self, head: ResponseHead, body: bytes) -> None:
        """`answered`, `content` and `ended` in one, of an answer that came in one piece."""

    def content(self, data: bytes, plain: bool) -> None:
        """Some of its body. `plain`: it stands in whole chunks in the bytes last received, which are `received`."""

    def trailer(self, lines: bytes) -> None:
        """What follows a body in chunks."""

    def ended(self) -> None:
        """The answer is whole. The link is free again by now, or closed."""

    def lost(self, kind: str) -> None:
        """No more of it will come over this link, which is closed."""


class ConnectionHome(Protocol):
    """Where links are kept while nobody travels."""

    def take_back(self, link: ReplicaConnection) -> None: ...

    def gone(self, link: ReplicaConnection) -> None: ...


class ReplicaConnection(asyncio.Protocol):
    """The replica's side of the relay."""

    __slots__ = (
        "_chunks",
        "_head",
        "_home",
        "_interim",
        "_last_head",
        "_last_method",
        "_last_raw",
        "_left",
        "_part",
        "_state",
        "_transport",
        "heard",
        "idle_since",
        "is_open",
        "received",
        "reused",
        "traveller",
    )

    def __init__(self, home: ConnectionHome) -> None:
        self._home = home
        self._transport = cast(asyncio.Transport, None)
        self._state, self._left, self._part, self._interim = _HEAD, 0, b"", 0
        self._chunks: ChunkReader | None = None
        self._head: ResponseHead | None = None
        self._last_raw = self._last_method = b""  # of the head before, and what it was read as
        self._last_head = cast(ResponseHead, None)
        self.traveller: ConnectionUser | None = None
        self.is_open = False
        self.reused = False  # it has carried a request before
        self.heard = False  # whether anything of the answer has come
        self.received = b""  # the latest piece, as it came
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def carry(self, traveller: ConnectionUser, message: bytes) -> None:
        """Send a request; its answer goes to the traveller."""
        self.traveller = traveller
        self.heard = False
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        traveller = self.traveller
        if traveller is None:  # nobody asked
            self._transport.abort()
            return
        self.heard = True
        self.received = data
        try:
            if self._state == _HEAD:
                rest = self._take_head(traveller, self._part + data if self._part else data)
                if rest is None:
                    return
                data = rest
                if self.traveller is not traveller:  # it has had enough
                    return
            self._take_body(traveller, data)
        except (BrokenResponse, BadChunk):
            self._break("broken")

    def _take_head(self, traveller: ConnectionUser, data: bytes) -> bytes | None:
        """What follows the head; None while that is not whole, or when nothing follows."""
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > LONGEST_HEAD or not data.startswith(b"HTTP/1."[: len(data)]):
                    raise BrokenResponse
                self._part = data
                return None
            head = self._read_head(data[:end], traveller.method)
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
            traveller.answered_whole(head, data[end:])
            return None
        if head.length >= 0:
            self._state, self._left = _SIZED, head.length
        elif head.length == CHUNKED:
            self._state, self._chunks = _CHUNKS, ChunkReader()
        else:
            self._state = _OPEN_END
        traveller.answered(head)
        return data[end:] if end < len(data) else None

    def _read_head(self, raw: bytes, method: bytes) -> ResponseHead:
        """Heads of answers that come within one second are often the same bytes: read once."""
        if raw == self._last_raw and method == self._last_method:
            return self._last_head
        self._last_head = head = ResponseHead(raw, method)
        self._last_raw, self._last_method = raw, method
        return head

    def _take_body(self, traveller: ConnectionUser, data: bytes) -> None:
        if self._state == _SIZED:
            self._left -= len(data)
            if self._left < 0:
                raise BrokenResponse
            if data:
                traveller.content(data, False)
            if not self._left:
                self._finish(traveller)
        elif self._chunks is not None:
            chunks = self._chunks
            content = chunks.feed(data)
            if content:
                traveller.content(content, chunks.plain and data is self.received)
            if chunks.done and self.traveller is traveller:
                if chunks.rest:
                    raise BrokenResponse
                if chunks.trailer:
                    traveller.trailer(chunks.trailer)
                self._finish(traveller)
        else:
            traveller.content(data, False)

    def _finish(self, traveller: ConnectionUser) -> None:
        self._release()
        traveller.ended()

    def _release(self) -> None:
        """The answer is whole: be free for another, if that can be."""
        head, self._head, self._chunks = self._head, None, None
        self._state, self._interim = _HEAD, 0
        self.traveller, self.received, self.reused = None, b"", True
        if head is None or not head.keep or self._transport.get_write_buffer_size():
            self._close()  # the last: it has answered before it had the whole request
        else:
            self._home.take_back(self)

    def _break(self, kind: str) -> None:
        traveller, self.traveller = self.traveller, None
        self._close(abort=True)
        if traveller is not None:
            traveller.lost(kind)

    def drop(self) -> None:
        """Nobody wants the answer any more: the replica sees that its client has gone."""
        self.traveller = None
        self._close(abort=True)

    def _close(self, abort: bool = False) -> None:
        if self.is_open:
            self.is_open = False
            self._home.gone(self)
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
            self._home.gone(self)
        traveller, self.traveller = self.traveller, None
        if traveller is None:
            return
        if self._state == _OPEN_END and error is None:
            traveller.ended()
        else:
            traveller.lost("reset")


CONNECTING = 32  # at once: a burst of requests takes links that come free instead of opening one each
FREELY = 256  # links that are made whenever one is wanted; more only if those in use do not come free soon
SOON = 4  # times the span between two ticks
IDLE_S = 30.0  # then a link that nobody needs is closed
AT_ONCE = 2**16  # bytes of a body that are cheaper to copy than to send by themselves


class PoolWaiter(ConnectionUser, Protocol):
    """A traveller that may still have to wait for its link."""

    waits: bool  # it is not gone, and has no link yet

    def board(self, link: ReplicaConnection) -> bytes:
        """It has got this link; returns what to send."""


class ConnectionPool:
    """Links are made as they are needed, some at a time. One that cannot be made is told to all who wait for one."""

    def __init__(
        self,
        open_connection: Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]],
        connect_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._open_connection, self._connect_s, self._loop = open_connection, connect_s, loop
        self._idle: list[ReplicaConnection] = []
        self._wanted: deque[PoolWaiter] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._open = 0  # links
        self._returned = self._returns = 0  # links that came free since the last tick, and between the two before it

    def take(self, passenger: PoolWaiter) -> None:
        """Give it a link, now or when there is one. `lost` tells it that there is none."""
        if self._idle:
            link = self._idle.pop()
            link.carry(passenger, passenger.board(link))
            return
        self._wanted.append(passenger)
        self._connect()

    def take_back(self, link: ReplicaConnection) -> None:
        self._returned += 1
        while self._wanted:
            passenger = self._wanted.popleft()
            if passenger.waits:
                link.carry(passenger, passenger.board(link))
                return
        if self._closed:
            link.drop()
        else:
            link.idle_since = time.monotonic()
            self._idle.append(link)

    def gone(self, link: ReplicaConnection) -> None:
        self._open -= 1
        if link.traveller is None and link in self._idle:
            self._idle.remove(link)

    def _connect(self) -> None:
        if self._open >= FREELY and self._returns * SOON >= len(self._wanted):
            return  # a replica that answers faster than we can ask gains nothing by more links
        if len(self._tasks) < min(CONNECTING, len(self._wanted)):
            task = self._loop.create_task(self._connect_one())
            self._tasks.add(task)
            task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._connect()

    async def _connect_one(self) -> None:
        link = ReplicaConnection(self)
        try:
            async with asyncio.timeout(self._connect_s):
                await self._open_connection(lambda: link)
        except TimeoutError:
            self._fail("timeout")
        except OSError:
            self._fail("refused")
        else:
            self._open += 1  # before what `gone` may have taken off already
            if link.is_open:
                self.take_back(link)

    def _fail(self, kind: str) -> None:
        waiting, self._wanted = self._wanted, deque()
        for passenger in waiting:
            if passenger.waits:
                passenger.lost(kind)

    def tick(self) -> None:
        self._returns, self._returned = self._returned, 0
        if self._wanted:
            self._connect()

    def tidy(self, now: float) -> None:
        """Close what has been idle for long; the longest idle stand first."""
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.pop(0).drop()

    def close(self) -> None:
        """Close what is idle, and what is in use once it is free."""
        self._closed = True
        while self._idle:
            self._idle.pop().drop()
        for task in list(self._tasks):
            task.cancel()
        self._fail("refused")
