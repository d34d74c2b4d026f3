"""Serves the live page of a server that does not exist: python tests/monitoring/serve_page.py --fleet

For tests of the page in a browser, and for work on it: files of the page are read anew at each start.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from monitoring.synthetic import Server, worker

from gpuinfer.http.access import LOOPBACK, Access, Keys
from gpuinfer.http.http_exchange import Exchange
from gpuinfer.http.route_table import Route, RouteTable
from gpuinfer.http.server import HttpServer
from gpuinfer.serving.monitoring.live_page import FILES, LiveEvents, LiveState, asset
from gpuinfer.serving.monitoring.metrics import CONTENT_TYPE, exposition, snapshot_families, worker_families

EVIL = '<img src="http://192.0.2.1/x.png" onerror="document.title=\'owned\'"><script>document.title="owned"</script>'


class Pretence:
    """A server that works as time passes: its load swells and ebbs."""

    def __init__(self, given: argparse.Namespace) -> None:
        self._given, self._dice = given, random.Random(7)
        self._server = Server(model=EVIL if given.hostile else "Qwen3-8B")
        self._began = self._last = time.monotonic()
        self._served = [0.0] * (4 if given.fleet else 0)

    async def see(self) -> LiveState:
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        swell = 0.0 if self._given.idle else 55 + 25 * math.sin(now / 9) + self._dice.uniform(-8, 8)
        snapshot = self._server.step(max(seconds, 1e-3), round(swell * seconds))
        if self._given.rows:
            device = {"name": "AMD EPYC"}
            snapshot = self._server.snapshot(device=device, first_token=Server().snapshot().first_token)
        about = {"model": EVIL if self._given.hostile else "Qwen3-8B", "version": "0.1.0", "backend": "inprocess"}
        if self._given.hostile:
            snapshot = self._server.snapshot(failure=EVIL, notices=(EVIL,), reasons={EVIL: 5}, errors={EVIL: 2})
        return LiveState(snapshot, self._workers(swell, seconds), {**about, "up_s": now - self._began + 4000})

    def _workers(self, swell: float, seconds: float) -> list[Mapping[str, Any]]:
        found = []
        for number in range(len(self._served)):
            ill = number == 2
            self._served[number] += 0 if ill else swell * seconds / 3
            changes: dict[str, Any] = {
                "requests_served": int(self._served[number]),
                "in_flight": 0 if ill else self._dice.randrange(4, 12),
            }
            if ill:
                told = EVIL if self._given.hostile else "no heartbeat for 3 s: killed, starts again in 2 s"
                changes |= {
                    "healthy": False,
                    "state": "down",
                    "errors": 3,
                    "restarts": 1,
                    "retried": 5,
                    "breaker": "open",
                }
                changes |= {"last_event": told, "url": EVIL if self._given.hostile else "http://127.0.0.1:41003"}
            found.append(worker(number, **changes))
        return found


def routes(pretence: Pretence) -> list[Route]:
    watching = LiveEvents(pretence.see, every_s=0.25)

    async def page(exchange: Exchange) -> None:
        body, kind, headers = asset(exchange.path) or (b"", "", ())
        exchange.respond(200, body, kind, headers)

    async def metrics(exchange: Exchange) -> None:
        seen = await pretence.see()
        exchange.respond(
            200, exposition([*snapshot_families(seen.snapshot), *worker_families(seen.workers)]), CONTENT_TYPE
        )

    return [
        *(Route("GET", path, page, "open", "the page") for path in FILES),
        Route("GET", "/events", watching, "api", "its looks"),
        Route("GET", "/metrics", metrics, "api", "metrics"),
    ]


async def main(given: argparse.Namespace) -> None:
    access = Access(api=Keys.read(given.key_file) if given.key_file else None, hosts=LOOPBACK)
    paths = RouteTable(routes(Pretence(given)), access)
    server = HttpServer(paths, quick=paths.quick)
    port = await server.listen("127.0.0.1", given.port)
    print(port, flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # until the one who started it is gone
    await server.close()


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key-file")
    for flag in ("fleet", "hostile", "rows", "idle"):
        parser.add_argument(f"--{flag}", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    asyncio.run(main(options()))
