"""The head of a replica's answer: how its body ends, and the lines that go on to the client as they came."""

from __future__ import annotations

import re

from gpuinfer.fleet.router.request_head import without

CHUNKED, TO_THE_END = -1, -2  # lengths of bodies that say themselves where they end, or last until the connection does

_SHAPE = re.compile(
    rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n\0]*+)?(?:\r\n[^\r\n\0\t :][^\r\n\0:]*+:[^\r\n\0]*+)*+\r\n\r\n"
)
_OF_ONE_HOP = re.compile(  # in a head in lower case
    rb"\r\n(connection|keep-alive|te|trailer|transfer-encoding|upgrade|proxy-[^:\r\n]*"
    rb"|x-gpuinfer-(?:route|used|model))"
    rb"[ \t]*:[ \t]*([^\r\n]*)"
)
_LENGTHS = re.compile(rb"\r\ncontent-length[ \t]*:[ \t]*([^\r\n]*)")
_LENGTH = re.compile(rb"([0-9]{1,18})[ \t]*")
_USUAL = frozenset({b"keep-alive", b"close", b""})


class Broken(Exception):
    """This is not HTTP/1.1, or it cannot be told where its body ends."""


class ResponseHead:
    """`lines` is the status line, for HTTP/1.1, and every header that goes on, without the last CRLF; among them
    Content-Length when there is one. `length` is of the body that follows. `leaving`: a replica of ours takes nothing
    new, and has not looked at the request. `used` and `model`: what it says of the answer for the log and quotas.
    """

    __slots__ = ("events", "keep", "leaving", "length", "lines", "model", "request_id", "status", "used")

    def __init__(self, head: bytes, asked: bytes) -> None:
        """`head` goes up to and with the empty line; `asked` is the method. Raises `Broken`."""
        shape = _SHAPE.fullmatch(head)
        if shape is None:
            raise Broken
        self.status = status = int(shape[2])
        self.keep = shape[1] == b"1"
        self.events = self.request_id = self.leaving = False
        self.used = self.model = b""
        self.length = TO_THE_END
        self.lines = self._read(head)
        if asked == b"HEAD" or status in (204, 304) or status < 200:
            self.length = 0
        elif self.length == TO_THE_END:
            self.keep = False

    def _read(self, head: bytes) -> bytes:
        """Take in the headers that matter; returns the lines that go on."""
        lower = head.lower()
        if b"\r\ncontent-length" in lower:
            self.length = _length(lower)
        self.events = b"\r\ncontent-type: text/event-stream" in lower or b"\r\ncontent-type:text/event-stream" in lower
        self.request_id = b"\r\nx-request-id:" in lower
        if self.status == 503:
            self.leaving = b"\r\nx-gpuinfer-error: closed\r\n" in lower
        found = _OF_ONE_HOP.search(lower)
        if found is None:
            return b"HTTP/1.1" + head[8:-4]
        kept, start = b"HTTP/1.1", 8
        named: set[bytes] = set()
        while found is not None:
            kept += head[start : found.start()]
            start = found.end()
            if found[1] == b"connection":
                named |= self._heed(found[2])
            elif found[1] == b"x-gpuinfer-used":
                self.used = found[2]
            elif found[1] == b"x-gpuinfer-model":
                self.model = head[found.start(2) : found.end(2)]
            elif found[1] == b"transfer-encoding":
                if found[2].rstrip(b" \t") != b"chunked" or self.length != TO_THE_END:
                    raise Broken
                self.length = CHUNKED
            found = _OF_ONE_HOP.search(lower, start)
        kept += head[start:-4]
        return without(kept, named) if named else kept

    def _heed(self, connection: bytes) -> set[bytes]:
        """What Connection says; returns the headers that it lists."""
        if connection == b"keep-alive":
            self.keep = True
            return set()
        tokens = {token.strip() for token in connection.split(b",")}
        self.keep = (self.keep or b"keep-alive" in tokens) and b"close" not in tokens
        return tokens - _USUAL


def _length(lower: bytes) -> int:
    lengths = _LENGTHS.findall(lower)
    size = _LENGTH.fullmatch(lengths[0]) if len(lengths) == 1 else None
    if size is None:
        raise Broken
    return int(size[1])
