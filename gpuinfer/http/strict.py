"""The head of a request by the letter of RFC 9112, and nothing that two parsers could read in two ways.

What is taken is written down as a grammar; all else is refused, and `diagnosis` says why. Where the RFC lets a server
be lenient (bare LF, folded lines, lists of one length, white space before the colon), this one is not: leniency is
what smuggling of requests lives on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple
from urllib.parse import parse_qsl, unquote_to_bytes

from gpuinfer.http import diagnosis
from gpuinfer.http.limits import HttpLimits
from gpuinfer.http.malformed import Malformed

__all__ = ["Head", "Malformed", "check_head", "check_target", "parse_head", "parse_query"]

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


class Head(NamedTuple):
    """A request's head. Names of headers in lower case; values as Latin-1, those of one name joined by commas."""

    method: str
    target: bytes
    minor: int  # of the version, HTTP/1.minor
    headers: Mapping[str, str]
    length: int | None  # of the body in bytes; None: it comes in chunks
    keep: bool  # whether the connection goes on after it


def parse_head(head: bytes, limits: HttpLimits = LIMITS) -> Head:
    """The head, given up to and with the empty line. Raises `Malformed`."""
    found = _HEAD.fullmatch(head.decode("latin-1"))
    if found is None or not _within(head, limits):
        raise diagnosis.of(head, limits)
    method, target, minor, fields = found.group("method", "target", "minor", "fields")
    if method not in METHODS:
        raise diagnosis.of(head, limits)
    headers = _headers(fields, limits)
    return Head(
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
