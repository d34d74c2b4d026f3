"""One request and its response."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from gpuinfer.errors import GpuinferError
from gpuinfer.http import replies
from gpuinfer.http.replies import Pairs
from gpuinfer.http.strict import Head, parse_query

if TYPE_CHECKING:
    from gpuinfer.http.access import Key

Handler = Callable[["Exchange"], Awaitable[None]]
"""One task a request; cancelled when the client goes away. What it raises is answered with 500."""

Quick = Callable[["Exchange"], bool]
"""Asked as soon as a head is there, before the body: whether it has answered, by `respond`."""

FRESH, BEGUN, ENDED = range(3)
NO_BODY = frozenset({204, 304})


class ClientGone(GpuinferError):
    """Nobody is there to read the response."""


class Outlet(Protocol):
    """Where a response goes: the connection."""

    def send(self, data: bytes) -> None: ...
    async def room(self) -> None: ...


class Exchange:
    """A request with its body, and the one response to it: `respond`, or `begin`, `write`s and `end`."""

    __slots__ = (
        "_chunked",
        "_outlet",
        "_query",
        "_stage",
        "added",
        "began",
        "body",
        "headers",
        "keep",
        "key",
        "method",
        "minor",
        "notes",
        "parameters",
        "path",
        "peer",
        "raw_query",
        "routine",
        "status",
        "trailers",
    )

    def __init__(self, outlet: Outlet, head: Head, path: str, peer: str) -> None:
        self._outlet = outlet
        self.method = head.method
        self.headers: Mapping[str, str] = head.headers
        self.minor = head.minor
        self.keep = head.keep  # whether the connection goes on; may be set to False before the response
        self.path = path
        self.raw_query = head.target.partition(b"?")[2].decode("ascii")
        self.body = b""
        self.peer = peer  # host:port of the client, "unix" for a Unix socket
        self.parameters: Mapping[str, str] = {}  # of the route's path
        self._query: Mapping[str, str] | None = None
        self.key: Key | None = None  # whose request this is, where keys are asked for
        self.began = time.monotonic()
        self.status = 0  # of the response, once that has begun
        self.notes: dict[str, Any] = {}  # of the request log (`request_log.write`)
        self.routine = False  # it is asked again and again, and of no interest to the request log
        self.added: list[tuple[str, str]] = []  # headers that the response has beside its own, whatever it is,
        self.trailers: list[tuple[str, str]] = []  # and such as follow a body in chunks
        self._stage = FRESH
        self._chunked = False

    @property
    def query(self) -> Mapping[str, str]:
        """The fields of the target's query. Raises `Malformed`."""
        if self._query is None:
            self._query = parse_query(self.raw_query) if self.raw_query else {}
        return self._query

    @property
    def begun(self) -> bool:
        """Whether a response has begun."""
        return self._stage != FRESH

    @property
    def ended(self) -> bool:
        """Whether the response is complete."""
        return self._stage == ENDED

    def respond(
        self, status: int, body: bytes = b"", content_type: str = "application/json", headers: Pairs = ()
    ) -> None:
        """The whole response at once."""
        self._leave(FRESH)
        self.status, bare = status, status in NO_BODY
        if self.added:
            headers = [*headers, *self.added]
        head = replies.head(status, content_type if body else "", -1 if bare else len(body), self.keep, headers)
        self._stage = ENDED
        self._outlet.send(head if bare or self.method == "HEAD" else head + body)

    def refuse(self, status: int, message: str, headers: Pairs = (), *, code: str | None = None) -> None:
        """Respond with an error in OpenAI's shape."""
        self.notes["refused"] = message
        self.respond(status, replies.error_bytes(message, replies.type_of(status), None, code), headers=headers)

    def begin(self, status: int, content_type: str, headers: Pairs = ()) -> None:
        """Begin a response whose length is not known: in chunks, for HTTP/1.0 up to the connection's end."""
        self._leave(FRESH)
        self.status, self._chunked = status, self.minor > 0
        if self.added:
            headers = [*headers, *self.added]
        head = replies.head(status, content_type, None if self._chunked else -1, self.keep, headers)
        self._stage = BEGUN
        self._outlet.send(head)

    async def write(self, data: bytes) -> None:
        """Send a part of the body; waits while the client reads too slowly. Raises `ClientGone`."""
        self._leave(BEGUN)
        if data and self.method != "HEAD":
            self._outlet.send(replies.chunk(data) if self._chunked else data)
        await self._outlet.room()

    def end(self) -> None:
        """The response that has begun is complete."""
        self._leave(BEGUN)
        self._stage = ENDED
        if self._chunked and self.method != "HEAD":
            self._outlet.send(replies.last_chunk(self.trailers))

    def _leave(self, stage: int) -> None:
        if self._stage != stage:
            raise RuntimeError("a response is sent once: respond(), or begin(), write() and end() in this order")
