"""The head of a replica's answer: how its body ends, and the lines that go on to the client as they came."""

from __future__ import annotations

import re

from gpuinfer.fleet.router.request_head import without

CHUNKED, TO_THE_END = -1, -2  # lengths of bodies that say themselves where they end, or last until the connection does

_FIRST = re.compile(rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n\0]*)?\r\n")
_SPECIAL = re.compile(  # in a head in lower case
    rb"\r\n(connection|keep-alive|te|trailer|transfer-encoding|content-(?:length|type)|upgrade|proxy-[^:\r\n]*"
    rb"|x-request-id|x-gpuinfer-(?:route|error))[ \t]*:[ \t]*([^\r\n]*)"
)
_USUAL = frozenset({b"keep-alive", b"close", b""})


class Broken(Exception):
    """This is not HTTP/1.1, or it cannot be told where its body ends."""


class ResponseHead:
    """`lines` is the status line, for HTTP/1.1, and every header that goes on, without the last CRLF; among them
    Content-Length when there is one. `length` is of the body that follows. `leaving`: a replica of ours takes nothing
    new, and has not looked at the request.
    """

    __slots__ = ("events", "keep", "leaving", "length", "lines", "request_id", "status")

    def __init__(self, head: bytes, asked: bytes) -> None:
        """`head` goes up to and with the empty line; `asked` is the method. Raises `Broken`."""
        first = _FIRST.match(head)
        if first is None or head.count(b"\n") != head.count(b"\r\n"):
            raise Broken
        self.status = int(first[2])
        self.keep = first[1] == b"1"
        self.events = self.request_id = self.leaving = False
        lengths: list[bytes] = []
        codings: list[bytes] = []
        named: set[bytes] = set()
        kept, start = [b"HTTP/1.1"], 8
        for found in _SPECIAL.finditer(head.lower()):
            name, value = found[1], found[2].rstrip(b" \t")
            if name == b"content-type":
                self.events = value.startswith(b"text/event-stream")
            elif name == b"x-request-id":
                self.request_id = True
            elif name == b"x-gpuinfer-error":
                self.leaving = self.status == 503 and value == b"closed"
            elif name == b"content-length":
                lengths.append(value)
            else:
                kept.append(head[start : found.start()])
                start = found.end()
                if name == b"transfer-encoding":
                    codings.append(value)
                elif name == b"connection":
                    if value == b"keep-alive":
                        self.keep = True
                        continue
                    tokens = {token.strip() for token in value.split(b",")}
                    self.keep = (self.keep or b"keep-alive" in tokens) and b"close" not in tokens
                    named |= tokens - _USUAL
        kept.append(head[start:-4])
        self.lines = b"".join(kept)
        if named:
            self.lines = without(self.lines, named)
        self.length = _length(lengths, codings)
        if asked == b"HEAD" or self.status in (204, 304) or self.status < 200:
            self.length = 0
        elif self.length == TO_THE_END:
            self.keep = False


def _length(lengths: list[bytes], codings: list[bytes]) -> int:
    if codings:
        if lengths or len(codings) > 1 or codings[0] != b"chunked":
            raise Broken
        return CHUNKED
    if not lengths:
        return TO_THE_END
    if len(lengths) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 18:
        raise Broken
    return int(lengths[0])
