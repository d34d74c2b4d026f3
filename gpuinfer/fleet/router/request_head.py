"""The head of a client's request: what of it matters here, and the lines that go on to a replica as they came."""

from __future__ import annotations

import re

from gpuinfer.http.strict import check_target

CHUNKED = -1  # the length of a body that says itself where it ends
LONGEST_ID = 200  # a longer X-Request-Id is not passed on

# In one pass over the whole head; all other lines are never looked at.
_SPECIAL = re.compile(
    rb"\r\n(host|origin|connection|keep-alive|te|trailer|transfer-encoding|content-length|upgrade|proxy-[^:\r\n]*"
    rb"|authorization|expect|x-request-id|x-gpuinfer-[^:\r\n]*):[ \t]*([^\r\n]*)",
    re.IGNORECASE,
)
_KEPT = frozenset({b"x-gpuinfer-priority", b"x-gpuinfer-timeout", b"x-gpuinfer-client", b"x-gpuinfer-session"})
_USUAL = frozenset({b"keep-alive", b"close", b""})  # tokens of Connection that name no header


class RequestHead:
    """Read from bytes that `http.strict.check_head` has found in order, up to and with the empty line.

    `lines` is the request line, for HTTP/1.1, and every header that goes on as it is, without the last CRLF: not Host,
    Authorization, Content-Length and X-Request-Id, which each hop sends anew, nor what concerns this hop alone.
    """

    __slots__ = (
        "authorization",
        "close",
        "expects",
        "host",
        "length",
        "lines",
        "method",
        "old",
        "origin",
        "request_id",
        "session",
        "sized",
        "target",
        "to_replicas",
    )

    def __init__(self, head: bytes) -> None:
        first = head[: head.index(b"\r\n")]
        self.method, self.target, version = first.split(b" ")
        self.old = version == b"HTTP/1.0"
        self.close = self.old
        path = check_target(self.target)
        self.to_replicas = path.startswith("/v1/") or path == "/predict"  # else to the control application
        self.expects = self.sized = False
        self.length = 0
        self.host: bytes | None = None
        self.origin = self.authorization = self.request_id = self.session = self.host
        kept: list[bytes] = []
        named: list[bytes] = []
        start = 0
        for found in _SPECIAL.finditer(head):
            name, value = found[1].lower(), found[2].rstrip()
            if name in _KEPT:
                if name == b"x-gpuinfer-session":
                    self.session = value
                continue
            kept.append(head[start : found.start()])
            start = found.end()
            if name == b"content-length":
                self.length, self.sized = int(value), True
            elif name == b"transfer-encoding":
                self.length, self.sized = CHUNKED, True
            elif name == b"host":
                self.host = value
            elif name == b"authorization":
                self.authorization = value
            elif name == b"origin":
                self.origin = value
            elif name == b"x-request-id":
                self.request_id = value if 0 < len(value) <= LONGEST_ID else None
            elif name == b"expect":
                self.expects = value.lower() == b"100-continue"
            elif name == b"connection":
                tokens = {token.strip() for token in value.lower().split(b",")}
                self.close = self.close or b"close" in tokens
                named += tokens - _USUAL
        kept.append(head[start:-4])
        self.lines = b"".join(kept)
        if self.old:
            self.lines = first[:-1] + b"1" + self.lines[len(first) :]
        if named:
            self.lines = without(self.lines, named)


def without(lines: bytes, names: list[bytes]) -> bytes:
    """The lines but those of headers with these names: what Connection lists is for one hop alone (RFC 9110, 7.6.1)."""
    listed = b"|".join(re.escape(name) for name in names)
    return re.sub(rb"\r\n(?:" + listed + rb")[ \t]*:[^\r\n]*", b"", lines, flags=re.IGNORECASE)
