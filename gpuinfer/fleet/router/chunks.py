"""Bodies in chunks (RFC 9112, 7.1): read strictly, so that no two hops can differ about where one ends."""

from __future__ import annotations

import re

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


def chunk(data: bytes) -> bytes:
    """One chunk; never of no bytes, which would end the body."""
    return b"%x\r\n%b\r\n" % (len(data), data)
