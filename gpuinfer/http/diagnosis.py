"""Why a head is refused: its first fault from the left, so that the answer is the same however the bytes arrive."""

from __future__ import annotations

import re

from gpuinfer.http.limits import HttpLimits
from gpuinfer.http.malformed import Malformed

_CONTROL = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
_EARLY = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|(?<!\r)\n|\r[^\n]")
_VERSION = re.compile(rb"HTTP/[0-9](?:\.[0-9])?")
_METHOD = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET = re.compile(rb"/[!\"$-~]*")
_NAME = re.compile(rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")


def of(head: bytes, limits: HttpLimits) -> Malformed:
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


def early(part: bytes, start: int, limits: HttpLimits) -> bool:
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
