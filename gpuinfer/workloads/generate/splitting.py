"""Cuts a stream of bytes into rows: the lines of JSONL, or the elements of one JSON array. Memory is bounded.

Nothing is decoded here. A row that is longer than `most` bytes is passed over as it streams by, and known by its hash.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Protocol

MOST_BYTES = 16 << 20  # of one row: some millions of tokens
BOM = b"\xef\xbb\xbf"
SPACE = b" \t\r\n"
INSIDE, OUTSIDE = re.compile(rb'["\\]'), re.compile(rb'["\[\]{},]')


@dataclass(frozen=True, slots=True)
class Unusable:
    """What stands where a row should be and cannot be read. `content` tells it from others."""

    why: str
    content: bytes


Piece = bytes | Unusable


class Splitter(Protocol):
    """Takes bytes as they come, and gives the rows that have become whole."""

    def feed(self, data: bytes) -> list[Piece]: ...

    def end(self) -> list[Piece]:
        """What is left when no more bytes come."""
        ...


class Hold:
    """The part of a row that has come so far; of one that is too long only its hash."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._parts: list[bytes] = []
        self.size = 0
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, data: bytes) -> None:
        self.size += len(data)
        if self._parts and self.size > self._most:
            for part in self._parts:
                self._hash.update(part)
            self._parts.clear()
        if self.size > self._most:
            self._hash.update(data)
        elif data:
            self._parts.append(data)

    def take(self) -> Piece:
        """The row, and room for the next."""
        size, piece = self.size, b"".join(self._parts)
        found: Piece = piece if size <= self._most else Unusable(self._too_long(), self._hash.digest())
        self.__init__(self._most)  # type: ignore[misc]
        return found

    def _too_long(self) -> str:
        return f"the row has {self.size:,} bytes, and {self._most:,} are the most. Split its prompt."


class Lines:
    """JSON Lines; blank lines are no rows."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._hold = Hold(most)

    def feed(self, data: bytes) -> list[Piece]:
        first, *others = data.split(b"\n")
        self._hold.add(first)
        if not others:
            return []
        last = others.pop()
        rows = [self._hold.take(), *others]
        self._hold.add(last)
        return [row for row in rows if not isinstance(row, bytes) or row.strip(SPACE)]

    def end(self) -> list[Piece]:
        last = self._hold.take()
        return [last] if not isinstance(last, bytes) or last.strip(SPACE) else []


class Elements:
    """The elements of one JSON array, told apart by brackets, braces and commas outside of strings.

    The first byte is the array's own bracket.
    """

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._hold = Hold(most)
        self._depth = self._count = 0
        self._in_string = self._escaped = False

    @property
    def _closed(self) -> bool:
        return self._count > 0 and self._depth == 0

    def feed(self, data: bytes) -> list[Piece]:
        rows: list[Piece] = []
        begun = position = 0  # where what is not yet held begins; where the search goes on
        if not self._count:
            self._count = self._depth = begun = position = 1
        elif self._escaped:
            self._escaped, position = False, 1
        while not self._closed and (found := (INSIDE if self._in_string else OUTSIDE).search(data, position)):
            position, sign = found.end(), found.group()
            if self._in_string:
                position = self._string(sign, position, len(data))
            elif self._border(sign):
                self._hold.add(data[begun : position - 1])
                begun = position
                rows += self._element()
        self._hold.add(data[begun:])
        return rows

    def _string(self, sign: bytes, position: int, size: int) -> int:
        """Past a quote or a backslash inside of a string; where to go on."""
        if sign == b'"':
            self._in_string = False
            return position
        self._escaped = position == size  # the sign that it escapes is yet to come
        return position + 1

    def _border(self, sign: bytes) -> bool:
        """Whether an element ends here."""
        if sign == b'"':
            self._in_string = True
        elif sign in b"[{":
            self._depth += 1
        elif sign in b"]}":
            self._depth -= 1
            return self._depth == 0
        return self._depth == 1 and sign == b","

    def _element(self) -> list[Piece]:
        piece = self._hold.take()
        if isinstance(piece, bytes) and not piece.strip(SPACE):
            alone = self._closed and self._count == 1  # nothing between the brackets
            piece = Unusable("nothing stands where a row should. Take out the comma beside it.", b"")
            return [] if alone else [piece]
        self._count += 1
        return [piece]

    def end(self) -> list[Piece]:
        rest = self._hold.take()
        blank = isinstance(rest, bytes) and not rest.strip(SPACE)
        if self._closed and blank:
            return []
        content = rest if isinstance(rest, bytes) else rest.content
        why = "something follows the array's end. Take it out." if self._closed else "the array has no end. Add a ]."
        return [Unusable(why, content)]


class Either:
    """Lines, or elements when the first sign is a `[`; a byte order mark is passed over."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._head = b""
        self._chosen: Splitter | None = None
        self._marked = False  # whether a byte order mark has been looked for

    @property
    def by_lines(self) -> bool:
        """Whether each line that is not blank is a row, as far as is known."""
        return not isinstance(self._chosen, Elements)

    def feed(self, data: bytes) -> list[Piece]:
        if self._chosen is None:
            data = self._head = self._head + data
            if not self._marked:
                if len(data) < len(BOM) and BOM.startswith(data):
                    return []
                self._marked, data = True, data.removeprefix(BOM)
            data = self._head = data.lstrip(SPACE)
            if not data:
                return []
            self._chosen, self._head = (Elements if data[:1] == b"[" else Lines)(self._most), b""
        return self._chosen.feed(data)

    def end(self) -> list[Piece]:
        if self._chosen is None:
            return [Unusable("a byte order mark is cut short.", self._head)] if self._head else []
        return self._chosen.end()
