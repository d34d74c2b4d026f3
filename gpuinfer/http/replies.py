"""The bytes of responses: status lines, the date once a second, errors in OpenAI's shape."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from email.utils import formatdate
from functools import lru_cache
from http import HTTPStatus

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


def error_bytes(message: str, type: str, param: str | None = None, code: str | None = None) -> bytes:
    """The body of an error in OpenAI's shape; `message` in one line."""
    error = {"message": " ".join(message.split()), "type": type, "param": param, "code": code}
    return json.dumps({"error": error}).encode()


def type_of(status: int) -> str:
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


class _Clock:
    """The date as headers say it, written anew once a second."""

    __slots__ = ("second", "text")

    def __init__(self) -> None:
        self.second = 0
        self.text = b""

    def now(self) -> bytes:
        second = int(time.time())
        if second != self.second:
            self.second, self.text = second, formatdate(second, usegmt=True).encode()
        return self.text


_clock = _Clock()


def head(status: int, content_type: str, length: int | None, keep: bool, headers: Pairs = ()) -> bytes:
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
    return _beginning(status, content_type) + _clock.now() + more.encode("latin-1")


def refusal(status: int, message: str, *, head_only: bool = False) -> bytes:
    """The whole response to what is no request that could be answered; the connection closes after it."""
    body = error_bytes(message, type_of(status))
    return head(status, "application/json", len(body), False, RETRY if status == 503 else ()) + body * (not head_only)


def check_field(name: str, value: str) -> None:
    """Raise ValueError for what would end a header's line."""
    if _UNSAFE.search(value) or not _NAME.fullmatch(name):
        raise ValueError(f"header {name!r} has a name or a value that cannot be sent")


def last_chunk(trailers: Pairs = ()) -> bytes:
    """What ends a body in chunks, and the headers after it."""
    for name, value in trailers:
        check_field(name, value)
    return b"0\r\n%b\r\n" % "".join(f"{name}: {value}\r\n" for name, value in trailers).encode("latin-1")


def chunk(data: bytes) -> bytes:
    """A chunk with its size. `data` is not empty, since that would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
