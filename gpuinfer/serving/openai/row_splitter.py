"""Cuts a stream of bytes into rows: the lines of JSONL, or the elements of one JSON array, with bounded memory.

Nothing is decoded here. A row longer than `most` bytes is passed over as it streams by and known by its hash. Each row
has the number of the line it begins on, from 1, blank lines counted. A file in another format is recognized by its
first bytes, with a command that turns it into rows.
"""

from __future__ import annotations

import codecs
import csv
import hashlib
import json
import re
import shlex
from dataclasses import dataclass
from typing import NamedTuple

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

    def __init__(self, most: int = MOST_BYTES, line: int = 1) -> None:
        self._hold = PartialRow(most)
        self._depth = self._count = 0
        self._in_string = self._escaped = False
        self._wrong_end = False  # the array was closed with a brace
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
            self._wrong_end = self._depth == 0 and sign == b"}"
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
            found.append((self._line, Unusable("the array ends with a } and not with a ]. Correct it.", b"}")))
        return found

    def end(self) -> list[Piece]:
        rest = self._hold.take()
        if self._closed and _blank(rest):
            return []
        content = rest if isinstance(rest, bytes) else rest.content
        why = "something follows the array's end. Take it out." if self._closed else "the array has no end. Add a ]."
        return [(self._begun, Unusable(why, content))]


class RowSplitter:
    """Lines, or elements when the first sign is a `[`; a byte order mark is passed over."""

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
            if not data:
                return []
            self._chosen, self._head = (
                (ArraySplitter if data[:1] == b"[" else LineSplitter)(self._most, self._line),
                b"",
            )
        return self._chosen.feed(data)

    def end(self) -> list[Piece]:
        if self._chosen is None:
            return [(1, Unusable("a byte order mark is cut short.", self._head))] if self._head else []
        return self._chosen.end()


HEAD_BYTES = 64 << 10
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
UTF_16 = (b"\xff\xfe", b"\xfe\xff")
PACKED = {
    b"\x1f\x8b": ("gzip", "gzip -dc"),
    b"BZh": ("bzip2", "bzip2 -dc"),
    b"\xfd7zXZ\0": ("xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
}
SIGNATURES = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a zip archive or an Excel workbook",
    b"%PDF": "a PDF",
    b"SQLite format 3\0": "an SQLite database",
    b"GGUF": "a GGUF model",
}
PARQUET = (
    "import json, pyarrow.parquet as pq; [print(json.dumps(text)) for batch in pq.ParquetFile({name}).iter_batches("
    'columns=["prompt"]) for text in batch["prompt"].to_pylist()]'
)
TEXT = 'import json; [print(json.dumps(line.strip())) for line in open(0, encoding="{encoding}") if line.strip()]'
TABLE = (
    'import csv, json; [print(json.dumps(row[{column}])) for row in csv.DictReader(open(0, encoding="{encoding}", '
    'newline=""){dialect})]'
)


class ForeignFormat(NamedTuple):
    """`what` a file is; the `command` that writes its rows to standard output, "" for none; what that `does`."""

    what: str
    command: str = ""
    does: str = ""

    def refused(self, file: str, takes: str) -> str:
        """The sentences that refuse it. `file`: what people call it; `takes`: where the command's output goes."""
        said = f"{file} is {self.what}, and prompts are read as one JSON object a line."
        if not self.command:
            return f"{said} Give a file of those."
        return f"{said} {self.does}:\n{self.command} {takes}"


def foreign_format(head: bytes, name: str, whole: bool) -> ForeignFormat | None:
    """Which form a file has whose first bytes are `head`, when it is no JSON; None when it may be JSON, or nothing.

    `name` is the file's, - for standard input. `whole`: there is no more than `head`.
    """
    source = "FILE" if name == "-" else shlex.quote(name)
    for signature, (method, command) in PACKED.items():
        if head.startswith(signature):
            return ForeignFormat(f"compressed with {method}", f"{command} {source}", "To unpack it on the way")
    for signature, what in SIGNATURES.items():
        if head.startswith(signature):
            if signature != b"PAR1":
                return ForeignFormat(what)
            script = PARQUET.format(name=json.dumps("FILE" if name == "-" else name))
            does = "With pyarrow installed, and the column's name for prompt"
            return ForeignFormat(what, f"python3 -c {shlex.quote(script)}", does)
    if head.startswith(UTF_16):
        return ForeignFormat("text in UTF-16", f"iconv -f UTF-16 -t UTF-8 {source}", "To turn it into UTF-8 on the way")
    return _of_lines(head, name, source, whole)


def _of_lines(head: bytes, name: str, source: str, whole: bool) -> ForeignFormat | None:
    lines = head.removeprefix(BOM).split(b"\n")
    lines = [line.strip() for line in (lines if whole else lines[:-1]) if line.strip()]
    if not lines or lines[0].startswith(b"[") or not (whole or lines[1:]):  # one bad row of a stream is a bad row
        return None
    if lines[0] == b"{" and len(lines) > 1:
        command = f"jq -c . {source}"
        return ForeignFormat(
            "JSON with objects over several lines", command, "To have each object on a line of its own"
        )
    if any(map(_is_row, lines)):
        return None
    if b"\0" in head:
        return ForeignFormat("binary")
    encoding = "utf-8-sig"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        encoding = "cp1252"
    first = lines[0].decode(encoding, errors="replace")
    delimiter = max(",\t;", key=first.count)
    columns = next(csv.reader([first], delimiter=delimiter))
    known = [column for wanted in TEXT_FIELDS for column in columns if column.strip().lower() == wanted]
    if name.lower().endswith((".csv", ".tsv")) or (known and len(columns) > 1):
        column = known[0] if known else columns[0]
        dialect = f", delimiter={json.dumps(delimiter)}" if delimiter != "," else ""
        script = TABLE.format(column=json.dumps(column), encoding=encoding, dialect=dialect)
        what = f"a table with the columns {', '.join(columns)}"
        return ForeignFormat(what, f"python3 -c {shlex.quote(script)} < {source}", f"To ask its column {column}")
    script = TEXT.format(encoding=encoding)
    return ForeignFormat("plain text", f"python3 -c {shlex.quote(script)} < {source}", "To make each line a prompt")


def _is_row(line: bytes) -> bool:
    """Whether the line is meant as a row: an object, though it be broken, or a whole string."""
    if line.startswith(b"{"):
        return True
    try:
        return isinstance(msgspec.json.decode(line), str)
    except (ValueError, RecursionError):
        return False
