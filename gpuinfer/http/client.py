"""A light HTTP/1.1 client: kept connections, Unix sockets, a timeout for every wait, streams with back-pressure.

Responses are parsed by httptools.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import cast
from urllib.parse import urlsplit

import httptools
import msgspec

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.http.http_exchange import Pairs, check_field
from gpuinfer.http.network import reset_connection

HEAD_BYTES = 256 << 10
FIELDS = 1000  # headers and trailers of one response
HIGH = 256 << 10  # bytes of a streamed body that wait for their reader before no more is read
NO_BODY = frozenset({204, 304})
LONGEST = 600  # characters of a server's error message


class ClientError(WorkError):
    """A request that got no response, or no whole one."""


class Unreachable(ClientError):
    """The server cannot be reached."""


class RequestTimedOut(ClientError):
    """The response was not complete in time."""


class ConnectionBroken(ClientError):
    """The connection was closed, or sent no HTTP, before the response was complete."""

    begun = False  # whether a byte of the response had come


class ClientConnection(asyncio.Protocol):
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

    # Requests

    def send(self, data: bytes, *, head_only: bool, limit: int, flowing: bool) -> None:
        """Send a request. `limit`: bytes of body that are taken. `flowing`: its body is read as it comes."""
        self._clear()
        self._asked = True
        self._bodiless = head_only
        self._limit = limit
        self._flowing = flowing
        if self._parser is None:
            self._parser = httptools.HttpResponseParser(self)
        self.transport.write(data)

    async def part(self) -> tuple[float, bytes] | None:
        """The next part of the body and when it came; None at its end. Raises ClientError."""
        while not self.parts:
            if self.complete:
                return None
            await self.news()
        came, data = self.parts.popleft()
        self._waiting -= len(data)
        if self._paused and self._waiting <= HIGH // 2 and not self.lost:
            self._paused = False
            self.transport.resume_reading()
        return came, data

    async def news(self) -> None:
        """Wait for more of the response. Raises ClientError."""
        if self.error is not None:
            raise self.error
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def abort(self, error: ClientError) -> None:
        """Abort the connection; the waiting request fails with this error."""
        if self.complete:
            self.transport.abort()
        else:
            self.error = self.error or error
            reset_connection(self.transport)
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
            unframed = "content-length" not in self.headers and "transfer-encoding" not in self.headers
            if error is None and self.head_come and unframed:  # the body ends with the connection (RFC 9112, 6.3)
                self.complete = True
            else:
                self._break_off("the connection was closed before the response was complete.")
        self._wake()

    def _spoilt(self, why: str) -> None:
        self.keep = False
        if not self.complete and self._asked:
            self._break_off(f"what came is no response: {why}.")
        self.transport.abort()
        self._wake()

    def _break_off(self, message: str) -> None:
        self.error = ConnectionBroken(f"{message} The server may have been stopped: see its log.")
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


BODY_BYTES = 1 << 30
_METHOD = re.compile(r"[A-Z]+")
_TARGET = re.compile(r"/[!-~]*")
REPEATABLE = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})  # idempotent: RFC 9110 9.2.2


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A whole response; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class StreamedResponse:
    """A response whose body is read as it comes. Times are of `time.perf_counter`, at the arrival of the bytes."""

    def __init__(self, line: ClientConnection, timeout_s: float, late: Callable[[float], RequestTimedOut]) -> None:
        self._line = line
        self._timeout_s = timeout_s
        self._late = late
        self.status = line.status
        self.headers: Mapping[str, str] = line.headers

    @property
    def first_byte(self) -> float:
        """When the head's first byte came."""
        return self._line.first_byte

    @property
    def last_byte(self) -> float:
        """When the latest byte came."""
        return self._line.last_byte

    async def timed(self) -> AsyncIterator[tuple[float, bytes]]:
        """The parts of the body, each with the time it came. Raises BrokenOff and TimedOut."""
        line = self._line
        while True:
            if line.parts or line.complete:
                part = await line.part()
            else:
                try:
                    async with asyncio.timeout(self._timeout_s):
                        part = await line.part()
                except TimeoutError:
                    raise self._late(self._timeout_s) from None
            if part is None:
                return
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for _, data in self.timed():
            yield data

    async def read(self) -> bytes:
        """What is left of the body."""
        return b"".join([part async for part in self])


class HttpClient:
    """Requests to one server, over at most `connections` connections at once; further requests wait their turn.

    `timeout_s` bounds a request from its call to its last byte; a stream's bounds the wait for its head and for each
    further part. Raises Unreachable, TimedOut, BrokenOff.
    """

    def __init__(
        self,
        url: str,
        *,
        unix: str | None = None,
        connections: int = 64,
        timeout_s: float = 60.0,
        headers: Pairs = (),
        body_bytes: int = BODY_BYTES,
    ) -> None:
        parts = urlsplit(url)
        try:
            self._host, self._port = parts.hostname or "", parts.port or 80
        except ValueError as error:
            raise UsageError(f"'{url}' is no address ({error}). Write http://host:port.") from None
        if parts.scheme != "http" or not self._host:
            raise UsageError(f"'{url}' is no address of a server. Write http://host:port.")
        self.url = url
        self._unix = unix
        self._timeout_s = timeout_s
        self._body_bytes = body_bytes
        self._base = parts.path.rstrip("/")
        self._fixed = f" HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n{_lines(headers)}"
        self._idle: list[ClientConnection] = []
        self._open: set[ClientConnection] = set()
        self._free = connections
        self._turns: collections.deque[asyncio.Future[None]] = collections.deque()
        self._closed = False

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Pairs = (), timeout_s: float | None = None
    ) -> HttpResponse:
        """The whole response. Repeated once where a kept connection turns out to be closed and nothing was done."""
        data = self._head(method, path, body, headers)
        seconds = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(seconds):
                line = await self._asked(method, data, flowing=False)
        except TimeoutError:
            raise self._late(seconds) from None
        parts = line.parts
        whole = parts[0][1] if len(parts) == 1 else b"".join([data for _, data in parts])
        return HttpResponse(line.status, line.headers, whole)

    @contextlib.asynccontextmanager
    async def stream(
        self, method: str, path: str, body: bytes = b"", headers: Pairs = (), timeout_s: float | None = None
    ) -> AsyncIterator[StreamedResponse]:
        """The response once its head is there; left early, the connection is closed, which tells the server."""
        data = self._head(method, path, body, headers)
        seconds = self._timeout_s if timeout_s is None else timeout_s
        try:
            async with asyncio.timeout(seconds):
                line = await self._asked(method, data, flowing=True)
        except TimeoutError:
            raise self._late(seconds) from None
        try:
            yield StreamedResponse(line, seconds, self._late)
        finally:
            self._leave(line)

    async def close(self) -> None:
        """Close all connections; requests under way end with BrokenOff."""
        self._closed = True
        for line in list(self._open):
            line.abort(ConnectionBroken(f"the client of {self.url} was closed."))
        for line in list(self._open):
            await line.gone.wait()
        self._open.clear()
        self._idle.clear()

    async def _asked(self, method: str, data: bytes, *, flowing: bool) -> ClientConnection:
        """Send a request, at most twice. The connection comes back once the response is complete, and is free then; for
        `flowing` once the head is there.
        """
        for attempt in (1, 2):
            line = await self._line(fresh=attempt == 2)
            kept = line.used
            try:
                line.send(data, head_only=method == "HEAD", limit=self._body_bytes, flowing=flowing)
                while not (line.head_come if flowing else line.complete):
                    await line.news()
            except ConnectionBroken as error:
                self._leave(line)
                if attempt == 2 or not kept or error.begun or method not in REPEATABLE or self._closed:
                    raise
            except BaseException:
                self._leave(line)
                raise
            else:
                if not flowing:
                    self._leave(line)
                return line
        raise RuntimeError("a request is asked twice at most")

    async def _line(self, *, fresh: bool) -> ClientConnection:
        """A free connection: a kept one, or a new one once the limit allows."""
        if self._free:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            self._turns.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        try:
            if not fresh:
                while self._idle:
                    line = self._idle.pop()
                    if line.reusable:
                        return line
            return await self._connect()
        except BaseException:
            self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def _connect(self) -> ClientConnection:
        if self._closed:
            raise Unreachable(f"the client of {self.url} is closed.")
        loop = asyncio.get_running_loop()
        try:
            if self._unix is not None:
                _, line = await loop.create_unix_connection(ClientConnection, self._unix)
            else:
                _, line = await loop.create_connection(ClientConnection, self._host, self._port)
        except OSError as error:
            where = self._unix or self.url
            reason = error.strerror or str(error)
            raise Unreachable(f"cannot reach {where} ({reason}). See whether the server runs.") from None
        self._open.add(line)
        return line

    def _leave(self, line: ClientConnection) -> None:
        """Keep the connection for another request, or close it."""
        if line.reusable and not self._closed:
            self._idle.append(line)
        else:
            self._open.discard(line)
            if not line.lost:
                line.abort(ConnectionBroken("the request was given up."))
        self._pass_on()

    def _late(self, seconds: float) -> RequestTimedOut:
        return RequestTimedOut(
            f"no answer from {self.url} within {seconds:g} s. Allow more time, or see the server's log."
        )

    def _head(self, method: str, path: str, body: bytes, headers: Pairs) -> bytes:
        if not _METHOD.fullmatch(method):
            raise ValueError(f"{method!r} is no method")
        if not _TARGET.fullmatch(path):
            raise ValueError(f"{path!r} is no target: it begins with a slash, and is percent-encoded")
        length = f"Content-Length: {len(body)}\r\n" if body or method not in ("GET", "HEAD") else ""
        head = f"{method} {self._base}{path}{self._fixed}{_lines(headers)}{length}\r\n"
        return head.encode("latin-1") + body


def _lines(headers: Pairs) -> str:
    for name, value in headers:
        check_field(name, value)
    return "".join([f"{name}: {value}\r\n" for name, value in headers])


class _ErrorMessage(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorMessage


def error_words(status: int, body: bytes) -> str:
    """The message of a server's error, in one line."""
    try:
        message = msgspec.json.decode(body, type=_ErrorBody).error.message
    except (msgspec.MsgspecError, UnicodeDecodeError):
        message = body.decode("utf-8", "replace")
    return " ".join(message.split())[:LONGEST] or f"it answered with status {status}."
