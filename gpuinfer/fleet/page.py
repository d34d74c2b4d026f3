"""The live page of a fleet: its files, and the events that it draws."""

from __future__ import annotations

from gpuinfer.http.paths import Route
from gpuinfer.monitoring.events import Watching
from gpuinfer.monitoring.page import FILES, send_file


def routes(watching: Watching) -> list[Route]:
    """The files hold nothing of the fleet's, and need no key; the events do."""
    files = [Route("GET", path, send_file, "open", "The live page") for path in FILES]
    return [*files, Route("GET", "/events", watching, "api", "Looks at the fleet, one a second (server-sent events)")]
