"""What the router of a fleet has counted, as metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpuinfer.monitoring.families import Family, one

COUNTED = (
    ("requests", "Requests of clients."),
    ("unrouted", "Requests that no replica could take: answered with 503."),
    ("timeouts", "Requests that no replica has answered in time."),
    ("client_gone", "Requests whose client went away before the answer."),
    ("broken_off", "Answers that had begun and could not be brought to their end."),
    ("restarts", "Router processes that were started anew."),
)


def of_router(totals: Mapping[str, float]) -> Iterator[Family]:
    """Of all router processes together; `totals` has the names of COUNTED, and connections."""
    open_now = "Connections of clients that are open now."
    yield one("gpuinfer_router_connections", open_now, "gauge", totals.get("connections", 0))
    for name, told in COUNTED:
        yield one(f"gpuinfer_router_{name}", told, "counter", totals.get(name, 0))
