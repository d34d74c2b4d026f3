"""One connection to a replica: sends a request, finds the end of its answer, and is used again."""

from __future__ import annotations

import asyncio
from typing import Protocol, cast

from gpuinfer.fleet.router.chunks import BadChunk, ChunkReader
from gpuinfer.fleet.router.response_head import CHUNKED, Broken, ResponseHead
from gpuinfer.http.departures import leave

LONGEST_HEAD = 64 << 10
INTERIM = 8  # answers of 1xx before the real one

_HEAD, _SIZED, _CHUNKS, _OPEN_END = range(4)


class Traveller(Protocol):
    """A request under way, as the connection that carries it sees it."""

    method: bytes

    def answered(self, head: ResponseHead) -> None:
        """The answer's head is here."""

    def answered_whole(self, head: ResponseHead, body: bytes) -> None:
        """`answered`, `content` and `ended` in one, of an answer that came in one piece."""

    def content(self, data: bytes, plain: bool) -> None:
        """Some of its body. `plain`: it stands in whole chunks in the bytes last received, which are `received`."""

    def trailer(self, lines: bytes) -> None:
        """What follows a body in chunks."""

    def ended(self) -> None:
        """The answer is whole. The link is free again by now, or closed."""

    def lost(self, kind: str) -> None:
        """No more of it will come over this link, which is closed."""


class Home(Protocol):
    """Where links are kept while nobody travels."""

    def take_back(self, link: Link) -> None: ...

    def gone(self, link: Link) -> None: ...


class Link(asyncio.Protocol):
    """The replica's side of the relay."""

    __slots__ = (
        "_chunks",
        "_head",
        "_home",
        "_interim",
        "_last_head",
        "_last_method",
        "_last_raw",
        "_left",
        "_part",
        "_state",
        "_transport",
        "heard",
        "idle_since",
        "is_open",
        "received",
        "reused",
        "traveller",
    )

    def __init__(self, home: Home) -> None:
        self._home = home
        self._transport = cast(asyncio.Transport, None)
        self._state, self._left, self._part, self._interim = _HEAD, 0, b"", 0
        self._chunks: ChunkReader | None = None
        self._head: ResponseHead | None = None
        self._last_raw = self._last_method = b""  # of the head before, and what it was read as
        self._last_head = cast(ResponseHead, None)
        self.traveller: Traveller | None = None
        self.is_open = False
        self.reused = False  # it has carried a request before
        self.heard = False  # whether anything of the answer has come
        self.received = b""  # the latest piece, as it came
        self.idle_since = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.is_open = True

    def carry(self, traveller: Traveller, message: bytes) -> None:
        """Send a request; its answer goes to the traveller."""
        self.traveller = traveller
        self.heard = False
        self._transport.write(message)

    def data_received(self, data: bytes) -> None:
        traveller = self.traveller
        if traveller is None:  # nobody asked
            self._transport.abort()
            return
        self.heard = True
        self.received = data
        try:
            if self._state == _HEAD:
                rest = self._take_head(traveller, self._part + data if self._part else data)
                if rest is None:
                    return
                data = rest
                if self.traveller is not traveller:  # it has had enough
                    return
            self._take_body(traveller, data)
        except (Broken, BadChunk):
            self._break("broken")

    def _take_head(self, traveller: Traveller, data: bytes) -> bytes | None:
        """What follows the head; None while that is not whole, or when nothing follows."""
        while True:
            end = data.find(b"\r\n\r\n") + 4
            if end < 4:
                if len(data) > LONGEST_HEAD or not data.startswith(b"HTTP/1."[: len(data)]):
                    raise Broken
                self._part = data
                return None
            head = self._read_head(data[:end], traveller.method)
            if head.status >= 200:
                break
            data = data[end:]
            self._interim += 1
            if head.status == 101 or self._interim > INTERIM:
                raise Broken
            if not data:
                self._part = b""
                return None
        self._part = b""
        self._head = head
        if head.length == len(data) - end:
            self._release()
            traveller.answered_whole(head, data[end:])
            return None
        if head.length >= 0:
            self._state, self._left = _SIZED, head.length
        elif head.length == CHUNKED:
            self._state, self._chunks = _CHUNKS, ChunkReader()
        else:
            self._state = _OPEN_END
        traveller.answered(head)
        return data[end:] if end < len(data) else None

    def _read_head(self, raw: bytes, method: bytes) -> ResponseHead:
        """Heads of answers that come within one second are often the same bytes: read once."""
        if raw == self._last_raw and method == self._last_method:
            return self._last_head
        self._last_head = head = ResponseHead(raw, method)
        self._last_raw, self._last_method = raw, method
        return head

    def _take_body(self, traveller: Traveller, data: bytes) -> None:
        if self._state == _SIZED:
            self._left -= len(data)
            if self._left < 0:
                raise Broken
            if data:
                traveller.content(data, False)
            if not self._left:
                self._finish(traveller)
        elif self._chunks is not None:
            chunks = self._chunks
            content = chunks.feed(data)
            if content:
                traveller.content(content, chunks.plain and data is self.received)
            if chunks.done and self.traveller is traveller:
                if chunks.rest:
                    raise Broken
                if chunks.trailer:
                    traveller.trailer(chunks.trailer)
                self._finish(traveller)
        else:
            traveller.content(data, False)

    def _finish(self, traveller: Traveller) -> None:
        self._release()
        traveller.ended()

    def _release(self) -> None:
        """The answer is whole: be free for another, if that can be."""
        head, self._head, self._chunks = self._head, None, None
        self._state, self._interim = _HEAD, 0
        self.traveller, self.received, self.reused = None, b"", True
        if head is None or not head.keep or self._transport.get_write_buffer_size():
            self._close()  # the last: it has answered before it had the whole request
        else:
            self._home.take_back(self)

    def _break(self, kind: str) -> None:
        traveller, self.traveller = self.traveller, None
        self._close(abort=True)
        if traveller is not None:
            traveller.lost(kind)

    def drop(self) -> None:
        """Nobody wants the answer any more: the replica sees that its client has gone."""
        self.traveller = None
        self._close(abort=True)

    def _close(self, abort: bool = False) -> None:
        if self.is_open:
            self.is_open = False
            self._home.gone(self)
        leave(self._transport) if abort else self._transport.close()

    def pause(self) -> None:
        """Read no more for now."""
        if self.is_open:
            self._transport.pause_reading()

    def resume(self) -> None:
        if self.is_open:
            self._transport.resume_reading()

    def connection_lost(self, error: Exception | None) -> None:
        was_open, self.is_open = self.is_open, False
        if was_open:
            self._home.gone(self)
        traveller, self.traveller = self.traveller, None
        if traveller is None:
            return
        if self._state == _OPEN_END and error is None:
            traveller.ended()
        else:
            traveller.lost("reset")
