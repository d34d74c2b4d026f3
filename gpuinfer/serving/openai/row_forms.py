"""Which form a file of prompts has, recognized by its name and first bytes: JSON, a table, Parquet, lines of text. What
is none of these is refused, with the command that makes prompts of it.
"""

from __future__ import annotations

import codecs
import csv
import shlex
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from gpuinfer.serving.openai.row_splitter import BOM, HEAD_BYTES, SPACE, TEXT_FIELDS, holds_rows

UTF_16 = (b"\xff\xfe", b"\xfe\xff")
PACKED = {
    b"\x1f\x8b": ("gzip", "gzip -dc"),
    b"BZh": ("bzip2", "bzip2 -dc"),
    b"\xfd7zXZ\0": ("xz", "xz -dc"),
    b"\x28\xb5\x2f\xfd": ("zstd", "zstd -dc"),
}
SIGNATURES = {
    b"ARROW1": "an Arrow file",
    b"PK\x03\x04": "a zip archive or an Excel workbook",
    b"%PDF": "a PDF",
    b"SQLite format 3\0": "an SQLite database",
    b"GGUF": "a GGUF model",
}
PARQUET_SIGN = b"PAR1"
TABLE_ENDS, TEXT_END, PARQUET_END = (".csv", ".tsv"), ".txt", ".parquet"
ROW_FILES = (".jsonl", ".json", *TABLE_ENDS, TEXT_END, PARQUET_END)
"""Ends of names of files that hold prompts."""
CHAT_COLUMNS = ("messages", "conversations")
PROMPT_COLUMNS = ("prompt", "messages", "prompt_token_ids", "text")
"""Columns that are found by themselves, the first of them that a table has."""
TEXT = 'import json; [print(json.dumps(line.strip())) for line in open(0, encoding="{encoding}") if line.strip()]'


class RowForm(NamedTuple):
    """`delimiter` is that of a table."""

    kind: Literal["json", "table", "parquet", "text"]
    delimiter: str = ","


class ForeignFormat(NamedTuple):
    """`what` a file is; the `command` that writes its rows to standard output, "" for none; what that `does`."""

    what: str
    command: str = ""
    does: str = ""

    def refused(self, file: str, takes: str) -> str:
        """The sentences that refuse it. `file`: what people call it; `takes`: where the command's output goes."""
        refusal = f"{file} is {self.what}, and prompts are read from JSON Lines, JSON, CSV and Parquet."
        if not self.command:
            return f"{refusal} Give a file of those."
        return f"{refusal} {self.does}:\n{self.command} {takes}"


def form_of(head: bytes, name: str, whole: bool, column: str | None = None) -> RowForm | ForeignFormat:
    """The form of the file whose first bytes are `head`.

    `name` is the file's, - for standard input. `whole`: there is no more than `head`. `column`: what should hold
    the prompts. What may be JSON counts as JSON, and so does nothing.
    """
    source = "FILE" if name == "-" else shlex.quote(name)
    for signature, (method, command) in PACKED.items():
        if head.startswith(signature):
            return ForeignFormat(f"compressed with {method}", f"{command} {source}", "To unpack it on the way")
    for signature, what in SIGNATURES.items():
        if head.startswith(signature):
            return ForeignFormat(what)
    if head.startswith(PARQUET_SIGN):
        if name == "-":
            return ForeignFormat("a Parquet file in a pipe (its end says what is in it)")
        return RowForm("parquet")
    if name.lower().endswith(PARQUET_END):
        return ForeignFormat("no Parquet file, for all its name: it does not begin with PAR1")
    if head.startswith(UTF_16):
        return ForeignFormat("text in UTF-16", f"iconv -f UTF-16 -t UTF-8 {source}", "To turn it into UTF-8 on the way")
    return _form_of_text(head, name, source, whole, column)


def _form_of_text(head: bytes, name: str, source: str, whole: bool, column: str | None) -> RowForm | ForeignFormat:
    lines = head.removeprefix(BOM).split(b"\n")
    lines = [line.strip() for line in (lines if whole else lines[:-1]) if line.strip()]
    named_table = name.lower().endswith(TABLE_ENDS)
    if not lines or lines[0].startswith(b"["):
        return RowForm("json")
    if lines[0].startswith(b"{"):
        if lines[0] == b"{" and len(lines) > 1 and not holds_rows(head.removeprefix(BOM).lstrip(SPACE), whole):
            command = f"jq -c . {source}"
            return ForeignFormat("JSON with objects over several lines", command, "To have each on a line of its own")
        return RowForm("json")
    if not (named_table or whole or lines[1:]):  # one bad row of a stream is a bad row
        return RowForm("json")
    if b"\0" in head:
        return ForeignFormat("binary")
    encoding = "utf-8-sig"
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        encoding = "cp1252"
    delimiter, columns = _header_of(lines[0].decode(encoding, errors="replace"), name)
    known = {one.strip().lower() for one in columns} & {*PROMPT_COLUMNS, *TEXT_FIELDS}
    if named_table or (column is not None and column in columns) or (known and len(columns) > 1):
        if encoding == "cp1252":
            command = f"iconv -f CP1252 -t UTF-8 {source}"
            return ForeignFormat("a table that is not in UTF-8", command, "If its letters are those of Windows")
        return RowForm("table", delimiter)
    if any(map(_is_row, lines)):
        return RowForm("json")
    if name.lower().endswith(TEXT_END) and encoding != "cp1252":
        return RowForm("text")
    script = TEXT.format(encoding=encoding)
    return ForeignFormat("plain text", f"python3 -c {shlex.quote(script)} < {source}", "To make each line a prompt")


def _header_of(line: str, name: str) -> tuple[str, Sequence[str]]:
    """The delimiter that cuts the first line into most columns, and these."""
    usual = "\t,;|" if name.lower().endswith(".tsv") else ",\t;|"
    found = {delimiter: next(csv.reader([line], delimiter=delimiter), []) for delimiter in usual}
    delimiter = max(usual, key=lambda one: len(found[one]))
    return delimiter, found[delimiter]


def _is_row(line: bytes) -> bool:
    """Whether the line is meant as a row: an object, though it be broken, or a whole string."""
    if line.startswith(b"{"):
        return True
    try:
        return isinstance(msgspec.json.decode(line), str)
    except (ValueError, RecursionError):
        return False


def shows_form(head: bytes) -> bool:
    """Whether this much of a stream is enough to tell its form: else more is read first, if there is more."""
    text = head.removeprefix(BOM).lstrip(SPACE)
    if text[:1] in (b"[", b"{") or len(head) >= HEAD_BYTES:
        return True
    first, newline, rest = text.partition(b"\n")
    return bool(newline) and (_is_row(first.strip()) or b"\n" in rest.strip(SPACE) or rest.lstrip(SPACE)[:1] == b"{")
