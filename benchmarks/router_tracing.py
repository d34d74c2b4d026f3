"""What tracing costs the router: its processor time a request, and requests a second, in turns.

    python benchmarks/router_tracing.py [--rounds N] [--seconds S] [--before TREE]

One router process before one upstream that answers at once, 16 connections that ask again and again. Spans are handed
to this process, and dropped. `--before`: another source tree, such as a worktree of an older commit, whose router takes
turns, without tracing. Ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

BODY = b'{"model": "tiny", "prompt": "Hello, please tell me something about inference servers.", "max_tokens": 16}'
ASK = (
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 200\r\n\r\n" + b"x" * 200
CONNECTIONS = 16
WAYS = {"untraced": None, "traced": 1.0, "one in a hundred": 0.01}  # share of requests


class Upstream(asyncio.Protocol):
    """Answers each message; a request of this size comes in one piece."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(ANSWER)  # type: ignore[attr-defined]


class Client(asyncio.Protocol):
    """Asks again as soon as an answer is whole."""

    answered = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._received = transport, b""
        self._ask()

    def _ask(self) -> None:
        self._transport.write(ASK % len(BODY) + BODY)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._received.endswith(ANSWER[-200:]):
            Client.answered, self._received = Client.answered + 1, b""
            self._ask()


async def measured(share: float | None, seconds: float) -> dict[str, float]:
    """Requests a second, and microseconds of the router's processor time for each."""
    from gpuinfer.fleet.router.processes import Routers
    from gpuinfer.fleet.router.protocol import FleetMember, Roster, RouterConfig

    loop = asyncio.get_running_loop()
    upstream = await loop.create_server(Upstream, "127.0.0.1", 0)
    port = upstream.sockets[0].getsockname()[1]
    config = RouterConfig(host="127.0.0.1", port=0, control="/nowhere", control_key="none", **_tracing(share))
    routers = Routers(config, lambda event: None)
    address = await routers.start()
    clients = []
    try:
        routers.update(Roster(1, (FleetMember(0, "127.0.0.1", port, "up"),)))
        for _ in range(CONNECTIONS):
            clients.append((await loop.create_connection(Client, "127.0.0.1", address))[0])
        process = psutil.Process(routers.pids()[0])
        await asyncio.sleep(0.5)
        began, count, spent = time.perf_counter(), Client.answered, sum(process.cpu_times()[:2])
        await asyncio.sleep(seconds)
        answered, took = Client.answered - count, time.perf_counter() - began
        spent = sum(process.cpu_times()[:2]) - spent
    finally:
        for transport in clients:
            transport.abort()
        await routers.close()
        upstream.close()
    return {"rate": answered / took, "cpu_us": 1e6 * spent / answered}


def _tracing(share: float | None) -> dict[str, object]:
    if share is None:
        return {}
    from gpuinfer.fleet.router.request_trace import TraceSampling

    return {"tracing": TraceSampling(share)}


def in_process(tree: Path, share: float | None, seconds: float) -> dict[str, float]:
    """The same in a process of its own, with the package of this tree."""
    words = [sys.executable, __file__, "--one", json.dumps(share), "--seconds", str(seconds)]
    done = subprocess.run(
        words, env={**os.environ, "PYTHONPATH": str(tree)}, check=True, capture_output=True, timeout=seconds + 60
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--before", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.one is not None:
        print(json.dumps(asyncio.run(measured(json.loads(given.one), given.seconds))))
        return
    here = Path(__file__).resolve().parents[1]
    ways = {name: (here, share) for name, share in WAYS.items()}
    if given.before is not None:
        ways = {"before": (given.before, None), **ways}
    rounds = [{name: in_process(*way, given.seconds) for name, way in ways.items()} for _ in range(given.rounds)]
    first = next(iter(ways))
    print(f"| router | requests/s | µs of a core a request | times {first} (range) |\n|---|---:|---:|---:|")
    for name in ways:
        rate, spent = (statistics.median(one[name][what] for one in rounds) for what in ("rate", "cpu_us"))
        ratios = sorted(one[name]["cpu_us"] / one[first]["cpu_us"] for one in rounds)
        span = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
        print(f"| {name} | {rate:,.0f} | {spent:.0f} | {span} |")


if __name__ == "__main__":
    main()
