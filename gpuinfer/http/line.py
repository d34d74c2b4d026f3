"""One connection of the client: a request goes out, the response comes in by httptools' parser."""

from __future__ import annotations

import asyncio
import collections
import time
from typing import cast

import httptools

from gpuinfer.errors import WorkError
from gpuinfer.http.departures import leave

HEAD_BYTES = 256 << 10
FIELDS = 1000  # headers and trailers of one response
HIGH = 256 << 10  # bytes of a streamed body that wait for their reader before no more is read
NO_BODY = frozenset({204, 304})


class ClientError(WorkError):
    """A request that got no response, or no whole one."""


class Unreachable(ClientError):
    """Nobody listens there."""


class TimedOut(ClientError):
    """No whole response in time."""


class BrokenOff(ClientError):
    """The connection ended, or said what is no HTTP, before the response was complete."""

    begun = False  # whether a byte of the response had come


class Line(asyncio.Protocol):
    """One request at a time. The parts of its response are in `parts`, each with the time it came."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport = None  # type: ignore[assignment]  # until the connection is made
        self.lost = False
        self.gone = asyncio.Event()
        self.used = False  # it has had a response before
        self._parser: httptools.HttpResponseParser | None = None
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._writable: asyncio.Future[None] | None = None
        self._paused = False
        self._clear()

    def _clear(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.head_come = False
        self.complete = False
        self.keep = False
        self.error: ClientError | None = None
        self.first_byte = 0.0
        self.last_byte = 0.0
        self.parts: collections.deque[tuple[float, bytes]] = collections.deque()
        self.size = 0  # bytes of body that have come
        self._waiting = 0  # bytes in parts
        self._head_bytes = 0
        self._fields = 0
        self._asked = False
        self._bodiless = False
        self._limit = 0
        self._flowing = False

    # Asking

    def ask(self, data: bytes, *, head_only: bool, limit: int, flowing: bool) -> None:
        """Send a request. `limit`: bytes of body that are taken. `flowing`: its body is read as it comes."""
        self._clear()
        self._asked = True
        self._bodiless = head_only
        self._limit = limit
        self._flowing = flowing
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self.transport.write(data)

    async def until_head(self) -> None:
        """Wait for the status and the headers. Raises ClientError."""
        while not self.head_come:
            await self._wait()

    async def until_complete(self) -> None:
        """Wait for the whole response. Raises ClientError."""
        while not self.complete:
            await self._wait()

    async def part(self) -> tuple[float, bytes] | None:
        """The next part of the body and when it came; None at its end. Raises ClientError."""
        while not self.parts:
            if self.complete:
                return None
            await self._wait()
        came, data = self.parts.popleft()
        self._waiting -= len(data)
        if self._paused and self._waiting <= HIGH // 2 and not self.lost:
            self._paused = False
            self.transport.resume_reading()
        return came, data

    async def _wait(self) -> None:
        if self.error is not None:
            raise self.error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def give_up(self, error: ClientError) -> None:
        """End the connection; whoever waits gets the error."""
        if self.complete:
            self.transport.abort()
        else:
            self.error = self.error or error
            leave(self.transport)
        self._wake()

    @property
    def reusable(self) -> bool:
        """Whether another request can go out."""
        return self.complete and self.keep and not self.lost and not self.transport.is_closing()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # From the transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self.last_byte = time.perf_counter()
        if not self._asked or self.complete or self._parser is None:
            self._spoilt("bytes that belong to no response")
            return
        if not self.first_byte:
            self.first_byte = self.last_byte
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._spoilt(str(error.__context__ or error) or type(error).__name__)
            return
        if not self.head_come:
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._spoilt("a head of more than 256 KB")
                return
        if self._flowing or self.complete:
            self._wake()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self.gone.set()
        if self._asked and not self.complete and self.error is None:
            if error is None and self._ends_with_connection():
                self.complete = True
            else:
                self._break_off("the connection was closed before the response was complete.")
        self._wake()

    def _ends_with_connection(self) -> bool:
        """Whether the body has no other end (RFC 9112 6.3)."""
        return self.head_come and "content-length" not in self.headers and "transfer-encoding" not in self.headers

    def _spoilt(self, why: str) -> None:
        self.keep = False
        if not self.complete and self._asked:
            self._break_off(f"what came is no response: {why}.")
        self.transport.abort()
        self._wake()

    def _break_off(self, message: str) -> None:
        self.error = BrokenOff(f"{message} The server may have been stopped: see its log.")
        self.error.begun = self.first_byte > 0

    # From the parser

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += 1
        if self._fields > FIELDS:
            raise httptools.HttpParserError(f"more than {FIELDS:,} headers")
        key, text = name.decode("latin-1").lower(), value.decode("latin-1")
        self.headers[key] = f"{self.headers[key]}, {text}" if key in self.headers else text

    def on_headers_complete(self) -> None:
        parser = cast("httptools.HttpResponseParser", self._parser)
        status = parser.get_status_code()
        if status < 200:
            self.headers.clear()
            return
        self.status = status
        self.head_come = True
        self.keep = parser.should_keep_alive()
        if self._bodiless:
            self.complete = True
            self.used = True
            self._parser = None  # this one waits for a body that never comes

    def on_body(self, data: bytes) -> None:
        self.size += len(data)
        if self.size > self._limit:
            raise httptools.HttpParserError(f"a body of more than {self._limit:,} bytes")
        self.parts.append((self.last_byte, data))
        self._waiting += len(data)
        if self._flowing and self._waiting > HIGH and not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def on_message_complete(self) -> None:
        if self.head_come:
            self.complete = True
            self.used = True
