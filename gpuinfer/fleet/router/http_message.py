"""HTTP messages on their way through the router: heads of requests and responses with the lines that go on unchanged,
bodies in chunks (RFC 9112, 7.1), and the affinity key of a request. Chunks are read strictly, so that no two hops
can differ about where one ends. JSON is not parsed.
"""

from __future__ import annotations

import hashlib
import re
from typing import NoReturn

from gpuinfer.http.parser import LENGTH_DIGITS, METHODS, Malformed, check_head, check_target

CHANGES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/update_weights"})  # of weights

CHUNKED, TO_THE_END = (
    -1,
    -2,
)  # lengths of bodies whose chunks say where they end, or that last until the connection ends
LONGEST_ID = 200  # a longer X-Request-Id is not passed on
PLAIN = 8 << 10  # bytes of a head that breaks no limit of lines and headers, unless there are many
MOST_LINES = 100

# What `http.strict` lets pass, so far as the shape of lines tells; the few headers that decide about framing are looked
# at below, and the others never one by one.
_REQUEST_SHAPE = re.compile(
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
_REQUEST_LENGTH = re.compile(rb"[0-9]{1,%d}" % LENGTH_DIGITS)
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
        shape = _REQUEST_SHAPE.fullmatch(head)
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
                if not _REQUEST_LENGTH.fullmatch(value):
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
        return without_headers(lines, named) if named else lines

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


def without_headers(lines: bytes, names: set[bytes]) -> bytes:
    """The lines but those of headers with these names: what Connection lists is for one hop alone (RFC 9110, 7.6.1)."""
    listed = b"|".join(re.escape(name) for name in names)
    return re.sub(rb"\r\n(?:" + listed + rb")[ \t]*:[^\r\n]*", b"", lines, flags=re.IGNORECASE)


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


class BrokenResponse(Exception):
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
            raise BrokenResponse
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
                    raise BrokenResponse
                self.length = CHUNKED
            found = _OF_ONE_HOP.search(lower, start)
        kept += head[start:-4]
        return without_headers(kept, named) if named else kept

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
        raise BrokenResponse
    return int(size[1])


PREFIX = 1024  # bytes of the prompt
EDGE = 4096  # bytes of a body, from its start and from its end, in which its user is looked for

# Within a string of JSON a quotation mark follows a backslash, so that `"user":` is a key wherever it stands.
_USER = re.compile(rb'"user"\s*:\s*"([^"\\]{1,256})"')
_PROMPT = re.compile(rb'"(?:messages|prompt|input)"\s*:\s*')


def affinity_of(head: RequestHead, body: bytes) -> bytes | None:
    """The session that the header names; else the user that the body names; else a hash of how its prompt begins."""
    if head.session:
        return head.session
    user = _USER.search(body, 0, EDGE) or (_USER.search(body, len(body) - EDGE) if len(body) > EDGE else None)
    if user is not None:
        return user[1]
    prompt = _PROMPT.search(body, 0, EDGE) or _PROMPT.search(body)
    if prompt is None:
        return None
    return hashlib.blake2b(body[prompt.end() : prompt.end() + PREFIX], digest_size=8).digest()


LAST = b"0\r\n\r\n"
LONGEST_TRAILER = 8 << 10

_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})\r\n")
_LONGEST_SIZE = 17
_IN_SIZE, _IN_DATA, _AFTER_DATA, _IN_TRAILER = range(4)


class BadChunk(Exception):
    """No chunks; an extension of a chunk counts as that, too."""


class ChunkReader:
    """Takes a body's bytes in pieces as they come, gives the content in them.

    When `done`, `rest` is what came after the body. `plain` says of the last piece that it was whole chunks from its
    first byte to its last, so that it can go on as it is. Trailers do not go on.
    """

    __slots__ = ("_left", "_part", "_state", "_trailer", "done", "plain", "rest", "trailer")

    def __init__(self) -> None:
        self._state, self._left, self._part, self._trailer = _IN_SIZE, 0, b"", 0
        self.done = self.plain = False
        self.rest = b""
        self.trailer = b""  # its lines

    def feed(self, data: bytes) -> bytes:
        """The content in this piece; raises `BadChunk`."""
        started = self._state == _IN_SIZE and not self._part
        if self._part:
            data, self._part = self._part + data, b""
        at, end, content = 0, len(data), []
        while at < end and not self.done:
            if self._state == _IN_SIZE:
                size = _SIZE.match(data, at)
                if size is None:
                    self._keep(data, at)
                    break
                at, self._left = size.end(), int(size[1], 16)
                self._state = _IN_DATA if self._left else _IN_TRAILER
            elif self._state == _IN_DATA:
                piece = data[at : at + self._left]
                content.append(piece)
                at += len(piece)
                self._left -= len(piece)
                if not self._left:
                    self._state = _AFTER_DATA
            elif self._state == _AFTER_DATA:
                if end - at < 2 and data[at:] == b"\r":
                    self._part = b"\r"
                    break
                if data[at : at + 2] != b"\r\n":
                    raise BadChunk
                at, self._state = at + 2, _IN_SIZE
            else:
                at = self._skip_trailer(data, at)
        self.plain = started and self._state == _IN_SIZE and not self._part
        return content[0] if len(content) == 1 else b"".join(content)

    def _keep(self, data: bytes, at: int) -> None:
        """The beginning of a line that says a size."""
        self._part = data[at:]
        if len(self._part) > _LONGEST_SIZE or not re.fullmatch(rb"[0-9A-Fa-f]{1,15}\r?", self._part):
            raise BadChunk

    def _skip_trailer(self, data: bytes, at: int) -> int:
        line_end = data.find(b"\r\n", at)
        if line_end < 0:
            self._part = data[at:]
            if len(self._part) + self._trailer > LONGEST_TRAILER:
                raise BadChunk
            return len(data)
        self._trailer += line_end - at
        if self._trailer > LONGEST_TRAILER or b"\n" in data[at:line_end]:
            raise BadChunk
        if line_end == at:
            self.done, self.rest = True, data[at + 2 :]
        else:
            self.trailer += data[at : line_end + 2]
        return line_end + 2


def encode_chunk(data: bytes) -> bytes:
    """One chunk; never of no bytes, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
