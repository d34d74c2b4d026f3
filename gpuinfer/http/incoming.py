"""What a client sends, taken apart as it arrives: heads and bodies in turn. No I/O and no clock."""

from __future__ import annotations

from gpuinfer.http import diagnosis
from gpuinfer.http.chunked import ChunkedBody
from gpuinfer.http.limits import HttpLimits
from gpuinfer.http.strict import Head, parse_head


class Incoming:
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

    def head(self) -> Head | None:
        """The next request's head, once it is all there. What can be refused before that is refused."""
        data, limits = self.buffer, self._limits
        end = data.find(b"\r\n\r\n", max(0, self._scanned - 3)) + 4
        if 4 <= end <= limits.head_bytes:
            head = parse_head(data[:end], limits)
            self.buffer = data[end:]
            self._scanned = 0
            return head
        if diagnosis.early(data, self._scanned, limits):
            raise diagnosis.of(data, limits)
        self._scanned = len(data)
        return None

    def expect(self, head: Head) -> None:
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
