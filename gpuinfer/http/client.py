"""A light HTTP/1.1 client: kept connections, Unix sockets, an end to every wait, streams with back-pressure."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import re
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpuinfer.errors import UsageError
from gpuinfer.http.line import BrokenOff, ClientError, Line, TimedOut, Unreachable
from gpuinfer.http.replies import Pairs, check_field

__all__ = ["BrokenOff", "Client", "ClientError", "Response", "StreamedResponse", "TimedOut", "Unreachable"]

BODY_BYTES = 1 << 30
_METHOD = re.compile(r"[A-Z]+")
_TARGET = re.compile(r"/[!-~]*")
REPEATABLE = frozenset({"GET", "HEAD", "PUT", "DELETE", "OPTIONS"})  # idempotent: RFC 9110 9.2.2


@dataclass(frozen=True, slots=True)
class Response:
    """A whole response; names of headers in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class StreamedResponse:
    """A response whose body is read as it comes. Times are of `time.perf_counter`, at the arrival of the bytes."""

    def __init__(self, line: Line, timeout_s: float, late: Callable[[float], TimedOut]) -> None:
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
                part = await self._next()
            if part is None:
                return
            yield part

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for _, data in self.timed():
            yield data

    async def read(self) -> bytes:
        """What is left of the body."""
        return b"".join([part async for part in self])

    async def _next(self) -> tuple[float, bytes] | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._line.part()
        except TimeoutError:
            raise self._late(self._timeout_s) from None


class Client:
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
        self._idle: list[Line] = []
        self._open: set[Line] = set()
        self._free = connections
        self._turns: collections.deque[asyncio.Future[None]] = collections.deque()
        self._closed = False

    async def request(
        self, method: str, path: str, body: bytes = b"", headers: Pairs = (), timeout_s: float | None = None
    ) -> Response:
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
        return Response(line.status, line.headers, whole)

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
            line.give_up(BrokenOff(f"the client of {self.url} was closed."))
        for line in list(self._open):
            await line.gone.wait()
        self._open.clear()
        self._idle.clear()

    async def _asked(self, method: str, data: bytes, *, flowing: bool) -> Line:
        """The line, once the response is whole, and free for others then; `flowing`: once its head is there."""
        for attempt in (1, 2):
            line = await self._line(fresh=attempt == 2)
            kept = line.used
            try:
                line.ask(data, head_only=method == "HEAD", limit=self._body_bytes, flowing=flowing)
                await (line.until_head() if flowing else line.until_complete())
            except BrokenOff as error:
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

    async def _line(self, *, fresh: bool) -> Line:
        """A connection that nobody else uses: a kept one, or a new one once there may be another."""
        if self._free:
            self._free -= 1
        else:
            await self._turn()
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

    async def _turn(self) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()
            raise

    def _pass_on(self) -> None:
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1

    async def _connect(self) -> Line:
        if self._closed:
            raise Unreachable(f"the client of {self.url} is closed.")
        loop = asyncio.get_running_loop()
        try:
            if self._unix is not None:
                _, line = await loop.create_unix_connection(Line, self._unix)
            else:
                _, line = await loop.create_connection(Line, self._host, self._port)
        except OSError as error:
            where = self._unix or self.url
            reason = error.strerror or str(error)
            raise Unreachable(f"cannot reach {where} ({reason}). See whether the server runs.") from None
        self._open.add(line)
        return line

    def _leave(self, line: Line) -> None:
        """Back to the kept ones, or closed."""
        if line.reusable and not self._closed:
            self._idle.append(line)
        else:
            self._open.discard(line)
            if not line.lost:
                line.give_up(BrokenOff("the request was given up."))
        self._pass_on()

    def _late(self, seconds: float) -> TimedOut:
        return TimedOut(f"no answer from {self.url} within {seconds:g} s. Allow more time, or see the server's log.")

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
