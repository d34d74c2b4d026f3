"""Many streams of events at once by raw protocols: a server that sends them, a client that times them."""

from __future__ import annotations

import asyncio
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from gpuinfer.http.network import new_network_loop

EVENT = (
    b'id: 0.17\ndata: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"w"}}]}\n\n'
)
CHUNK = b"%x\r\n%b\r\n" % (len(EVENT), EVENT)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b'{"model":"tiny","stream":true,"messages":[{"role":"user","content":"Hello."}]}'
ASK = (
    b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n%b" % (len(BODY), BODY)
)


class Server(asyncio.Protocol):
    """Answers with `events` events, `gap_s` apart; 0: as fast as they are taken. -1 events: one, and no end."""

    def __init__(self, events: int, gap_s: float) -> None:
        self.events, self.gap_s = events, gap_s

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.left, self.task = transport, 0, None
        self.free = asyncio.Event()
        self.free.set()

    def data_received(self, data: bytes) -> None:
        if BODY in data:
            self.task = asyncio.ensure_future(self.stream())

    async def stream(self) -> None:
        self.transport.write(HEAD)
        if self.events < 0:
            self.transport.write(CHUNK)
            return
        began = time.monotonic()
        for number in range(self.events):
            self.transport.write(CHUNK)
            wait = began + (number + 1) * self.gap_s - time.monotonic()
            await self.free.wait()
            await asyncio.sleep(max(0.0, wait) if self.gap_s else 0)
        self.transport.write(b"0\r\n\r\n")

    def pause_writing(self) -> None:
        self.free.clear()

    def resume_writing(self) -> None:
        self.free.set()

    def connection_lost(self, error: Exception | None) -> None:
        self.free.set()
        if self.task is not None:
            self.task.cancel()


def serve(events: int, gap_s: float, tell: Callable[[int], None]) -> None:
    async def main() -> None:
        server = await asyncio.get_running_loop().create_server(
            lambda: Server(events, gap_s), "127.0.0.1", 0, backlog=4096
        )
        tell(server.sockets[0].getsockname()[1])
        await asyncio.Event().wait()

    with asyncio.Runner(loop_factory=new_network_loop) as runner:
        runner.run(main())


class Reader(asyncio.Protocol):
    """One stream: when its first event came, and how many did."""

    def __init__(self) -> None:
        self.first = self.sent = 0.0
        self.events = 0
        self.done = asyncio.get_running_loop().create_future()
        self.begun = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport

    def ask(self) -> None:
        self.sent = time.monotonic()
        self.transport.write(ASK)

    def data_received(self, data: bytes) -> None:
        if count := data.count(b"data: "):
            if not self.first:
                self.first = time.monotonic()
                self.begun.set_result(None)
            self.events += count
        if data.endswith(b"\r\n0\r\n\r\n") or data == b"0\r\n\r\n":
            self.done.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True)
class Streamed:
    first_p50_ms: float
    first_p99_ms: float
    events_per_s: float
    lost: int  # events


async def read_streams(port: int, streams: int, events: int, apart_s: float) -> Streamed:
    """All streams, each begun `apart_s` after the one before."""
    loop = asyncio.get_running_loop()
    readers = [(await loop.create_connection(Reader, "127.0.0.1", port))[1] for _ in range(streams)]
    began = time.monotonic()
    for reader in readers:
        reader.ask()
        await asyncio.sleep(apart_s)
    await asyncio.wait_for(asyncio.gather(*(reader.done for reader in readers)), 120)
    took = time.monotonic() - began
    firsts = sorted(1e3 * (reader.first - reader.sent) for reader in readers)
    seen = sum(reader.events for reader in readers)
    for reader in readers:
        reader.transport.abort()
    return Streamed(statistics.median(firsts), firsts[int(0.99 * streams)], seen / took, streams * events - seen)


def measured(port: int, streams: int, events: int, apart_s: float) -> Streamed:
    with asyncio.Runner(loop_factory=new_network_loop) as runner:
        return runner.run(read_streams(port, streams, events, apart_s))


async def open_idle(port: int, streams: int) -> list[Reader]:
    """Streams that have begun, and go on being open."""
    loop = asyncio.get_running_loop()
    readers = []
    for _ in range(streams):
        readers.append((await loop.create_connection(Reader, "127.0.0.1", port))[1])
        readers[-1].ask()
    await asyncio.wait_for(asyncio.gather(*(reader.begun for reader in readers)), 120)
    return readers


def started(events: int, gap_s: float) -> tuple[multiprocessing.process.BaseProcess, int]:
    """A server in a process of its own, and its port."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve_into, args=(events, gap_s, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, int(ours.recv_bytes())


def serve_into(events: int, gap_s: float, end: multiprocessing.connection.Connection) -> None:
    serve(events, gap_s, lambda port: end.send_bytes(b"%d" % port))
