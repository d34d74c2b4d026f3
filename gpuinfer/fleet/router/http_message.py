"""HTTP messages on their way through the router: heads of requests and responses with the lines that are passed on
unchanged, and the affinity key of a request. JSON is not parsed.
"""

from __future__ import annotations

import hashlib
import re

from gpuinfer.http.parser import LENGTH_DIGITS, body_length, check_target, join_values, match_head

CHANGES = frozenset({"/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/update_weights", "/v1/free_memory"})

OF_MODELS = frozenset(
    {"/predict", "/tokenize", "/detokenize", "/rerank", "/v2/rerank", "/score"}
)  # in addition to those of a prefix
PREFIXES = ("/v1/", "/v2/models/", "/v2/repository/")  # the last two of KServe's protocol

CHUNKED, UNTIL_CLOSE = -1, -2  # lengths of bodies in chunks, and of bodies that end with their connection
LONGEST_ID = 200  # a longer X-Request-Id is not passed on

_SPECIAL = re.compile(  # headers that the router reads, in a head in lower case
    r"\r\n(host|origin|connection|keep-alive|te|trailer|transfer-encoding|content-(?:length|type)|upgrade"
    r"|proxy-[^:\r\n]*|authorization|expect|x-request-id|x-gpuinfer-[^:\r\n]*):[\t ]*([^\r\n]*)"
)
_PASSED_ON = frozenset(
    {"content-type", "x-gpuinfer-priority", "x-gpuinfer-timeout", "x-gpuinfer-client", "x-gpuinfer-session"}
)
_USUAL = frozenset({"keep-alive", "close", ""})  # tokens of Connection that name no header


class RequestHead:
    """Parsed from a request's head, up to and with the empty line, by the grammar of `http.parser`. Raises `Malformed`.

    `lines` is the request line, for HTTP/1.1, and every header that is passed on unchanged, without the last CRLF: not
    Host, Authorization, Content-Length and X-Request-Id, which each hop sends anew, nor headers of one hop alone.
    `headers` has those that the router reads, as `http.parser.HttpHead` has all.
    """

    __slots__ = (
        "_untraced",
        "after",
        "before",
        "close",
        "expects",
        "headers",
        "length",
        "lines",
        "method",
        "old",
        "request_id",
        "sized",
        "target",
        "to_replicas",
    )

    def __init__(self, head: bytes) -> None:
        shape = match_head(head)
        text = shape.string
        self.old = self.close = shape["minor"] == "0"
        self.before, self.after = head, b""  # of the digits of Content-Length
        self.headers: dict[str, str] = {}
        headers, lines, start = self.headers, "", 0
        for found in _SPECIAL.finditer(text.lower()):
            name, value = found[1], text[found.start(2) : found.end()].rstrip(" \t")
            headers[name] = join_values(headers, name, value) if name in headers else value
            if name in _PASSED_ON:
                continue
            lines += text[start : found.start()]
            start = found.end()
            if name == "content-length":
                self.before, self.after = head[: found.start(2)], head[found.start(2) + len(value) :]
        lines += text[start:-4]
        length = body_length(headers, not self.old)
        self.length = CHUNKED if length is None else length
        self.sized = length is None or "content-length" in headers
        self.expects = "expect" in headers
        self.method, self.target = shape["method"].encode(), shape["target"].encode("latin-1")
        path = check_target(self.target)
        to_model = path.startswith(PREFIXES) and path not in CHANGES  # which concern all replicas
        self.to_replicas = to_model or path in OF_MODELS  # else to the control application
        request_id = headers.get("x-request-id", "").encode("latin-1")
        self.request_id = request_id if len(request_id) <= LONGEST_ID else b""
        if self.old:
            version = len(self.method) + len(self.target) + 9
            lines = lines[:version] + "1" + lines[version + 1 :]
        self.lines = lines.encode("latin-1")
        self._untraced: bytes | None = None
        if "connection" in headers:
            tokens = {token.strip() for token in headers["connection"].lower().split(",")}
            self.close = self.close or "close" in tokens
            if named := tokens - _USUAL:
                self.lines = without_headers(self.lines, {name.encode("latin-1") for name in named})

    @property
    def untraced(self) -> bytes:
        """`lines` without `traceparent`."""
        if self._untraced is None:
            self._untraced = without_headers(self.lines, {b"traceparent"})
        return self._untraced

    def length_in(self, head: bytes) -> int | None:
        """The body's length in another head, if nothing else in it differs from this one: clients tend to repeat
        theirs. None: it differs.
        """
        before, after = self.before, self.after
        if not after:
            return self.length if head == before else None
        if not (head.startswith(before) and head.endswith(after)):
            return None
        digits = head[len(before) : -len(after)]
        return int(digits) if digits.isdigit() and len(digits) <= LENGTH_DIGITS else None


def without_headers(lines: bytes, names: set[bytes]) -> bytes:
    """The lines but those of headers with these names: what Connection lists is for one hop alone (RFC 9110, 7.6.1)."""
    listed = b"|".join(re.escape(name) for name in names)
    return re.sub(rb"\r\n(?:" + listed + rb")[ \t]*:[^\r\n]*", b"", lines, flags=re.IGNORECASE)


_RESPONSE = re.compile(
    rb"HTTP/1\.([01]) ([1-5][0-9][0-9])(?: [^\r\n\0]*+)?(?:\r\n[^\r\n\0\t :][^\r\n\0:]*+:[^\r\n\0]*+)*+\r\n\r\n"
)
_RESPONSE_HOP = re.compile(  # in a head in lower case
    rb"\r\n(connection|keep-alive|te|trailer|transfer-encoding|upgrade|proxy-[^:\r\n]*"
    rb"|x-gpuinfer-(?:route|used|model))"
    rb"[ \t]*:[ \t]*([^\r\n]*)"
)
_LENGTH_LINES = re.compile(rb"\r\ncontent-length[ \t]*:[ \t]*([^\r\n]*)")
_LENGTH = re.compile(rb"([0-9]{1,18})[ \t]*")


class BrokenResponse(Exception):
    """What came is not HTTP/1.1, or the end of its body cannot be told."""


class ResponseHead:
    """A replica's response. `lines` is the status line, for HTTP/1.1, and every header that is passed on, without the
    last CRLF; among them Content-Length when there is one. `length` is of the body that follows. `leaving`: a replica
    of ours that drains has refused the request unread. `used` and `model`: tokens and model, for the log and quotas.
    """

    __slots__ = ("events", "keep", "leaving", "length", "lines", "model", "request_id", "status", "used")

    def __init__(self, head: bytes, method: bytes) -> None:
        """`head` goes up to and with the empty line; `method` is the request's. Raises `BrokenResponse`."""
        shape = _RESPONSE.fullmatch(head)
        if shape is None:
            raise BrokenResponse
        self.status = status = int(shape[2])
        self.keep = shape[1] == b"1"
        self.events = self.request_id = self.leaving = False
        self.used = self.model = b""
        self.length = UNTIL_CLOSE
        self.lines = self._read(head)
        if method == b"HEAD" or status in (204, 304) or status < 200:
            self.length = 0
        elif self.length == UNTIL_CLOSE:
            self.keep = False

    def _read(self, head: bytes) -> bytes:
        """Read the headers that matter; returns the lines that are passed on."""
        lower = head.lower()
        if b"\r\ncontent-length" in lower:
            lengths = _LENGTH_LINES.findall(lower)
            size = _LENGTH.fullmatch(lengths[0]) if len(lengths) == 1 else None
            if size is None:
                raise BrokenResponse
            self.length = int(size[1])
        self.events = b"\r\ncontent-type: text/event-stream" in lower or b"\r\ncontent-type:text/event-stream" in lower
        self.request_id = b"\r\nx-request-id:" in lower
        if self.status == 503:
            self.leaving = b"\r\nx-gpuinfer-error: closed\r\n" in lower
        found = _RESPONSE_HOP.search(lower)
        if found is None:
            return b"HTTP/1.1" + head[8:-4]
        kept, start = b"HTTP/1.1", 8
        named: set[bytes] = set()
        while found is not None:
            kept += head[start : found.start()]
            start = found.end()
            if found[1] == b"connection":
                tokens = {token.strip() for token in found[2].split(b",")}
                self.keep = (self.keep or b"keep-alive" in tokens) and b"close" not in tokens
                named |= tokens - {b"keep-alive", b"close", b""}
            elif found[1] == b"x-gpuinfer-used":
                self.used = found[2]
            elif found[1] == b"x-gpuinfer-model":
                self.model = head[found.start(2) : found.end(2)]
            elif found[1] == b"transfer-encoding":
                if found[2].rstrip(b" \t") != b"chunked" or self.length != UNTIL_CLOSE:
                    raise BrokenResponse
                self.length = CHUNKED
            found = _RESPONSE_HOP.search(lower, start)
        kept += head[start:-4]
        return without_headers(kept, named) if named else kept


PREFIX = 1024  # bytes of the prompt
EDGE = 4096  # bytes of a body, from its start and from its end, in which its user is looked for

# Within a string of JSON a quotation mark follows a backslash, so that `"user":` is a key wherever it stands.
_USER = re.compile(rb'"user"\s*:\s*"([^"\\]{1,256})"')
_PROMPT = re.compile(rb'"(?:messages|prompt|input)"\s*:\s*')


def affinity_of(head: RequestHead, body: bytes) -> bytes | None:
    """The session in the header; else the user in the body; else a hash of the prompt's first KB."""
    if session := head.headers.get("x-gpuinfer-session"):
        return session.encode("latin-1")
    user = _USER.search(body, 0, EDGE) or (_USER.search(body, len(body) - EDGE) if len(body) > EDGE else None)
    if user is not None:
        return user[1]
    prompt = _PROMPT.search(body, 0, EDGE) or _PROMPT.search(body)
    if prompt is None:
        return None
    return hashlib.blake2b(body[prompt.end() : prompt.end() + PREFIX], digest_size=8).digest()
