"""Stands in for `gpuinfer serve`: the same flags, the same answers of `/health`, no model, up in a moment.

Its answers depend on prompt and seed alone, so that one replica can go on where another has ended. What it does is
said by the setup file, a JSON object:

    answer_s     how long an answer, or each event of a stream, takes
    limit        requests at once; more are refused with 429
    room         rows that it computes at once, as /health says
    dies         says these words and ends before it serves
    starts_s     how long it takes to come up
    mute         never writes its ready file
    stuck        /health says so from the first request on
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import sys
from pathlib import Path

import msgspec

from gpuinfer.host import children
from gpuinfer.host.files import write_whole
from gpuinfer.http.access import Access, Keys
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.route_table import Route, RouteTable
from gpuinfer.http.server import HttpServer
from gpuinfer.stats import Snapshot

TOKENS = 12  # of an answer, unless it says how many


def token(prompt: str, seed: int, position: int) -> int:
    return (sum(prompt.encode()) * 31 + seed * 17 + position * 101) % 1000


def text(prompt: str, seed: int, tokens: int) -> str:
    """What a whole answer says."""
    return "".join(f" {token(prompt, seed, position)}" for position in range(tokens))


class Replica:
    def __init__(self, setup: dict[str, object]) -> None:
        self.answer_s = float(setup.get("answer_s", 0.0))
        self.limit = int(setup.get("limit", 1 << 30))
        self.room = setup.get("room")
        self.stuck_by_work = bool(setup.get("stuck"))
        self.requests = self.in_flight = 0
        self.draining, self.idle = asyncio.Event(), asyncio.Event()
        self.idle.set()

    def health(self, exchange: Exchange) -> None:
        stuck = self.stuck_by_work and self.requests > 0
        ready = not (self.draining.is_set() or stuck)
        status = "stuck" if stuck else "ready" if ready else "draining"
        told = {"server": "gpuinfer", "status": status, "alive": True, "ready": ready, "busy": self.in_flight > 0}
        told |= {"stuck": stuck, "heartbeat_age_s": 0.0, "in_flight": self.in_flight, "waiting_rows": 0}
        told |= {"room": self.room, "model": "standin", "kind": "text"}
        exchange.respond(200 if ready else 503, json.dumps(told).encode())

    async def stats(self, exchange: Exchange) -> None:
        exchange.respond(200, msgspec.msgpack.encode(Snapshot(requests=self.requests).to_wire()), "application/msgpack")

    async def complete(self, exchange: Exchange) -> None:
        if self.draining.is_set():
            return exchange.refuse(503, "draining", [("Retry-After", "1"), ("X-Gpuinfer-Error", "Closed")])
        if self.in_flight >= self.limit:
            return exchange.refuse(429, "the queue is full", [("Retry-After", "1")])
        self.in_flight += 1
        self.idle.clear()
        try:
            await self._complete(exchange)
            self.requests += 1
        finally:
            self.in_flight -= 1
            if not self.in_flight:
                self.idle.set()
        return None

    async def _complete(self, exchange: Exchange) -> None:
        begun = int(exchange.headers.get("x-gpuinfer-begun", 0))
        asked = json.loads(exchange.body[begun:])
        already = json.loads(exchange.body[:begun])["0"]["tokens"] if begun else []
        prompt, seed, tokens = asked["prompt"], asked.get("seed", 0), asked.get("max_tokens", TOKENS)
        if not asked.get("stream"):
            await asyncio.sleep(self.answer_s)
            choice = {"index": 0, "text": text(prompt, seed, tokens), "finish_reason": "length"}
            exchange.respond(200, json.dumps({"object": "text_completion", "choices": [choice]}).encode())
            return
        exchange.begin(200, "text/event-stream")
        for position in range(len(already), tokens):
            await asyncio.sleep(self.answer_s)
            one = token(prompt, seed, position)
            await exchange.write(event(f"0.{one}", {"index": 0, "text": f" {one}", "finish_reason": None}))
        await exchange.write(event("0.!", {"index": 0, "text": "", "finish_reason": "length"}))
        await exchange.write(b"data: [DONE]\n\n")
        exchange.end()


def event(name: str, choice: dict[str, object]) -> bytes:
    return f"id: {name}\ndata: {json.dumps({'object': 'text_completion', 'choices': [choice]})}\n\n".encode()


async def serve(given: argparse.Namespace, setup: dict[str, object]) -> None:
    replica = Replica(setup)
    routes = [
        Route("GET", "/health", replica.stats, "open", "", immediate=replica.health),
        Route("GET", "/stats", replica.stats, "api", ""),
        Route("POST", "/v1/completions", replica.complete, "api", ""),
    ]
    paths = RouteTable(routes, Access(api=given.api_key_file and Keys.read(given.api_key_file)))
    await asyncio.sleep(float(setup.get("starts_s", 0.0)))
    server = HttpServer(paths, quick=paths.quick)
    port = await server.listen(given.host, given.port)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, replica.draining.set)
    if not setup.get("mute"):
        write_whole(given.ready_file, json.dumps({"host": given.host, "port": port, "pid": os.getpid()}).encode())
    await replica.draining.wait()
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(replica.idle.wait(), 30.0)
    await server.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("command", choices=["serve"])
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    for name in ("--behind-router", "--leave-with-parent"):
        parser.add_argument(name, action="store_true", required=True)
    parser.add_argument("--api-key-file", type=Path)
    for name in ("--setup-file", "--admin-key-file", "--ready-file"):
        parser.add_argument(name, type=Path, required=True)
    given = parser.parse_args()
    children.end_with_parent()
    setup = json.loads(given.setup_file.read_bytes())
    if words := setup.get("dies"):
        sys.exit(words)
    asyncio.run(serve(given, setup))


if __name__ == "__main__":
    main()
