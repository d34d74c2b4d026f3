"""A router in this process, between raw connections and small upstream servers that can misbehave in any way."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.fleet.router.client_connection import Listener
from gpuinfer.fleet.router.protocol import FleetMember, RouterConfig
from gpuinfer.fleet.router.relay import Relay
from gpuinfer.fleet.router.shared_counters import MemberCell, ProcessCell, SharedCounters

LIMIT_S = 60.0
ANSWER = b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 15\r\n\r\n{"answer": "ok"}'[:-1]
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@dataclass
class Request:
    """What an upstream server was asked."""

    first: str
    headers: dict[str, str]
    body: bytes
    raw: bytes


Answering = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def response(status: int, body: bytes = b"", *lines: str) -> bytes:
    """A whole response with its length and these header lines."""
    head = "".join(f"{line}\r\n" for line in (f"HTTP/1.1 {status} X", *lines, f"Content-Length: {len(body)}"))
    return f"{head}\r\n".encode() + body


async def read_request(reader: asyncio.StreamReader) -> Request:
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", "0")))
    return Request(first, headers, body, head + body)


async def well(request: Request, writer: asyncio.StreamWriter) -> None:
    """The answer of a healthy replica."""
    writer.write(ANSWER)


async def hang(request: Request, writer: asyncio.StreamWriter) -> None:
    await asyncio.Event().wait()


async def reset_at_once(request: Request, writer: asyncio.StreamWriter) -> None:
    reset(writer)


async def flood(request: Request, writer: asyncio.StreamWriter) -> None:
    """Streams without end."""
    writer.write(EVENTS)
    while True:
        writer.write(chunk(b"data: " + b"x" * 65_000 + b"\n\n"))
        await writer.drain()
        await asyncio.sleep(0)


class Slow:
    """Answers once it is released."""

    def __init__(self) -> None:
        self.release = asyncio.Event()

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        await self.release.wait()
        writer.write(ANSWER)


class Resumable:
    """Streams the tokens 0, 1, … of each sample in turn, from what has begun on; breaks off after `breaks` events."""

    def __init__(self, tokens: int, samples: int = 1, breaks: Sequence[int] = (), partial: bool = False) -> None:
        self.tokens, self.samples, self.breaks, self.partial = tokens, samples, list(breaks), partial
        self.begun: list[dict] = []
        self.same: set[tuple[object, ...]] = set()  # what is the same in each attempt

    def events(self, begun: dict) -> list[bytes]:
        """What is still to come."""
        events = []
        for number in range(self.tokens):
            for sample in range(self.samples):
                if number >= len(begun.get(str(sample), {"tokens": []})["tokens"]):
                    events.append(b"id: %d.%d\ndata: {%d: %d}\n\n" % (sample, number, sample, number))
        for sample in range(self.samples):
            if not begun.get(str(sample), {}).get("ended"):
                events.append(b"id: %d.!\ndata: {%d: end}\n\n" % (sample, sample))
        return [*events, DONE]

    async def __call__(self, request: Request, writer: asyncio.StreamWriter) -> None:
        size = int(request.headers.get("x-gpuinfer-begun", "0"))
        self.begun.append(begun := json.loads(request.body[:size]) if size else {})
        self.same.add((request.body[size:], request.headers["x-gpuinfer-created"], request.headers["x-request-id"]))
        limit = self.breaks.pop(0) if self.breaks else None
        writer.write(EVENTS)
        for number, event in enumerate(self.events(begun)):
            if number == limit:
                if self.partial:
                    writer.write(chunk(event[: len(event) // 2]))
                await writer.drain()
                await asyncio.sleep(0.01)  # a reset may overtake what was sent before it
                reset(writer)
                return
            writer.write(chunk(event))
            await writer.drain()
        writer.write(b"0\r\n\r\n")


def saying(data: bytes, then: str = "stay") -> Answering:
    """Sends these bytes, then stays, closes, or resets the connection."""

    async def answer(request: Request, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()
        if then == "reset":
            reset(writer)
        elif then == "close":
            writer.close()

    return answer


def reset(writer: asyncio.StreamWriter) -> None:
    end: socket.socket = writer.get_extra_info("socket")
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    writer.transport.abort()


@dataclass
class Upstream:
    """A server whose answers a test decides on: `answers` one after the other, then `always`."""

    always: Answering = well
    answers: list[Answering] = field(default_factory=list)
    asked: list[Request] = field(default_factory=list)
    connections: int = 0
    open: int = 0
    port: int = 0

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Upstream]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._tasks: set[asyncio.Task[Any]] = set()
        try:
            yield self
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        self.open += 1
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            while not writer.is_closing():
                request = await read_request(reader)
                self.asked.append(request)
                await (self.answers.pop(0) if self.answers else self.always)(request, writer)
                await writer.drain()
        self.open -= 1
        writer.close()
        self._tasks.discard(task)


@dataclass
class Router:
    """A relay that listens, in this process."""

    relay: Relay
    port: int
    told: list[Any]
    board: SharedCounters
    listener: Listener
    connections: list[Connection] = field(default_factory=list)

    def roster(self, *members: FleetMember) -> None:
        self.relay.members.update((member, number) for number, member in enumerate(members))

    def cell(self, slot: int, cell: MemberCell) -> int:
        return self.board.sum_of(slot, cell)

    def total(self, total: ProcessCell) -> int:
        return self.board.total(total)

    async def connect(self) -> Connection:
        """A connection, which is closed with the router at the latest."""
        self.connections.append(made := Connection(*await asyncio.open_connection("127.0.0.1", self.port)))
        return made

    async def post(self, body: bytes = b"{}", path: str = "/v1/completions", headers: str = "") -> Answer:
        connection = await self.connect()
        try:
            return await connection.ask(post(body, path, headers))
        finally:
            connection.close()


def post(body: bytes = b"{}", path: str = "/v1/completions", headers: str = "") -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\n{headers}Content-Length: {len(body)}\r\n\r\n"
    return head.encode("latin-1") + body


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    whole: bool = True

    @property
    def route(self) -> dict[str, str]:
        return dict(part.split("=", 1) for part in self.headers["x-gpuinfer-route"].split("; "))

    @property
    def message(self) -> str:
        return str(json.loads(self.body)["error"]["message"])


class Connection:
    """A client's connection, by hand."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def ask(self, data: bytes) -> Answer:
        await self.send(data)
        return await self.answer()

    async def head(self) -> Answer:
        async with asyncio.timeout(LIMIT_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")[:-2]
        pairs = [line.split(": ", 1) for line in lines]
        assert len({name.lower() for name, _ in pairs}) == len(pairs), head
        return Answer(int(first.split(" ")[1]), {name.lower(): value for name, value in pairs}, b"")

    async def answer(self, body: bool = True) -> Answer:
        async with asyncio.timeout(LIMIT_S):
            answer = await self.head()
            try:
                answer.body = await self._body(answer.headers) if body else b""
            except asyncio.IncompleteReadError as error:
                answer.body, answer.whole = error.partial, False
            except ConnectionResetError:
                answer.whole = False
            return answer

    async def _body(self, headers: dict[str, str]) -> bytes:
        if "content-length" in headers:
            return await self.reader.readexactly(int(headers["content-length"]))
        if "transfer-encoding" not in headers:
            return await self.reader.read()
        body = b""
        while piece := await self.chunk():
            body += piece
        return body

    async def chunk(self) -> bytes:
        async with asyncio.timeout(LIMIT_S):
            size = int(await self.reader.readuntil(b"\r\n"), 16)
            return (await self.reader.readexactly(size + 2))[:-2]

    async def closed(self) -> bytes:
        """What still comes until the other end closes."""
        async with asyncio.timeout(LIMIT_S):
            with contextlib.suppress(ConnectionResetError):
                return await self.reader.read()
            return b""

    def close(self) -> None:
        """Reset the connection, unless it is closed."""
        if not self.writer.is_closing():
            reset(self.writer)


def config(**changes: Any) -> RouterConfig:
    given = {"host": "127.0.0.1", "port": 0, "control": "/nowhere", "control_key": "the control key", "connect_s": 5.0}
    return RouterConfig(**(given | changes))


def member(upstream: Upstream, number: int = 0, **more: Any) -> FleetMember:
    return FleetMember(number, "127.0.0.1", upstream.port, more.pop("state", "up"), **more)


@contextlib.asynccontextmanager
async def routing(*upstreams: Upstream, ours: bool = True, **changes: Any) -> AsyncIterator[Router]:
    """A router before these, which it runs too."""
    async with contextlib.AsyncExitStack() as stack:
        for upstream in upstreams:
            await stack.enter_async_context(upstream.running())
        loop, told, board = asyncio.get_running_loop(), [], SharedCounters(1)
        relay = Relay(config(**changes), board, 0, loop, told.append)
        relay.timer.start()
        listener = Listener(relay)
        server = await loop.create_server(listener.protocol, "127.0.0.1", 0)
        router = Router(relay, server.sockets[0].getsockname()[1], told, board, listener)
        router.roster(*(member(upstream, number, ours=ours) for number, upstream in enumerate(upstreams)))
        try:
            yield router
        finally:
            server.close()
            for client in router.connections:
                client.close()
            for connection in [one for slot in relay.timer._slots for one in slot]:
                connection._transport.abort()  # type: ignore[attr-defined]
            relay.close()
            await asyncio.sleep(0)


async def until(condition: Callable[[], Any], what: str = "it") -> None:
    """Wait for a condition, with a limit."""
    end = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < end, f"{what} did not come about"
        await asyncio.sleep(0.005)


_held: list[socket.socket] = []


def free_port() -> int:
    """A port where nobody listens, and nobody else will: it stays ours."""
    _held.append(probe := socket.socket())
    probe.bind(("127.0.0.1", 0))
    return int(probe.getsockname()[1])
