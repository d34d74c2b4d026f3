"""The head of a client's request: what of it matters here, and the lines that go on to a replica as they came."""

from __future__ import annotations

import re
from typing import NoReturn

from gpuinfer.http.strict import LENGTH_DIGITS, METHODS, Malformed, check_head, check_target

CHANGES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/update_weights"})  # of weights

CHUNKED = -1  # the length of a body that says itself where it ends
LONGEST_ID = 200  # a longer X-Request-Id is not passed on
PLAIN = 8 << 10  # bytes of a head that breaks no limit of lines and headers, unless there are many
MOST_LINES = 100

# What `http.strict` lets pass, so far as the shape of lines tells; the few headers that decide about framing are looked
# at below, and the others never one by one.
_SHAPE = re.compile(
    rb"(?P<method>[A-Z]++) (?P<target>/[!\"$-~]*+) HTTP/1\.(?P<minor>[01])"
    rb"(?:\r\n[!#$%&'*+\-.^_`|~0-9A-Za-z]++:[\t\x20-\x7e\x80-\xff]*+)*+\r\n\r\n"
)
_SPECIAL = re.compile(  # in a head in lower case
    rb"\r\n(host|origin|connection|keep-alive|te|trailer|transfer-encoding|content-(?:length|type)|upgrade"
    rb"|proxy-[^:\r\n]*|authorization|expect|x-request-id|x-gpuinfer-[^:\r\n]*):[\t ]*([^\r\n]*)"
)
_ONCE = frozenset(
    {b"host", b"content-length", b"transfer-encoding", b"authorization", b"content-type", b"expect", b"origin"}
)
_HOST = re.compile(rb"(?:[A-Za-z0-9._~!$&'()*+;=%-]*+|\[[0-9A-Fa-f:.]++\])(?::[0-9]{0,5})?")
_LENGTH = re.compile(rb"[0-9]{1,%d}" % LENGTH_DIGITS)
_STAYS = frozenset({b"content-type", b"x-gpuinfer-priority", b"x-gpuinfer-timeout", b"x-gpuinfer-client"})
_USUAL = frozenset({b"keep-alive", b"close", b""})  # tokens of Connection that name no header
_METHODS = frozenset(method.encode() for method in METHODS)


class RequestHead:
    """Read from a raw head, up to and with the empty line; raises `Malformed` for all that `http.strict` refuses.

    `lines` is the request line, for HTTP/1.1, and every header that goes on as it is, without the last CRLF: not Host,
    Authorization, Content-Length and X-Request-Id, which each hop sends anew, nor what concerns this hop alone.
    """

    __slots__ = (
        "after",
        "authorization",
        "before",
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
        shape = _SHAPE.fullmatch(head)
        if shape is None or len(head) > PLAIN or head.count(b"\r\n") > MOST_LINES:
            check_head(head)
        if shape is None or shape["method"] not in _METHODS:
            _refuse(head)
        self.method, self.target = shape["method"], shape["target"]
        self.old = self.close = shape["minor"] == b"0"
        self.expects = self.sized = False
        self.length = 0
        self.before, self.after = head, b""  # of the digits of Content-Length
        self.host: bytes | None = None
        self.origin: bytes | None = None
        self.authorization: bytes | None = None
        self.request_id: bytes | None = None
        self.session: bytes | None = None
        self.lines = self._read(head)
        path = check_target(self.target)  # after the headers, as `http.strict` does: of two faults both name one
        to_model = path.startswith("/v1/") and path not in CHANGES  # of all replicas, not of one
        self.to_replicas = to_model or path == "/predict"  # else to the control application
        if self.old:
            version = len(self.method) + len(self.target) + 9
            self.lines = self.lines[:version] + b"1" + self.lines[version + 1 :]

    def length_in(self, head: bytes) -> int | None:
        """The body's length that another head says, if nothing else in it differs: clients tend to repeat theirs."""
        before, after = self.before, self.after
        if not after:
            return self.length if head == before else None
        if not (head.startswith(before) and head.endswith(after)):
            return None
        digits = head[len(before) : -len(after)]
        return int(digits) if digits.isdigit() and len(digits) <= LENGTH_DIGITS else None

    def _read(self, head: bytes) -> bytes:
        """Take in the headers that matter; returns the lines that go on."""
        kept: list[bytes] = []
        seen: list[bytes] = []
        named: set[bytes] = set()
        start = 0
        for found in _SPECIAL.finditer(head.lower()):
            name = found[1]
            seen.append(name)
            if name in _STAYS:
                continue
            value = head[found.start(2) : found.end()].rstrip(b" \t")
            if name == b"x-gpuinfer-session":
                self.session = value
                continue
            kept.append(head[start : found.start()])
            start = found.end()
            if name == b"host":
                self.host = value
            elif name == b"content-length":
                if not _LENGTH.fullmatch(value):
                    _refuse(head)
                self.length, self.sized = int(value), True
                self.before, self.after = head[: found.start(2)], head[found.start(2) + len(value) :]
            elif name == b"transfer-encoding":
                if value.lower() != b"chunked" or self.old:
                    _refuse(head)
                self.length, self.sized = CHUNKED, True
            elif name == b"authorization":
                self.authorization = value
            elif name == b"origin":
                self.origin = value
            elif name == b"x-request-id":
                self.request_id = value if 0 < len(value) <= LONGEST_ID else None
            elif name == b"expect":
                if value.lower() != b"100-continue":
                    _refuse(head)
                self.expects = True
            elif name == b"connection":
                tokens = {token.strip() for token in value.lower().split(b",")}
                self.close = self.close or b"close" in tokens
                named |= tokens - _USUAL
        self._agree(head, seen)
        kept.append(head[start:-4])
        lines = b"".join(kept)
        return without(lines, named) if named else lines

    def _agree(self, head: bytes, seen: list[bytes]) -> None:
        """Refuse what two programs could read in two ways."""
        if len(set(seen)) < len(seen) and any(seen.count(name) > 1 for name in _ONCE):
            _refuse(head)
        if b"transfer-encoding" in seen and b"content-length" in seen:
            _refuse(head)
        if self.host is None:
            if not self.old:
                _refuse(head)
        elif not _HOST.fullmatch(self.host):
            _refuse(head)


def _refuse(head: bytes) -> NoReturn:
    """Have `http.strict` say why."""
    check_head(head)
    raise Malformed(400, "a head that can be read in two ways. Send each header once.")


def without(lines: bytes, names: set[bytes]) -> bytes:
    """The lines but those of headers with these names: what Connection lists is for one hop alone (RFC 9110, 7.6.1)."""
    listed = b"|".join(re.escape(name) for name in names)
    return re.sub(rb"\r\n(?:" + listed + rb")[ \t]*:[^\r\n]*", b"", lines, flags=re.IGNORECASE)
