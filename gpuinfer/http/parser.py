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
        unfinished = number == len(complete) - 1 and complete is lines
        if unfinished:
            line = line.removesuffix(b"\r")  # whose LF may be on its way
        if _CONTROL.search(line[: limits.line_bytes]):
            return Malformed(400, "a bare line end or another control character in the head. Lines end in CR LF.")
        if len(line) > limits.line_bytes:
            why = f"a line of more than {limits.line_bytes:,} bytes in the head. Send a shorter one."
            return Malformed(431 if number else 414, why)
        fault = None if unfinished else _of_field(line, number, limits) if number else _of_request_line(line)
        if fault is not None:
            return fault
    return Malformed(431, f"a head of more than {limits.head_bytes:,} bytes. Send fewer or shorter headers.")


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


def match_head(head: bytes, limits: HttpLimits = LIMITS) -> re.Match[str]:
    """The method, target, minor version and fields of a head, which ends with the empty line. Raises `Malformed`."""
    found = _HEAD.fullmatch(head.decode("latin-1"))
    short = len(head) <= limits.line_bytes or (
        len(head) <= limits.head_bytes and max(map(len, head.split(b"\r\n"))) <= limits.line_bytes
    )
    if found is None or not short or found["method"] not in METHODS:
        raise diagnose(head, limits)
    if found["fields"].count("\r\n") > limits.headers:
        raise Malformed(431, f"more than {limits.headers} headers. Send fewer.")
    return found


def join_values(headers: Mapping[str, str], name: str, value: str) -> str:
    """The value of a header that comes again. Raises `Malformed` where only one is allowed."""
    if name in _ONCE:
        raise Malformed(400, f"several headers '{name}'. Send one.")
    return f"{headers[name]}, {value}"


def parse_head(head: bytes, limits: HttpLimits = LIMITS) -> HttpHead:
    """A head as the server needs it. Raises `Malformed`."""
    method, target, minor, fields = match_head(head, limits).group("method", "target", "minor", "fields")
    headers: dict[str, str] = {}
    for line in fields.split("\r\n")[:-1]:
        name, _, value = line.partition(":")
        name, value = name.lower(), value.strip(" \t")
        headers[name] = join_values(headers, name, value) if name in headers else value
    return HttpHead(
        method,
        target.encode("latin-1"),
        int(minor),
        headers,
        body_length(headers, minor == "1"),
        minor == "1" and ("connection" not in headers or "close" not in headers["connection"].lower()),
    )


def body_length(headers: Mapping[str, str], modern: bool) -> int | None:
    """The body's length in bytes, None for chunks. Raises `Malformed` for these headers, Host and Expect."""
    host = headers.get("host")
    if host is None:
        if modern:
            raise Malformed(400, "no Host header. HTTP/1.1 needs one.")
    elif not _HOST.fullmatch(host):
        raise Malformed(400, "a Host header that names no host.")
    coding, length = headers.get("transfer-encoding"), headers.get("content-length")
    if coding is not None:
        if length is not None:
            raise Malformed(400, "both Content-Length and Transfer-Encoding. Send one of them.")
        if not modern:
            raise Malformed(400, "Transfer-Encoding in HTTP/1.0, which has none.")
        if coding.lower() != "chunked":
            raise Malformed(501, "an unknown transfer coding. Send the body with Content-Length, or chunked.")
    expect = headers.get("expect")
    if expect is not None and expect.lower() != "100-continue":
        raise Malformed(417, "an unknown expectation. Leave the Expect header out.")
    if coding is not None:
        return None
    if length is None:
        return 0
    if not _LENGTH.fullmatch(length):
        if length.isdigit() and length.isascii():
            raise Malformed(413, "a Content-Length beyond every limit.")
        raise Malformed(400, "a Content-Length that is no plain number.")
    return int(length)


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


CHUNKS = 1 << 16  # of one request's body: a byte in each would cost far more time than memory
TRAILER_BYTES = 8 << 10
_SIZE_LINE = re.compile(rb"([0-9A-Fa-f]{1,8})\r\n")
_PARTIAL_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}\r?")


class ChunkDecoder:
    """Decodes a body in chunks as it arrives (RFC 9112, 7.1): `feed` bytes, and take the content that they hold.

    Once `complete`, `rest` is what came after the body. `whole` says of the latest piece that it was whole chunks from
    its first byte to its last, so that a proxy can pass it on unchanged. A request's body has a `limit` in bytes and no
    trailer; a response's has none, and its `trailer` is kept, as lines.
    """

    __slots__ = ("_chunks", "_last", "_left", "_limit", "_part", "complete", "rest", "size", "trailer", "whole")

    def __init__(self, limit: int | None = None) -> None:
        self.size = 0  # bytes of content so far
        self.complete = self.whole = False
        self.rest = self.trailer = b""
        self._limit = limit
        self._last = False  # the present chunk is the last one, of no bytes
        self._part = b""  # the beginning of a line that is not all there
        self._left = -1  # bytes of the present chunk, its line end counted; -1: a size line comes
        self._chunks = 0

    def feed(self, data: bytes) -> bytes:
        """The content in these bytes. Raises `Malformed`."""
        at_size = self._left < 0 and not self._part
        if at_size and self._limit is None and (line := _SIZE_LINE.match(data)) is not None:
            length = int(line[1], 16)  # most pieces of a stream are one chunk
            if length and line.end() + length + 2 == len(data) and data.endswith(b"\r\n"):
                self.size += length
                self.whole = True
                return data[line.end() : -2]
        if self._part:
            data, self._part = self._part + data, b""
        at, end, content = 0, len(data), []
        while at < end:
            left = self._left
            if left < 0:
                line = _SIZE_LINE.match(data, at)
                if line is None:
                    self._part = data[at:]
                    if not _PARTIAL_SIZE.fullmatch(self._part):
                        raise Malformed(400, "a chunk whose size is no plain hexadecimal number, or has an extension.")
                    break
                at, length = line.end(), int(line[1], 16)
                self._last, self._left = length == 0, length + 2
                if self._limit is not None:
                    self._chunks += 1
                    if self.size + length > self._limit:
                        raise Malformed(413, f"a body of more than {self._limit:,} bytes.")
                    if self._chunks > CHUNKS:
                        raise Malformed(413, f"a body of more than {CHUNKS:,} chunks. Send larger ones.")
            elif left > 2:
                part = data[at : at + left - 2]
                content.append(part)
                self.size += len(part)
                self._left = left - len(part)
                at += len(part)
            elif self._last and self._limit is None:
                at = self._read_trailer(data, at)
            elif not b"\r\n".startswith(data[at : at + 2]):
                raise Malformed(400, "a chunk that is longer than it says, or a trailer.")
            elif end - at < 2:
                self._part = data[at:]
                break
            else:
                at += 2
                self._left = -1
                self.complete = self._last
            if self.complete:
                self.rest = data[at:]
                break
        self.whole = at_size and self._left < 0 and not self._part and not self.complete
        return content[0] if len(content) == 1 else b"".join(content)

    def _read_trailer(self, data: bytes, at: int) -> int:
        """Take one line of the trailer, or the empty one that ends the body; returns where the next line begins."""
        line_end = data.find(b"\r\n", at)
        line = data[at:] if line_end < 0 else data[at : line_end + 2]
        if len(self.trailer) + len(line) > TRAILER_BYTES or b"\n" in line[:-2]:
            raise Malformed(400, f"a trailer of more than {TRAILER_BYTES:,} bytes, or with a bare line end.")
        if line_end < 0:
            self._part = line
        elif line_end == at:
            self.complete, self._left = True, -1
        else:
            self.trailer += line
        return at + len(line)


class RequestParser:
    """`add` bytes; ask for a `head`; `expect` its body and ask for that. Then the next. All raise `Malformed`."""

    __slots__ = ("_body", "_chunks", "_limits", "_missing", "_scanned", "buffer", "held")

    def __init__(self, limits: HttpLimits) -> None:
        self._limits = limits
        self.buffer = b""  # what has come and is in no head or body yet
        self.held = 0  # bytes of the present body that have come
        self._scanned = 0  # so much of the buffer has been seen to hold no whole head
        self._missing = 0  # bytes of the present body that are still to come, where its length is known
        self._body: list[bytes] = []  # its parts so far
        self._chunks: ChunkDecoder | None = None  # of a body in chunks

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
        line = len(data) - data.rfind(b"\n") - 1 - data.endswith(b"\r")  # what there is of the last one
        early = _EARLY.search(data, max(0, self._scanned - 1))
        if early or len(data) > limits.head_bytes or line > limits.line_bytes:
            raise diagnose(data, limits)
        self._scanned = len(data)
        return None

    def expect(self, head: HttpHead) -> None:
        """The body of this head comes next."""
        self.held, self._body = 0, []
        self._chunks = ChunkDecoder(self._limits.body_bytes) if head.length is None else None
        self._missing = head.length or 0

    def body(self) -> bytes | None:
        """The body, once it is all there."""
        data, self.buffer = self.buffer, b""
        if self._chunks is not None:
            data = self._chunks.feed(data)
            self.held, self.buffer = self._chunks.size, self._chunks.rest
            complete = self._chunks.complete
        else:
            if len(data) > self._missing:
                data, self.buffer = data[: self._missing], data[self._missing :]
            self.held += len(data)
            self._missing -= len(data)
            complete = not self._missing
        if complete and not self._body:
            return data
        self._body.append(data)
        if not complete:
            return None
        parts, self._body = self._body, []
        return b"".join(parts)

    def forget(self) -> None:
        """Drop what has come and was not read."""
        self.buffer, self._body = b"", []
