"""Routes: which handler answers which path, and who may ask. What is not listed is denied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gpuinfer.http import http_exchange
from gpuinfer.http.access import CODE, Access, Quotas, cors, preflight
from gpuinfer.http.http_exchange import Exchange, Handler

UNAUTHORISED = [("WWW-Authenticate", 'Bearer realm="gpuinfer"')]
LONGEST_PATH = 100  # characters of a path that an error repeats


@dataclass(frozen=True)
class Route:
    """`path` may have segments in braces, `/workers/{id}`: what stands there is in `Exchange.parameters`.

    `access`: open to all; "api" needs an API key where there are some; "admin" always needs the admin key.
    `immediate` (GET only) is called on the spot in the handler's place, outside of every limit; it calls `respond`.
    """

    method: str
    path: str
    handler: Handler
    access: Literal["open", "api", "admin"]
    summary: str
    openapi: Mapping[str, Any] = field(default_factory=dict)
    immediate: Callable[[Exchange], None] | None = None

    def __post_init__(self) -> None:
        if self.immediate is not None and self.method != "GET":
            raise ValueError(f"{self.method} {self.path} cannot be immediate: only GET can")


CHATS = "ask POST /v1/chat/completions instead, with the conversation so far as its messages"
OPENAIS = {
    "responses": CHATS,
    "assistants": CHATS,
    "threads": CHATS,
    "conversations": CHATS,
    "batches": "`gpuinfer generate` answers files of prompts",
    "files": "`gpuinfer generate` answers files of prompts",
    "embeddings": "models of embeddings are not served",
    "moderations": "models of moderation are not served",
    "images": "models of images are not served",
    "audio": "models of sound are not served",
}
"""What OpenAI's API has under /v1/ and this server has not → what there is instead."""


def _instead(path: str) -> str:
    parts = path.split("/")
    said = OPENAIS.get(parts[2]) if len(parts) > 2 and parts[1] == "v1" else None
    return f": {said}" if said else ""


class RouteTable:
    """A handler of exchanges: finds the route, checks access, calls the route's handler."""

    def __init__(self, routes: Sequence[Route], access: Access, elsewhere: Sequence[str] = ()) -> None:
        """`elsewhere`: what the same clients find that is not answered here, for the list in a 404."""
        self.routes = tuple(routes)
        self.access = access
        self.quotas = Quotas()
        here = [f"{route.method} {route.path}" for route in routes if not route.openapi.get("hidden")]
        self._listed = f"There is {', '.join([*elsewhere, *here])}."
        self._fixed: dict[str, dict[str, Route]] = {}
        self._patterns: list[tuple[list[str], dict[str, Route]]] = []
        for route in routes:
            by_method = self._at(route.path)
            if route.method in by_method:
                raise ValueError(f"two routes for {route.method} {route.path}")
            by_method[route.method] = route

    async def __call__(self, exchange: Exchange) -> None:
        """Answer by the route's handler, or with 401, 403, 404 or 405 in OpenAI's shape."""
        route = self._admitted(exchange)
        if route is None:
            return
        key, quotas = exchange.key, self.quotas
        if key is None or route.method != "POST" or not key.limits():
            await route.handler(exchange)
            return
        exceeded = quotas.take(key)
        exchange.added += quotas.headers(key)
        if exceeded is not None:
            exchange.respond(
                429,
                http_exchange.error_bytes(exceeded.message, exceeded.kind, None, CODE),
                headers=[("Retry-After", str(exceeded.retry_s))],
            )
            exchange.notes["refused"] = exceeded.message
            return
        try:
            await route.handler(exchange)
        finally:
            spent = (exchange.notes.get(kind, 0) for kind in ("input_tokens", "output_tokens"))
            quotas.spend(key, sum(spent))

    def quick(self, exchange: Exchange) -> bool:
        """Answer on the spot what is immediate or refused. Whether it has."""
        route = self._admitted(exchange)
        if route is None:
            return True
        if route.immediate is None:
            return False
        route.immediate(exchange)
        return True

    def _admitted(self, exchange: Exchange) -> Route | None:
        """The route, where it may be used; else it has been refused."""
        refusal = self.access.host_refused(exchange.headers)
        if refusal is not None:
            exchange.refuse(403, refusal)
            return None
        if self.access.origins:
            exchange.added = cors(self.access.origins, exchange.headers.get("origin"))
            if exchange.added and exchange.method == "OPTIONS":
                exchange.respond(204, headers=preflight(exchange.headers))
                return None
        by_method = self._found(exchange)
        if by_method is None:
            exchange.refuse(
                404, f"there is nothing at {exchange.path[:LONGEST_PATH]}{_instead(exchange.path)}. {self._listed}"
            )
            return None
        route = by_method.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            allowed = ", ".join(sorted({*by_method, *(["HEAD"] if "GET" in by_method else [])}))
            exchange.refuse(405, f"{exchange.path} takes {allowed}.", [("Allow", allowed)])
            return None
        exchange.routine = route.access == "open"
        return route if exchange.routine or self._allowed(exchange, route) else None

    def _allowed(self, exchange: Exchange, route: Route) -> bool:
        access = self.access
        if route.access == "admin" and access.admin is None:
            exchange.refuse(403, "this needs an admin key, and the server has none. Start it with --admin-key-file.")
            return False
        if route.access == "api" and access.api is None:
            return True
        given = exchange.headers.get("authorization")
        keys = [access.admin] if route.access == "admin" else [access.api, access.admin]
        for one in keys:
            if one is not None and (key := one.find(given)) is not None:
                exchange.key, exchange.notes["key"] = key, key.name
                return True
        message = "a wrong key" if given else "no key"
        which = "admin key" if route.access == "admin" else "API key"
        exchange.refuse(
            401, f"{message}. Send the {which}: Authorization: Bearer KEY.", UNAUTHORISED, code="invalid_api_key"
        )
        return False

    def _at(self, path: str) -> dict[str, Route]:
        if "{" not in path:
            return self._fixed.setdefault(path, {})
        segments = path.split("/")
        for known, by_method in self._patterns:
            if known == segments:
                return by_method
        made: dict[str, Route] = {}
        self._patterns.append((segments, made))
        return made

    def _found(self, exchange: Exchange) -> dict[str, Route] | None:
        by_method = self._fixed.get(exchange.path)
        if by_method is not None or not self._patterns:
            return by_method
        segments = exchange.path.split("/")
        for pattern, routes in self._patterns:
            parameters = _match(pattern, segments)
            if parameters is not None:
                exchange.parameters = parameters
                return routes
        return None


def _match(pattern: list[str], segments: list[str]) -> dict[str, str] | None:
    if len(pattern) != len(segments):
        return None
    parameters = {}
    for wanted, given in zip(pattern, segments, strict=True):
        if wanted.startswith("{") and given:
            parameters[wanted[1:-1]] = given
        elif wanted != given:
            return None
    return parameters
