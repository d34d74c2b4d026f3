"""Routes: which handler answers which path, and who may ask. What is not listed is denied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from gpuinfer.http.access import Access, Quotas, RequestRefusal, cors, preflight_headers
from gpuinfer.http.http_exchange import Exchange, Handler

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
    "moderations": "models of moderation are not served",
    "images": "models of images are not served",
    "audio": "models of sound are not served",
}
"""What OpenAI's API has under /v1/ and this server has not → what there is instead."""


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
        refusal = quotas.take(key)
        exchange.added += quotas.headers(key)
        if refusal is not None:
            _refuse(exchange, refusal)
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
        if (refusal := self.access.check_host(exchange.headers)) is not None:
            _refuse(exchange, refusal)
            return None
        if self.access.origins:
            exchange.added = cors(self.access.origins, exchange.headers.get("origin"))
            if exchange.added and exchange.method == "OPTIONS":
                exchange.respond(204, headers=preflight_headers(exchange.headers))
                return None
        by_method = self._find(exchange)
        if by_method is None:
            parts = exchange.path.split("/")
            instead = OPENAIS.get(parts[2]) if len(parts) > 2 and parts[1] == "v1" else None
            path = exchange.path[:LONGEST_PATH] + (f": {instead}" if instead else "")
            exchange.refuse(404, f"there is nothing at {path}. {self._listed}")
            return None
        route = by_method.get("GET" if exchange.method == "HEAD" else exchange.method)
        if route is None:
            allowed = ", ".join(sorted({*by_method, *(["HEAD"] if "GET" in by_method else [])}))
            exchange.refuse(405, f"{exchange.path} takes {allowed}.", [("Allow", allowed)])
            return None
        exchange.routine = route.access == "open"
        if route.access == "open":
            return route
        found = self.access.check_key(route.access, exchange.headers.get("authorization"))
        if isinstance(found, RequestRefusal):
            _refuse(exchange, found)
            return None
        if found is not None:
            exchange.key, exchange.notes["key"] = found, found.name
        return route

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

    def _find(self, exchange: Exchange) -> dict[str, Route] | None:
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


def _refuse(exchange: Exchange, refusal: RequestRefusal) -> None:
    exchange.refuse(refusal.status, refusal.message, refusal.headers, refusal.kind, refusal.code)


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
