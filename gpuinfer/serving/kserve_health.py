"""A server's own health and metadata in KServe's inference protocol v2: of one replica, and of a fleet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from gpuinfer import __version__
from gpuinfer.http.http_exchange import Exchange, Handler
from gpuinfer.http.route_table import Route

SERVER = {"name": "gpuinfer", "version": __version__, "extensions": ["binary_tensor_data", "model_repository"]}
"""What `GET /v2` answers."""
# An object, as elsewhere, only where the path itself is malformed HTTP.
KSERVE_ERROR = {"type": "object", "required": ["error"], "properties": {"error": {"type": ["string", "object"]}}}
_OBJECT = {"200": {"description": "The answer.", "content": {"application/json": {"schema": {"type": "object"}}}}}
_encode = msgspec.json.Encoder().encode


def health_routes(live: Callable[[], bool], ready: Callable[[], bool]) -> list[Route]:
    """The server's own health and metadata, which need no key as /health needs none."""

    def state_handler(name: str, state: Callable[[], bool]) -> Handler:
        async def handle(exchange: Exchange) -> None:
            fine = state()
            exchange.respond(200 if fine else 503, _encode({name: fine}))

        return handle

    async def about(exchange: Exchange) -> None:
        exchange.respond(200, _encode(SERVER))

    health: Sequence[tuple[str, Callable[[], bool], str]] = (
        ("live", live, "Whether it is alive (KServe)."),
        ("ready", ready, "Whether it is ready (KServe)."),
    )
    may = {"responses": {**_OBJECT, "503": {**_OBJECT["200"], "description": "It is not."}}}
    return [
        Route("GET", "/v2", about, "open", "The server's name and extensions (KServe's protocol).", own_openapi()),
        *(
            Route("GET", f"/v2/health/{name}", state_handler(name, state), "open", summary, own_openapi(**may))
            for name, state, summary in health
        ),
    ]


def own_openapi(**more: Any) -> Mapping[str, Any]:
    """What a route of the protocol says of itself: an object as its answer, and its errors."""
    return {"error": ("KServeError", KSERVE_ERROR), "responses": _OBJECT, **more}
