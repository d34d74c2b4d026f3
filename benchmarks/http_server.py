"""Rates of the HTTP server and client: python benchmarks/http_server.py [--seconds S] [--connections N] [--case …]"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable

import psutil

from gpuinfer.http.access import Access
from gpuinfer.http.client import HttpClient
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.network import run_loop
from gpuinfer.http.route_table import Route, RouteTable
from gpuinfer.http.server import HttpServer

ANSWER = b'{"answer": "' + b"x" * 1010 + b'"}'
EVENT = b"data: " + b"x" * 150 + b"\n\n"
EVENTS = 100
WRK_POST = 'wrk.method = "POST"\nwrk.body = string.rep("x", 1024)\nwrk.headers["Content-Type"] = "application/json"\n'


def health(exchange: Exchange) -> None:
    exchange.respond(200, b"{}")


async def answer(exchange: Exchange) -> None:
    exchange.respond(200, ANSWER)


async def stream(exchange: Exchange) -> None:
    exchange.begin(200, "text/event-stream")
    for _ in range(EVENTS):
        await exchange.write(EVENT)
        await asyncio.sleep(0)
    exchange.end()


ROUTES = [
    Route("GET", "/health", answer, "open", "on the spot", immediate=health),
    Route("GET", "/answer", answer, "api", "1 KB by a task"),
    Route("POST", "/answer", answer, "api", "1 KB for 1 KB by a task"),
    Route("GET", "/stream", stream, "api", "100 events"),
]


async def serve(listening: socket.socket) -> None:
    paths = RouteTable(ROUTES, Access())
    server = HttpServer(paths, quick=paths.quick)
    port = await server.listen("127.0.0.1", 0)
    listening.sendall(f"{port}\n".encode())
    await asyncio.Event().wait()


class Server:
    """A server in a process of its own."""

    def __enter__(self) -> Server:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            run_loop(serve(theirs))
            os._exit(0)
        theirs.close()
        self.port = int(ours.makefile().readline())
        return self

    def __exit__(self, *_: object) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def cpu_s(self) -> float:
        times = psutil.Process(self.pid).cpu_times()
        return float(times.user + times.system)


def with_wrk(path: str, seconds: float, connections: int, script: str = "") -> tuple[float, float, float]:
    """Requests a second; those for a second of the server's processor; median ms."""
    with Server() as server:
        command = [
            "wrk",
            "-t1",
            f"-c{connections}",
            f"-d{seconds:g}s",
            "--latency",
            f"http://127.0.0.1:{server.port}{path}",
        ]
        if script:
            command[1:1] = ["-s", "/dev/stdin"]
        before = server.cpu_s()
        said = subprocess.run(command, input=script, capture_output=True, text=True, check=True).stdout
        spent = server.cpu_s() - before
    if "Non-2xx" in said or "Socket errors" in said:
        sys.exit(said)
    count = int(_found(r"(\d+) requests in", said))
    median, unit = re.findall(r"50%\s+([\d.]+)(us|ms|s)", said)[0]
    return count / seconds, count / spent, float(median) * {"us": 1e-3, "ms": 1, "s": 1e3}[unit]


def _found(pattern: str, text: str) -> str:
    return str(re.findall(pattern, text)[0])


def with_client(
    ask: Callable[[HttpClient], Awaitable[int]], seconds: float, connections: int
) -> tuple[float, float, float]:
    """What our client reaches: requests or events a second; those for a second of its processor; mean ms."""
    with Server() as server:
        return run_loop(_asked(server, ask, seconds, connections))


async def _asked(
    server: Server, ask: Callable[[HttpClient], Awaitable[int]], seconds: float, connections: int
) -> tuple[float, float, float]:
    client = HttpClient(f"http://127.0.0.1:{server.port}", connections=connections)
    count = turns = 0
    end = time.perf_counter() + seconds

    async def keep_asking() -> None:
        nonlocal count, turns
        while time.perf_counter() < end:
            done = await ask(client)
            count += done
            turns += 1

    before, began = time.process_time(), time.perf_counter()
    await asyncio.gather(*[keep_asking() for _ in range(connections)])
    spent, took = time.process_time() - before, time.perf_counter() - began
    await client.close()
    return count / took, count / spent, took * connections / turns * 1e3


async def ask_health(client: HttpClient) -> int:
    await client.request("GET", "/health")
    return 1


async def ask_answer(client: HttpClient) -> int:
    await client.request("POST", "/answer", ANSWER)
    return 1


async def ask_stream(client: HttpClient) -> int:
    size = 0
    async with client.stream("GET", "/stream") as response:
        async for part in response:
            size += len(part)
    return size // len(EVENT)


CASES: dict[str, Callable[[float, int], tuple[float, float, float]]] = {
    "server, on the spot": lambda seconds, connections: with_wrk("/health", seconds, connections),
    "server, task, 1 KB": lambda seconds, connections: with_wrk("/answer", seconds, connections),
    "server, task, 1 KB for 1 KB": lambda seconds, connections: with_wrk("/answer", seconds, connections, WRK_POST),
    "client, GET": lambda seconds, connections: with_client(ask_health, seconds, connections),
    "client, POST 1 KB": lambda seconds, connections: with_client(ask_answer, seconds, connections),
    "client, events": lambda seconds, connections: with_client(ask_stream, seconds, connections),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--case", nargs="*", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    print(f"{'':30} {'a second':>12} {'a core':>12} {'ms':>8}")
    for name in given.case:
        if name.startswith("server") and not shutil.which("wrk"):
            print(f"{name:30} needs wrk")
            continue
        rate, core, milliseconds = CASES[name](given.seconds, given.connections)
        print(f"{name:30} {rate:12,.0f} {core:12,.0f} {milliseconds:8.2f}", flush=True)


if __name__ == "__main__":
    main()
