"""One request and its response as a handler has them, the bytes of response heads, chunks and errors in OpenAI's shape,
and one log line for each request.
"""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from gpuinfer.errors import GpuinferError
from gpuinfer.http.parser import HttpHead, parse_query

if TYPE_CHECKING:
    from gpuinfer.http.access import Key
    from gpuinfer.http.server_connection import ServerConnection

Pairs = Sequence[tuple[str, str]]

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
RETRY = [("Retry-After", "1")]
TYPES = {
    501: "invalid_request_error",
    505: "invalid_request_error",
    403: "permission_error",
    408: "timeout_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "overloaded_error",
}
_UNSAFE = re.compile(r"[^\t\x20-\x7e\x80-\xff]")
_NAME = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


CREATED = "x-gpuinfer-created"  # a header that only our router sends, with every request
COHERES = "/v2/rerank"  # the one path under /v2 of another protocol


def error_body(message: str, type: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error in OpenAI's shape; `message` in one line."""
    return {"error": {"message": " ".join(message.split()), "type": type, "param": param, "code": code}}


def is_kserve(path: str) -> bool:
    """Whether a path is one of KServe's inference protocol, whose errors are {"error": MESSAGE}: also one that is not
    answered here, since its clients read the errors of all their paths so.
    """
    return path == "/v2" or (path.startswith("/v2/") and path != COHERES)


def error_bytes(message: str, type: str, code: str | None = None, path: str = "") -> bytes:
    """The body of an error in OpenAI's shape, or in KServe's where the path is one of its protocol."""
    error = error_body(message, type, None, code)
    return json.dumps({"error": error["error"]["message"]} if is_kserve(path) else error).encode()


def error_type_of(status: int) -> str:
    """OpenAI's type of an error with this status."""
    return TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")


@lru_cache(maxsize=512)
def _beginning(status: int, content_type: str) -> bytes:
    """Up to and with `Date: `."""
    check_field("Content-Type", content_type)
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = "Unknown"
    kind = f"Content-Type: {content_type}\r\n" if content_type else ""
    return f"HTTP/1.1 {status} {phrase}\r\n{kind}Date: ".encode("latin-1")


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


def head_bytes(status: int, content_type: str, length: int | None, keep: bool, headers: Pairs = ()) -> bytes:
    """A response's head. Without a length the body is chunked; -1: it has none, or ends with the connection."""
    more = "" if keep else "\r\nConnection: close"
    if headers:
        for name, value in headers:
            check_field(name, value)
            more += f"\r\n{name}: {value}"
    if length is None:
        more += "\r\nTransfer-Encoding: chunked\r\n\r\n"
    elif length < 0:
        more += "\r\n\r\n"
    else:
        more += f"\r\nContent-Length: {length}\r\n\r\n"
    return _beginning(status, content_type) + _date(int(time.time())) + more.encode("latin-1")


def check_field(name: str, value: str) -> None:
    """Raise ValueError for what would end a header's line."""
    if _UNSAFE.search(value) or not _NAME.fullmatch(name):
        raise ValueError(f"header {name!r} has a name or a value that cannot be sent")


def last_chunk(trailers: Pairs = ()) -> bytes:
    """What ends a body in chunks, and the headers after it."""
    for name, value in trailers:
        check_field(name, value)
    return b"0\r\n%b\r\n" % "".join(f"{name}: {value}\r\n" for name, value in trailers).encode("latin-1")


def chunk_bytes(data: bytes) -> bytes:
    """A chunk with its size. `data` is not empty, since that would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


Handler = Callable[["Exchange"], Awaitable[None]]
"""One task a request; cancelled when the client goes away. What it raises is answered with 500."""

Quick = Callable[["Exchange"], bool]
"""Called once a head is there, before the body. Whether it has answered, by `respond`."""

FRESH, BEGUN, ENDED = range(3)
NO_BODY = frozenset({204, 304})


class ClientGone(GpuinferError):
    """The client has disconnected."""


class Exchange:
    """A request with its body, and the one response to it: `respond`, or `begin`, `write`s and `end`."""

    __slots__ = (
        "_chunked",
        "_connection",
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
        "routed",
        "routine",
        "status",
        "trailers",
    )

    def __init__(self, connection: ServerConnection, head: HttpHead, path: str, peer: str) -> None:
        self._connection = connection
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
        self.notes: dict[str, Any] = {}  # of the request log (`log_request`)
        self.routed = False  # sent by a router, which logs it itself
        self.routine = False  # a probe, such as /health, of no interest to the request log
        self.added: list[tuple[str, str]] = []  # headers that any response to the request has beside its own,
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
        self._require(FRESH)
        self.status, bare = status, status in NO_BODY
        if self.added:
            headers = [*headers, *self.added]
        head = head_bytes(status, content_type if body else "", -1 if bare else len(body), self.keep, headers)
        self._stage = ENDED
        self._connection.send(head if bare or self.method == "HEAD" else head + body)

    def refuse(
        self, status: int, message: str, headers: Pairs = (), kind: str | None = None, code: str | None = None
    ) -> None:
        """Respond with an error in OpenAI's shape. `kind` None: as the status says."""
        self.notes["refused"] = message
        body = error_bytes(message, kind or error_type_of(status), code, self.path)
        self.respond(status, body, headers=headers)

    def begin(self, status: int, content_type: str, headers: Pairs = ()) -> None:
        """Begin a response whose length is not known: in chunks, for HTTP/1.0 up to the connection's end."""
        self._require(FRESH)
        self.status, self._chunked = status, self.minor > 0
        if self.added:
            headers = [*headers, *self.added]
        head = head_bytes(status, content_type, None if self._chunked else -1, self.keep, headers)
        self._stage = BEGUN
        self._connection.send(head)

    async def write(self, data: bytes) -> None:
        """Send a part of the body; waits while the client reads too slowly. Raises `ClientGone`."""
        self._require(BEGUN)
        if data and self.method != "HEAD":
            self._connection.send(chunk_bytes(data) if self._chunked else data)
        await self._connection.until_writable()

    def end(self) -> None:
        """The response that has begun is complete."""
        self._require(BEGUN)
        self._stage = ENDED
        if self._chunked and self.method != "HEAD":
            self._connection.send(last_chunk(self.trailers))

    def _require(self, stage: int) -> None:
        if self._stage != stage:
            raise RuntimeError("a response is sent once: respond(), or begin(), write() and end() in this order")


log = logging.getLogger("gpuinfer.requests")
UNIX = "unix"  # the peer of a fleet's control application: the router, which logs requests itself
GONE = 499  # in place of a status, as nginx writes it: the client went away before its answer
LONGEST = 200  # characters of a path
LONGEST_REASON = 1000  # and of why a request was refused, which may repeat what a client wrote


def log_exchange(exchange: Exchange) -> None:
    """Log a request that is over. Probes such as /health are logged with -vv only; what a router has sent, by the
    router alone.
    """
    level = logging.DEBUG if exchange.routine and "refused" not in exchange.notes else logging.INFO
    if log.isEnabledFor(level) and exchange.peer != UNIX and not exchange.routed:
        took_s = time.monotonic() - exchange.began
        log_request(
            level, exchange.method, exchange.path, exchange.status or GONE, took_s, exchange.peer, exchange.notes
        )


def log_request(
    level: int, method: str, path: str, status: int, took_s: float, peer: str, notes: Mapping[str, object]
) -> None:
    """`notes`, as far as they are known: id, trace, key (its name), model, input_tokens, output_tokens, replica, and
    refused (why). A path comes without its query, which may hold what is private.
    """
    if not log.isEnabledFor(level):
        return
    fields: dict[str, object] = {"method": method, "path": path[:LONGEST], "status": status}
    fields |= {"took_ms": round(1e3 * took_s, 1), "peer": peer, **notes}
    if "refused" in fields:
        fields["refused"] = str(fields["refused"])[:LONGEST_REASON]
    log.log(level, "%s", _Line(fields), extra={"request": fields})


class _Line:
    """The fields as a sentence, made only if the line is written."""

    def __init__(self, fields: Mapping[str, object]) -> None:
        self._fields = fields

    def __str__(self) -> str:
        fields = self._fields
        request = f"{fields['method']} {fields['path']}" if fields["method"] else "no request"
        parts = [f"{request} {fields['status']} in {fields['took_ms']:.1f} ms"]
        if "output_tokens" in fields:
            parts.append(f"{fields.get('input_tokens', '?')}+{fields['output_tokens']} tokens")
        named = ("model", "key", "replica", "id", "trace")
        parts += [f"{name} {fields[name]}" for name in named if fields.get(name) is not None]
        parts.append(f"from {fields['peer']}")
        if fields.get("refused"):
            parts[-1] += f": {' '.join(str(fields['refused']).split())}"
        line = ", ".join(parts)  # some of it chosen by the client
        return "".join(one if one.isprintable() else "?" for one in line)


class JsonLogFormatter(logging.Formatter):
    """A line of JSON for each message: time, level, and a request's fields or the message."""

    def format(self, record: logging.LogRecord) -> str:
        second = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        fields: dict[str, Any] = {"time": f"{second}.{int(record.msecs):03}Z", "level": record.levelname.lower()}
        request = getattr(record, "request", None)
        fields |= {"message": record.getMessage()} if request is None else request
        if record.exc_info:
            fields["traceback"] = self.formatException(record.exc_info)
        return json.dumps(fields, default=str)
