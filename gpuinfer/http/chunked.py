"""Bodies in chunks, as they come: RFC 9112 7.1 without extensions and without trailers."""

from __future__ import annotations

import re

from gpuinfer.http.malformed import Malformed

CHUNKS = 1 << 16  # of one body: a byte in each would cost far more time than memory
_SIZE = re.compile(rb"[0-9A-Fa-f]{1,8}")
SIZE_LINE = 10


class ChunkedBody:
    """Takes a body apart as it arrives. `size` is what has come of it, in bytes."""

    __slots__ = ("_chunks", "_last", "_left", "_limit", "_rest", "complete", "parts", "size")

    def __init__(self, limit: int) -> None:
        self.parts: list[bytes] = []
        self.size = 0
        self.complete = False
        self._last = False  # the present chunk is the last one
        self._limit = limit
        self._rest = b""  # what is not yet a whole size line, or a whole line end
        self._left = -1  # of the present chunk, its line end counted; -1: a size line comes
        self._chunks = 0

    def feed(self, data: bytes) -> bytes:
        """Take bytes; returns those after the body's end. Raises `Malformed`."""
        data, self._rest = self._rest + data, b""
        at = 0
        while at < len(data):
            if self._left < 0:
                end = data.find(b"\r\n", at, at + SIZE_LINE)
                if end < 0:
                    _check_partial_size(data[at : at + SIZE_LINE])
                    self._rest = data[at:]
                    return b""
                at = self._begin(data, at, end)
                continue
            if self._left > 2:
                part = data[at : at + self._left - 2]
                self.parts.append(part)
                self.size += len(part)
                self._left -= len(part)
                at += len(part)
                continue
            if not b"\r\n".startswith(data[at : at + 2]):
                raise Malformed(400, "a chunk that is longer than it says, or a trailer.")
            if len(data) - at < 2:
                self._rest = data[at:]
                return b""
            at += 2
            self._left = -1
            if self._last:
                self.complete = True
                return data[at:]
        return b""

    def _begin(self, data: bytes, at: int, end: int) -> int:
        size = data[at:end]
        if not _SIZE.fullmatch(size):
            raise Malformed(400, "a chunk whose size is no plain hexadecimal number. Extensions are not taken.")
        length = int(size, 16)
        self._chunks += 1
        if self.size + length > self._limit:
            raise Malformed(413, f"a body of more than {self._limit:,} bytes.")
        if self._chunks > CHUNKS:
            raise Malformed(413, f"a body of more than {CHUNKS:,} chunks. Send larger ones.")
        self._last = length == 0
        self._left = length + 2
        return end + 2


def _check_partial_size(part: bytes) -> None:
    if not re.fullmatch(rb"[0-9A-Fa-f]{0,8}\r?", part) or part.startswith(b"\r"):
        raise Malformed(400, "a chunk whose size is no plain hexadecimal number. Extensions are not taken.")
