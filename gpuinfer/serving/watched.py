"""How one replica is watched: the live page with its events, and metrics for Prometheus."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from gpuinfer import __version__
from gpuinfer.http.exchange import Exchange, Handler
from gpuinfer.http.paths import Route
from gpuinfer.monitoring.events import Seen, Watching
from gpuinfer.monitoring.measured import serving, up
from gpuinfer.monitoring.metrics import CONTENT_TYPE, Floor, exposition
from gpuinfer.monitoring.page import FILES, send_file
from gpuinfer.serving.several import Served

HIDDEN: Mapping[str, Any] = {"hidden": True}
TEXT = {"description": "Prometheus' text format.", "content": {"text/plain": {"schema": {"type": "string"}}}}


def watched(served: Served) -> list[Route]:
    """The files of the page hold nothing of this server's and need no key; what it is told does."""
    watching = Watching(lambda: _see(served))
    served.at_drain.append(watching.close)
    return [
        Route("GET", "/metrics", _metrics(served), "api", "Metrics for Prometheus.", {"responses": {"200": TEXT}}),
        Route("GET", "/events", watching, "api", "What the page shows, once a second.", HIDDEN),
        *(Route("GET", path, send_file, "open", "The live page.", HIDDEN) for path in FILES),
    ]


async def _see(served: Served) -> Seen:
    await served.session.refresh()
    about = {
        "model": ", ".join(served.names),
        "status": served.status,
        "version": __version__,
        "up_s": time.monotonic() - served.recent.began,
    }
    return Seen(served.session.snapshot(), about=about)


def _metrics(served: Served) -> Handler:
    floor: Floor = {}

    async def handle(exchange: Exchange) -> None:
        await served.session.refresh()
        ready = {one.name: one.health.status == "ready" for one in served.services}
        snapshot, more = served.session.snapshot(), [serving(served.names), up(ready)]
        exchange.respond(200, await asyncio.to_thread(exposition, snapshot, more, floor), CONTENT_TYPE)

    return handle
