"""A small real server for the tests of HTTP, and clients that send raw bytes."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import io
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.http.access import Access
from gpuinfer.http.client import HttpClient
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.parser import HttpLimits
from gpuinfer.http.route_table import Route, RouteTable
from gpuinfer.http.server import HttpServer

PATIENCE_S = 60.0  # for what surely happens, on a machine that stalls


@dataclass
class Seen:
    """What the handlers of a server saw."""

    requests: list[tuple[str, str, bytes]] = field(default_factory=list)
    begun: int = 0
    cancelled: int = 0
    written: int = 0
    release: asyncio.Event = field(default_factory=asyncio.Event)

    async def echo(self, exchange: Exchange) -> None:
        self.requests.append((exchange.method, exchange.path, exchange.body))
        exchange.respond(200, exchange.body or b"nothing", "text/plain")

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        self.begun += 1
        try:
            yield
        except asyncio.CancelledError:
            self.cancelled += 1
            raise

    async def wait(self, exchange: Exchange) -> None:
        """Answers once the test says so."""
        with self.counted():
            await self.release.wait()
        exchange.respond(200, b"at last", "text/plain")

    async def events(self, exchange: Exchange) -> None:
        """One event, then a wait for the test's word, then another."""
        exchange.begin(200, "text/event-stream")
        with self.counted():
            await exchange.write(b"data: 1\n\n")
            await self.release.wait()
        await exchange.write(b"data: 2\n\n")
        exchange.end()

    async def flood(self, exchange: Exchange) -> None:
        """Writes for as long as somebody reads."""
        exchange.begin(200, "application/octet-stream")
        with self.counted():
            while True:
                await exchange.write(b"x" * 65536)
                self.written += 65536
                await asyncio.sleep(0)

    async def fail(self, exchange: Exchange) -> None:
        if exchange.path == "/fail-late":
            exchange.begin(200, "text/plain")
            await exchange.write(b"so far")
        raise ZeroDivisionError("a secret of the inside")

    async def forget(self, exchange: Exchange) -> None:
        pass

    def health(self, exchange: Exchange) -> None:
        exchange.respond(200, b"{}")

    async def ask(self, exchange: Exchange) -> None:
        exchange.respond(200, json.dumps({**exchange.query, **exchange.parameters}).encode())

    def routes(self) -> list[Route]:
        handlers = {"/wait": self.wait, "/events": self.events, "/flood": self.flood, "/fail": self.fail}
        handlers |= {"/fail-late": self.fail, "/forget": self.forget, "/ask": self.ask}
        return [
            Route("GET", "/health", self.forget, "open", "", immediate=self.health),
            Route("GET", "/neglect", self.forget, "api", "", immediate=lambda exchange: None),
            *(Route(method, "/echo", self.echo, "api", "") for method in ("GET", "POST", "PUT")),
            Route("POST", "/wait", self.wait, "api", ""),
            *(Route("GET", path, handler, "api", "") for path, handler in handlers.items()),
            *(Route(method, "/workers/{id}", self.ask, "admin", "") for method in ("GET", "DELETE")),
            Route("GET", "/workers", self.ask, "admin", ""),
        ]


@dataclass
class Served:
    """A server that runs."""

    server: HttpServer
    port: int
    seen: Seen
    paths: RouteTable
    clients: list[HttpClient] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.url = f"http://127.0.0.1:{self.port}"

    def client(self, **options: Any) -> HttpClient:
        """A client, which is closed with the server at the latest."""
        self.clients.append(made := HttpClient(self.url, **options))
        return made


@contextlib.asynccontextmanager
async def serving(limits: HttpLimits | None = None, access: Access | None = None) -> AsyncIterator[Served]:
    seen = Seen()
    paths = RouteTable(seen.routes(), access or Access())
    server = HttpServer(paths, limits, quick=paths.quick)
    served = Served(server, await server.listen("127.0.0.1", 0), seen, paths)
    try:
        yield served
    finally:
        for client in served.clients:
            await client.close()
        while _sockets:
            _sockets.pop().close()
        await server.close()


_sockets: list[socket.socket] = []  # of `Raw`, closed with the server at the latest


async def until(holds: Callable[[], object]) -> None:
    """Wait until it holds, with an end."""
    async with asyncio.timeout(PATIENCE_S):
        while not holds():  # noqa: ASYNC110 (any condition at all)
            await asyncio.sleep(0.002)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        """The error, in OpenAI's shape and nothing else."""
        error = json.loads(self.body)["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert self.headers["content-type"] == "application/json"
        return error


class Raw:
    """A client of bytes."""

    def __init__(self, port: int, made: socket.socket) -> None:
        self.port = port
        self.socket = made

    @classmethod
    async def connect(cls, port: int, receive_buffer: int = 0) -> Raw:
        _sockets.append(made := socket.socket())
        if receive_buffer:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        made.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(made, ("127.0.0.1", port))
        except OSError:
            made.close()
            raise
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return cls(port, made)

    async def send(self, *pieces: bytes) -> None:
        """Each piece arrives by itself. A server that has closed is no error: its answer says why."""
        for piece in pieces:
            with contextlib.suppress(ConnectionError):
                await asyncio.get_running_loop().sock_sendall(self.socket, piece)
            await turns()

    async def receive(self) -> bytes:
        """What comes next; b"" at the end, also by a reset."""
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await asyncio.get_running_loop().sock_recv(self.socket, 1 << 16)
            except ConnectionError:
                return b""

    async def receive_until(self, wanted: bytes) -> bytes:
        """What comes up to these bytes and a bit further; fails at the end."""
        said = b""
        while wanted not in said:
            part = await self.receive()
            assert part, said
            said += part
        return said

    async def rest(self) -> bytes:
        """All that comes until the server closes."""
        said = b""
        while part := await self.receive():
            said += part
        self.socket.close()
        return said

    def reset(self) -> None:
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        self.socket.close()


async def turns(number: int = 3) -> None:
    """Let the server, which runs in the same loop, read what has been sent."""
    for _ in range(number):
        await asyncio.sleep(0)


async def said_to(port: int, *pieces: bytes) -> list[Answer]:
    """The responses of a server to these bytes, until it closes."""
    raw = await Raw.connect(port)
    await raw.send(*pieces)
    return answers(await raw.rest())


class Bytes(io.BytesIO):
    """Bytes as `http.client` reads them of a socket."""

    def makefile(self, mode: str) -> io.BytesIO:
        return self

    def close(self) -> None: ...


def answers(said: bytes, methods: Sequence[str] = ()) -> list[Answer]:
    """Responses as the standard library reads them; `methods` of the requests, GET where none is given."""
    heard, found = Bytes(said), []
    while heard.tell() < len(said):
        method = methods[len(found)] if len(found) < len(methods) else "GET"
        response = http.client.HTTPResponse(heard, method=method)  # type: ignore[arg-type]
        response.begin()
        headers = {name.lower(): value for name, value in response.getheaders()}
        found.append(Answer(response.status, headers, response.read()))
    return found
