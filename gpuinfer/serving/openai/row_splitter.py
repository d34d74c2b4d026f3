"""Cuts a stream of bytes into rows: the lines of JSONL, the elements of one JSON array, or the members of one JSON
object of id → row, with bounded memory.

Lines and elements are not decoded here. A row longer than `most` bytes is passed over as it streams by and known by its
hash. Each row has the number of the line it begins on, from 1, blank lines counted.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import ClassVar

import msgspec

MOST_BYTES = 16 << 20  # of one row: some millions of tokens
BOM = b"\xef\xbb\xbf"
SPACE = b" \t\r\n"
INSIDE, OUTSIDE = re.compile(rb'["\\]'), re.compile(rb'["\[\]{},]')


@dataclass(frozen=True, slots=True)
class Unusable:
    """What stands where a row should be and cannot be read. `content` tells it from others."""

    why: str
    content: bytes


Content = bytes | Unusable
Piece = tuple[int, Content]  # the line that it begins on, and what stands there


class PartialRow:
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

    def take(self) -> Content:
        """The row, and room for the next."""
        size, piece = self.size, b"".join(self._parts)
        found: Content = piece
        if size > self._most:
            why = f"the row has {size:,} bytes, and {self._most:,} are the most. Split its prompt."
            found = Unusable(why, self._hash.digest())
        self.__init__(self._most)  # type: ignore[misc]
        return found


class LineSplitter:
    """JSON Lines; blank lines are no rows."""

    def __init__(self, most: int = MOST_BYTES, line: int = 1) -> None:
        self._hold, self._line = PartialRow(most), line

    def feed(self, data: bytes) -> list[Piece]:
        first, *others = data.split(b"\n")
        self._hold.add(first)
        if not others:
            return []
        last = others.pop()
        rows = [self._hold.take(), *others]
        self._hold.add(last)
        begun, self._line = self._line, self._line + len(rows)
        return [(line, row) for line, row in enumerate(rows, begun) if not _blank(row)]

    def end(self) -> list[Piece]:
        last = self._hold.take()
        return [] if _blank(last) else [(self._line, last)]


def _blank(row: Content) -> bool:
    return isinstance(row, bytes) and not row.strip(SPACE)


class ArraySplitter:
    """The elements of one JSON array, told apart by brackets, braces and commas outside of strings.

    The first byte is the array's own bracket.
    """

    closing: ClassVar[bytes] = b"]"
    what: ClassVar[str] = "array"

    def __init__(self, most: int = MOST_BYTES, line: int = 1) -> None:
        self._hold = PartialRow(most)
        self._depth = self._count = 0
        self._in_string = self._escaped = False
        self._wrong_end = False  # the array was closed with a brace, or the object with a bracket
        self._line = self._begun = line  # that has been reached; that the present element begins on

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
                self._add(data[begun : position - 1])
                begun = position
                rows += self._element()
        self._add(data[begun:])
        return rows

    def _add(self, data: bytes) -> None:
        if not self._hold.size:  # white space before an element only counts lines
            rest = data.lstrip(SPACE)
            self._line += data[: len(data) - len(rest)].count(b"\n")
            self._begun, data = self._line, rest
        if data:
            self._hold.add(data)
            self._line += data.count(b"\n")

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
            self._wrong_end = self._depth == 0 and sign != self.closing
            return self._depth == 0
        return self._depth == 1 and sign == b","

    def _element(self) -> list[Piece]:
        row, found = self._hold.take(), []
        if not _blank(row):
            found = [(self._begun, row)]
            self._count += 1
        elif not (self._closed and self._count == 1):  # else nothing stands between the brackets
            nothing = Unusable("nothing stands where a row should. Take out the comma beside it.", b"")
            found = [(self._line, nothing)]
        if self._wrong_end:
            wrong = "}" if self.closing == b"]" else "]"
            why = f"the {self.what} ends with a {wrong} and not with a {self.closing.decode()}. Correct it."
            found.append((self._line, Unusable(why, wrong.encode())))
        return found

    def end(self) -> list[Piece]:
        rest = self._hold.take()
        if self._closed and _blank(rest):
            return []
        content = rest if isinstance(rest, bytes) else rest.content
        if self._closed:
            why = f"something follows the {self.what}'s end. Take it out."
        else:
            why = f"the {self.what} has no end. Add a {self.closing.decode()}."
        return [(self._begun, Unusable(why, content))]


class ObjectSplitter(ArraySplitter):
    """The members of one JSON object of id → row, as rows with this id. The first byte is the object's own brace."""

    closing, what = b"}", "object"

    def feed(self, data: bytes) -> list[Piece]:
        return [(line, _row_of_member(content)) for line, content in super().feed(data)]


def _row_of_member(content: Content) -> Content:
    """`"7": "a text"` as a row; an object, a chat, words or tokens may stand there too."""
    if isinstance(content, Unusable):
        return content
    try:
        ((id, value),) = msgspec.json.decode(b"{" + content + b"}", type=dict[str, msgspec.Raw]).items()
        found = bytes(value)
        if found.startswith(b'"'):
            return msgspec.json.encode({"id": id, "prompt": value})
        if found.startswith(b"["):
            first = found[1:].lstrip(SPACE)[:1]
            if first == b'"':
                return msgspec.json.encode({"id": id, "prompt": " ".join(msgspec.json.decode(value, type=list[str]))})
            return msgspec.json.encode({"id": id, "messages" if first == b"{" else "prompt_token_ids": value})
        row = msgspec.json.decode(found, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError) as error:
        why = f'what stands here is no member `"id": row` of an object ({error}). Write a text or a row for the id.'
        return Unusable(why, content)
    name = "custom_id" if "body" in row else "id"
    if name in row and msgspec.json.decode(row[name]) != id:
        return Unusable(f"the row of the id '{id:.100}' has another `{name}`. Leave that out.", content)
    return msgspec.json.encode({name: id, **{key: one for key, one in row.items() if key != name}})


OWN_FIELDS = ("prompt", "prompt_token_ids", "messages", "id", "custom_id", "metadata", "body", "url", "method")
TEXT_FIELDS = (
    "prompt",
    "text",
    "input",
    "inputs",
    "question",
    "instruction",
    "query",
    "content",
    "problem",
    "sentence",
)
"""What other formats and data sets call a prompt, the likeliest first."""
CHAT_FIELDS = ("conversations", "conversation", "chat", "dialog", "dialogue")
ROW_NAMES = frozenset((*OWN_FIELDS, *TEXT_FIELDS, *CHAT_FIELDS))  # one of these tells that an object is a row
FIRST_MEMBER = re.compile(rb'\{\s*"((?:[^"\\]|\\.)*)"\s*:\s*["\[{]')
HEAD_BYTES = 64 << 10  # by which a form is recognized


def holds_rows(data: bytes, ended: bool) -> bool | None:
    """Whether the object that `data` begins with holds rows by their ids, and is not itself a row or the first of many
    lines. None: that is not known before more has come; `ended`: no more will.
    """
    line, newline, rest = data.partition(b"\n")
    if newline or ended:
        try:
            members = msgspec.json.decode(line, type=dict[str, msgspec.Raw])
        except (ValueError, RecursionError):
            if ended and not rest.strip(SPACE):
                return False
            if line.strip(SPACE)[-1:] not in (b"{", b"[", b",", b":"):
                return False  # a row that is broken
        else:
            if not members or not ROW_NAMES.isdisjoint(members) or rest.strip(SPACE):
                return False
            if not all(bytes(one)[:1] in (b'"', b"{", b"[") for one in members.values()):
                return False
            return True if ended else None
    first = FIRST_MEMBER.match(data)
    if first is not None and (newline or len(data) >= HEAD_BYTES):
        return first[1].decode(errors="replace") not in ROW_NAMES
    return False if ended or len(data) >= HEAD_BYTES else None


class RowSplitter:
    """Elements when the first sign is a `[`, members of an object of rows, else lines; without a byte order mark."""

    def __init__(self, most: int = MOST_BYTES) -> None:
        self._most = most
        self._head = b""
        self._chosen: LineSplitter | ArraySplitter | None = None
        self._marked = False  # whether a byte order mark has been looked for
        self._line = 1

    @property
    def by_lines(self) -> bool:
        """Whether each line that is not blank is a row, as far as is known."""
        return not isinstance(self._chosen, ArraySplitter)

    def feed(self, data: bytes) -> list[Piece]:
        if self._chosen is None:
            data = self._head = self._head + data
            if not self._marked:
                if len(data) < len(BOM) and BOM.startswith(data):
                    return []
                self._marked, data = True, data.removeprefix(BOM)
            rest = data.lstrip(SPACE)
            self._line += data[: len(data) - len(rest)].count(b"\n")
            data = self._head = rest
            if not data or (data[:1] == b"{" and (is_object := holds_rows(data, ended=False)) is None):
                return []
            self._choose(data[:1] == b"{" and bool(is_object))
        return self._chosen.feed(data) if self._chosen is not None else []

    def _choose(self, is_object: bool) -> None:
        kind = ArraySplitter if self._head[:1] == b"[" else LineSplitter
        self._chosen, self._head = (ObjectSplitter if is_object else kind)(self._most, self._line), b""

    def end(self) -> list[Piece]:
        if self._chosen is not None:
            return self._chosen.end()
        if self._head and not self._marked:
            return [(1, Unusable("a byte order mark is cut short.", self._head))]
        if not (data := self._head):
            return []
        self._choose(bool(holds_rows(data, ended=True)))
        return self.feed(data) + self.end()
