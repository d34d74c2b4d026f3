"""The live page of a fleet: its files, and the events that it draws."""

from __future__ import annotations

from gpuinfer.http.exchange import Exchange
from gpuinfer.http.paths import Route
from gpuinfer.monitoring.events import Watching
from gpuinfer.monitoring.page import FILES, asset


def routes(watching: Watching) -> list[Route]:
    """The files hold nothing of the fleet's, and need no key; the events do."""
    files = [Route("GET", path, _file, "open", "The live page") for path in FILES]
    return [*files, Route("GET", "/events", watching, "api", "Looks at the fleet, one a second (server-sent events)")]


async def _file(exchange: Exchange) -> None:
    found = asset(exchange.path)
    if found is None:
        exchange.refuse(404, f"there is nothing at {exchange.path}.")
        return
    body, content_type, headers = found
    exchange.respond(200, body, content_type, headers)
