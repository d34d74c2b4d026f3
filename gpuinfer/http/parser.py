"""The parser of requests by the letter of RFC 9112: limits, heads, bodies in chunks, and a stream of bytes as heads and
bodies in turn. It does no I/O and reads no clock. The grammar says what is taken; all else is refused, and the
diagnosis names the first fault from the left, so that the answer is the same however the bytes arrive. Being lenient
where the RFC allows it (bare LF, folded lines, lists of one length) is how two parsers come to read one message in
two ways.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes


class Malformed(Exception):
    """The request is answered with `status` and `message`; where its bytes are at fault, the connection is closed."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


REFUSALS = 1024
OWN = 16  # descriptors for anything but connections
SPARE = 64  # connections beyond the limit that are still heard, so that probes come through
CROWDED_S = 2.0  # for one of these to ask


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes in bytes, times in seconds."""

    head_bytes: int = 32 << 10  # a request's line and headers
    line_bytes: int = 16 << 10  # one line of them
    headers: int = 100
    body_bytes: int = 64 << 20
    bodies_bytes: int = 1 << 30  # all bodies of all connections together, as far as they have come
    connections: int = 8192
    refusals: int = REFUSALS  # connections beyond those that are told so; still more are closed at once
    head_s: float = 10.0  # from a head's first byte to its last, and from the connection to its first request
    body_s: float = 60.0  # from a body's first byte to its last
    idle_s: float = 75.0  # between two requests of one connection
    write_s: float = 60.0  # a client that reads nothing is cut after it

    def within(self, descriptors: int) -> HttpLimits:
        """No more connections than so many descriptors allow."""
        connections, refusals = fitting_connections(self.connections, descriptors)
        return replace(self, connections=connections, refusals=refusals)


def fitting_connections(connections: int, descriptors: int, each: int = 1) -> tuple[int, int]:
    """How many connections can be had at once, each with so many descriptors, and how many more can be refused.

    A quarter is kept back for refusals: a process without a descriptor left cannot say no, and the system resets who
    connects.
    """
    if connections * each + REFUSALS + OWN <= descriptors:
        return connections, REFUSALS
    refusals = min(REFUSALS, descriptors // 4)
    return max(1, min(connections, (descriptors - refusals - OWN) // each)), refusals


def overflow_connections(refusals: int) -> int:
    """How many connections beyond the limit may still ask, where so many can be refused."""
    return min(SPARE, refusals // 2)


def limit_notice(wanted: int, connections: int) -> str:
    """What to say where only so many fit."""
    return (
        f"{connections:,} connections at once in place of {wanted:,}, since this process may open few files. "
        "Raise the limit: ulimit -n 65536."
    )


_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_EARLY = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r[^\n]")
_VERSION = re.compile(rb"HTTP/[0-9](?:\.[0-9])?")
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"/[!\"$-~]*")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def diagnose(head: bytes, limits: HttpLimits) -> Malformed:
    """The fault of a head, whole or as far as it has come. There must be one."""
    whole = len(head) <= limits.head_bytes
    lines = head[: limits.head_bytes].split(b"\r\n")
    complete = lines[:-2] if head.endswith(b"\r\n\r\n") and whole else lines
    for number, line in enumerate(complete):
        last = number == len(complete) - 1 and complete is lines
        fault = _of_line(line, number, last, limits)
        if fault is not None:
            return fault
    return Malformed(431, f"a head of more than {limits.head_bytes:,} bytes. Send fewer or shorter headers.")


def refuse_early(part: bytes, start: int, limits: HttpLimits) -> bool:
    """Whether a head that is not all there yet can be refused already. Bytes before `start` have been looked at."""
    if len(part) > limits.head_bytes or _EARLY.search(part, max(0, start - 1)):
        return True
    return len(part) - part.rfind(b"\n") - 1 - part.endswith(b"\r") > limits.line_bytes


def _of_line(line: bytes, number: int, unfinished: bool, limits: HttpLimits) -> Malformed | None:
    if unfinished:
        line = line.removesuffix(b"\r")  # whose LF may be on its way
    control = _CONTROL.search(line[: limits.line_bytes])
    if control is not None:
        return Malformed(400, "a bare line end or another control character in the head. Lines end in CR LF.")
    if len(line) > limits.line_bytes:
        status = 431 if number else 414
        return Malformed(status, f"a line of more than {limits.line_bytes:,} bytes in the head. Send a shorter one.")
    if unfinished:
        return None
    return _of_field(line, number, limits) if number else _of_request_line(line)


def _of_request_line(line: bytes) -> Malformed | None:
    words = line.split(b" ")
    if len(words) != 3 or not _METHOD.fullmatch(words[0]) or not words[1]:
        return Malformed(400, "a request line that is not 'METHOD /path HTTP/1.1'.")
    method, target, version = words
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        if _VERSION.fullmatch(version):
            return Malformed(505, "another version of HTTP. This server speaks HTTP/1.1.")
        return Malformed(400, "a request line that is not 'METHOD /path HTTP/1.1'.")
    if method not in (b"GET", b"HEAD", b"POST", b"PUT", b"PATCH", b"DELETE", b"OPTIONS"):
        return Malformed(501, "an unknown method.")
    if not _TARGET.fullmatch(target):
        return Malformed(400, "a target that is no path. Send one that begins with a slash, and the host in Host.")
    return None


def _of_field(line: bytes, number: int, limits: HttpLimits) -> Malformed | None:
    if number > limits.headers:
        return Malformed(431, f"more than {limits.headers} headers. Send fewer.")
    if line[:1] in (b" ", b"\t"):
        return Malformed(400, "a folded header line. Send it in one line.")
    name, colon, _ = line.partition(b":")
    if not colon or not _NAME.fullmatch(name):
        return Malformed(400, "a header line that is not 'Name: value', without a space before the colon.")
    return None


METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
LIMITS = HttpLimits()
QUERY_FIELDS = 100
LENGTH_DIGITS = 18
REMEMBERED = 256  # bytes: the paths of longer targets are worked out each time

# Possessive quantifiers: the time is linear in the length, whatever is sent.
_HEAD = re.compile(
    r"(?P<method>[A-Z]++) (?P<target>/[!\"$-~]*+) HTTP/1\.(?P<minor>[01])\r\n"
    r"(?P<fields>(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+\r\n)*+)\r\n"
)
_HOST = re.compile(r"(?:[A-Za-z0-9._~!$&'()*+;=%-]*+|\[[0-9A-Fa-f:.]++\])(?::[0-9]{0,5})?")
_LENGTH = re.compile(rf"[0-9]{{1,{LENGTH_DIGITS}}}")
_ONCE = frozenset({"host", "content-length", "transfer-encoding", "authorization", "content-type", "expect", "origin"})


class HttpHead(NamedTuple):
    """A request's head. Names of headers in lower case; values as Latin-1, those of one name joined by commas."""

    method: str
    target: bytes
    minor: int  # of the version, HTTP/1.minor
    headers: Mapping[str, str]
    length: int | None  # of the body in bytes; None: it comes in chunks
    keep: bool  # whether the connection goes on after it


def parse_head(head: bytes, limits: HttpLimits = LIMITS) -> HttpHead:
    """The head, given up to and with the empty line. Raises `Malformed`."""
    found = _HEAD.fullmatch(head.decode("latin-1"))
    if found is None or not _within(head, limits):
        raise diagnose(head, limits)
    method, target, minor, fields = found.group("method", "target", "minor", "fields")
    if method not in METHODS:
        raise diagnose(head, limits)
    headers = _headers(fields, limits)
    return HttpHead(
        method,
        target.encode("latin-1"),
        int(minor),
        headers,
        _length(headers, minor == "1"),
        minor == "1" and ("connection" not in headers or "close" not in headers["connection"].lower()),
    )


def check_head(head: bytes) -> None:
    """Raise `Malformed` for what `parse_head` would, with the ordinary limits."""
    parse_head(head)
    check_target(head.split(b" ", 2)[1])


def _within(head: bytes, limits: HttpLimits) -> bool:
    if len(head) <= limits.line_bytes:
        return True
    return len(head) <= limits.head_bytes and max(map(len, head.split(b"\r\n"))) <= limits.line_bytes


def _headers(fields: str, limits: HttpLimits) -> dict[str, str]:
    lines = fields.split("\r\n")
    if len(lines) - 1 > limits.headers:
        raise Malformed(431, f"more than {limits.headers} headers. Send fewer.")
    headers: dict[str, str] = {}
    for line in lines[:-1]:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        if name in headers:
            if name in _ONCE:
                raise Malformed(400, f"several headers '{name}'. Send one.")
            value = f"{headers[name]}, {value}"
        headers[name] = value
    return headers


def _length(headers: Mapping[str, str], modern: bool) -> int | None:
    """The body's length; whether Host is there, once."""
    host = headers.get("host")
    if host is None:
        if modern:
            raise Malformed(400, "no Host header. HTTP/1.1 needs one.")
    elif not _HOST.fullmatch(host):
        raise Malformed(400, "a Host header that names no host.")
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        _check_chunked(coding, length, modern)
        return None
    expect = headers.get("expect")
    if expect is not None and expect.lower() != "100-continue":
        raise Malformed(417, "an unknown expectation. Leave the Expect header out.")
    if length is None:
        return 0
    if not _LENGTH.fullmatch(length):
        if length.isdigit() and length.isascii():
            raise Malformed(413, "a Content-Length beyond every limit.")
        raise Malformed(400, "a Content-Length that is no plain number.")
    return int(length)


def _check_chunked(coding: str, length: str | None, modern: bool) -> None:
    if length is not None:
        raise Malformed(400, "both Content-Length and Transfer-Encoding. Send one of them.")
    if not modern:
        raise Malformed(400, "Transfer-Encoding in HTTP/1.0, which has none.")
    if coding.lower() != "chunked":
        raise Malformed(501, "an unknown transfer coding. Send the body with Content-Length, or chunked.")


def check_target(target: bytes) -> str:
    """The path of a target as it is routed: percent-decoded once, without the query. Raises `Malformed`.

    No encoded slash or NUL, no segment of dots, no empty segment: two programs could take such a path for two places.
    """
    path = target.partition(b"?")[0]
    return _remembered(path) if len(path) <= REMEMBERED else _path(path)


def _path(path: bytes) -> str:
    if not path.startswith(b"/") or b"#" in path or b"\\" in path:
        raise Malformed(400, "a target that is no path. Send one that begins with a slash, and the host in Host.")
    decoded = path
    if b"%" in path:
        if re.search(rb"%(?![0-9A-Fa-f]{2})", path):
            raise Malformed(400, "a percent sign in the path that encodes nothing.")
        decoded = unquote_to_bytes(path)
        if decoded.count(b"/") != path.count(b"/") or b"\\" in decoded or re.search(rb"[\x00-\x1f\x7f]", decoded):
            raise Malformed(400, "an encoded slash, backslash or control character in the path.")
    segments = decoded.split(b"/")[1:]
    if b"." in segments or b".." in segments or b"" in segments[:-1]:
        raise Malformed(400, "a path with empty or dotted segments. Send it in its plain form.")
    try:
        return decoded.decode("utf-8")
    except UnicodeDecodeError:
        raise Malformed(400, "a path that is not UTF-8.") from None


_remembered = lru_cache(maxsize=1024)(_path)


def parse_query(query: str) -> dict[str, str]:
    """The fields of a query, decoded; of one name the last. Raises `Malformed`."""
    try:
        return dict(parse_qsl(query, keep_blank_values=True, errors="strict", max_num_fields=QUERY_FIELDS))
    except ValueError:
        raise Malformed(400, f"a query that is not UTF-8, or of more than {QUERY_FIELDS} fields.") from None


CHUNKS = 1 << 16  # of one body: a byte in each would cost far more time than memory
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")
SIZE_LINE = 10


class ChunkedBody:
    """Takes a body apart as it arrives. `size` is what has come of it, in bytes."""

    __slots__ = ("_chunks", "_last", "_left", "_limit", "_rest", "complete", "parts", "size")

    def __init__(self, limit: int) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.complete = False
        self._last = False  # the present chunk is the last one
        self._limit = limit
        self._rest = b""  # what is not yet a whole size line, or a whole line end
        self._left = -1  # of the present chunk, its line end counted; -1: a size line comes
        self._chunks = 0

    def feed(self, data: bytes) -> bytes:
        """Take bytes; returns those after the body's end. Raises `Malformed`."""
        data, self._rest = self._rest + data, b""
        at = 0
        while at < len(data):
            if self._left < 0:
                end = data.find(b"\r\n", at, at + SIZE_LINE)
                if end < 0:
                    _check_partial_size(data[at : at + SIZE_LINE])
                    self._rest = data[at:]
                    return b""
                at = self._begin(data, at, end)
                continue
            if self._left > 2:
                part = data[at : at + self._left - 2]
                self.parts.append(part)
                self.size += len(part)
                self._left -= len(part)
                at += len(part)
                continue
            if not b"\r\n".startswith(data[at : at + 2]):
                raise Malformed(400, "a chunk that is longer than it says, or a trailer.")
            if len(data) - at < 2:
                self._rest = data[at:]
                return b""
            at += 2
            self._left = -1
            if self._last:
                self.complete = True
                return data[at:]
        return b""

    def _begin(self, data: bytes, at: int, end: int) -> int:
        size = data[at:end]
        if not _SIZE.fullmatch(size):
            raise Malformed(400, "a chunk whose size is no plain hexadecimal number. Extensions are not taken.")
        length = int(size, 16)
        self._chunks += 1
        if self.size + length > self._limit:
            raise Malformed(413, f"a body of more than {self._limit:,} bytes.")
        if self._chunks > CHUNKS:
            raise Malformed(413, f"a body of more than {CHUNKS:,} chunks. Send larger ones.")
        self._last = length == 0
        self._left = length + 2
        return end + 2


def _check_partial_size(part: bytes) -> None:
    if not re.fullmatch(rb"[0-9A-Fa-f]{0,8}\r?", part) or part.startswith(b"\r"):
        raise Malformed(400, "a chunk whose size is no plain hexadecimal number. Extensions are not taken.")


class RequestParser:
    """`add` bytes; ask for a `head`; `expect` its body and ask for that. Then the next. All raise `Malformed`."""

    __slots__ = ("_body", "_limits", "_missing", "_scanned", "buffer", "held")

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self.buffer = b""  # what has come and is in no head or body yet
        self.held = 0  # bytes of the present body that have come
        self._scanned = 0  # so much of the buffer has been seen to hold no whole head
        self._missing = 0  # bytes of the present body that are still to come, where its length is known
        self._body: list[bytes] | ChunkedBody = []

    def add(self, data: bytes) -> None:
        self.buffer = self.buffer + data if self.buffer else data

    def head(self) -> HttpHead | None:
        """The next request's head, once it is all there. What can be refused before that is refused."""
        data, limits = self.buffer, self._limits
        end = data.find(b"\r\n\r\n", max(0, self._scanned - 3)) + 4
        if 4 <= end <= limits.head_bytes:
            head = parse_head(data[:end], limits)
            self.buffer = data[end:]
            self._scanned = 0
            return head
        if refuse_early(data, self._scanned, limits):
            raise diagnose(data, limits)
        self._scanned = len(data)
        return None

    def expect(self, head: HttpHead) -> None:
        """The body of this head comes next."""
        self.held = 0
        if head.length is None:
            self._body = ChunkedBody(self._limits.body_bytes)
        else:
            self._body = []
            self._missing = head.length

    def body(self) -> bytes | None:
        """The body, once it is all there."""
        if isinstance(self._body, ChunkedBody):
            return self._chunked(self._body)
        data, missing = self.buffer, self._missing
        if len(data) > missing:
            data, self.buffer = data[:missing], data[missing:]
        else:
            self.buffer = b""
        self.held += len(data)
        self._missing -= len(data)
        if not self._missing and not self._body:
            return data
        self._body.append(data)
        return None if self._missing else self._joined(self._body)

    def forget(self) -> None:
        """The rest is of no interest."""
        self.buffer = b""
        self._body = []

    def _chunked(self, body: ChunkedBody) -> bytes | None:
        data, self.buffer = self.buffer, b""
        self.buffer = body.feed(data)
        self.held = body.size
        return self._joined(body.parts) if body.complete else None

    def _joined(self, parts: list[bytes]) -> bytes:
        self._body = []
        return b"".join(parts)
