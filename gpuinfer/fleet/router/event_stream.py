"""A relayed stream of server-sent events: only whole events go out, and what went out is kept, within a byte budget, to
resume at another replica. A replica of ours puts `id: SAMPLE.TOKEN,TOKEN,…` before each event with the tokens that
it carries, and `!` behind them in the last of its sample. They are read only when the replica is lost. An event that
begins with the comment `: more` goes out with the one after it or not at all; `id: 999999999.NUMBER` tells an event's
own number, where clients read those.
"""

from __future__ import annotations

import re

import msgspec


class ByteBudget:
    """Some bytes, taken and given back."""

    __slots__ = ("left",)

    def __init__(self, size: int) -> None:
        self.left = size

    def take(self, size: int) -> bool:
        """Whether there were so many."""
        if size > self.left:
            return False
        self.left -= size
        return True

    def give(self, size: int) -> None:
        self.left += size


SEQUENCE = 999_999_999  # in a sample's place: what follows is the number of the event
MORE = b": more\n"
_ID = re.compile(rb"(?:^|\n)id: ?([0-9]{1,9})\.([0-9,]*)(!?)\r?(?=\n)")


def _settled(data: bytes, end: int) -> int:
    """Where the last of these events ends that does not wait for the one after it."""
    while end:
        before = data.rfind(b"\n\n", 0, end - 2)
        start = before + 2 if before >= 0 else 0
        if not data.startswith(MORE, start):
            return end
        end = start
    return 0


class RelayedEvents:
    """The events of one stream, from any number of replicas in turn."""

    __slots__ = ("_kept", "_limit", "_numbered", "_part", "_room", "_size", "ended", "moved", "sent")

    def __init__(self, limit: int, room: ByteBudget) -> None:
        """Keeps up to `limit` bytes as far as there is room; 0 for a stream that cannot go on elsewhere once begun."""
        self._limit, self._room = limit, room
        self._kept: list[bytes] | None = []
        self._size = 0
        self._part = b""
        self._numbered = False  # whether any event says the tokens in it: others cannot go on elsewhere
        self.sent = False  # whether any event went out
        self.moved = False  # whether any did since the last restart
        self.ended = False  # whether the last of them did

    def take(self, data: bytes) -> bytes:
        """The whole events that this piece completes."""
        if self._part:
            data = self._part + data
        end = len(data)
        if not data.endswith((b"\n\n", b"\n\r\n")):  # else behind the last empty line, with LF or CRLF
            end = max(data.rfind(b"\n\n") + 2, data.rfind(b"\n\r\n") + 3)
            end = end if b"\n\n" in data or b"\n\r\n" in data else 0
        if MORE in data:
            end = _settled(data, end)
        whole, self._part = (data, b"") if end == len(data) else (data[:end], data[end:])
        if whole:
            self._note(whole)
        return whole

    def _note(self, whole: bytes) -> None:
        self.sent = self.moved = True
        self._numbered = self._numbered or whole.startswith(b"id:") or b"\nid:" in whole
        self.ended = whole.endswith((b"data: [DONE]\n\n", b"data: [DONE]\r\n\r\n"))
        if self._kept is not None:
            size = len(whole)
            if self._size + size <= self._limit and self._room.take(size):
                self._size += size
                self._kept.append(whole)
            else:
                self.forget()

    def forget(self) -> None:
        """What was kept is needed no more, or has no room."""
        self._room.give(self._size)
        self._size, self._kept = 0, None

    def restart(self) -> None:
        """Go on with another replica's events: the part of one that came from the last replica is void."""
        self._part, self.moved = b"", False

    def tokens(self) -> int:
        """How many were sent, of a stream that is kept."""
        found = _ID.finditer(b"".join(self._kept or ()))
        return sum(one[2].count(b",") + bool(one[2]) for one in found if int(one[1]) != SEQUENCE)

    @property
    def resumable(self) -> bool:
        return not self.sent or (self._kept is not None and self._numbered)

    def begun(self) -> bytes:
        """What goes before the body of the request that is sent to another replica; empty when nothing went out."""
        samples: dict[str, dict[str, object]] = {}
        for found in _ID.finditer(b"".join(self._kept or ())):
            sample = samples.setdefault(found[1].decode(), {"tokens": [], "ended": False})
            tokens = sample["tokens"]
            if isinstance(tokens, list):
                tokens += [int(token) for token in found[2].split(b",") if token]
            sample["ended"] = sample["ended"] or bool(found[3])
        return msgspec.json.encode(samples) if samples else b""
