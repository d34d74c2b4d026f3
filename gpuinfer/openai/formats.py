"""Files that hold prompts in another form than JSON: which form it is, told by their first bytes, and a command that
turns it into rows.
"""

from __future__ import annotations

import codecs
import csv
import json
import shlex
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from gpuinfer.openai.splitting import BOM

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


class OtherFormat(NamedTuple):
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


def other_format(head: bytes, name: str, whole: bool) -> OtherFormat | None:
    """Which form a file has whose first bytes are `head`, when it is no JSON; None when it may be JSON, or nothing.

    `name` is the file's, - for standard input. `whole`: there is no more than `head`.
    """
    source = "FILE" if name == "-" else shlex.quote(name)
    for signature, (method, command) in PACKED.items():
        if head.startswith(signature):
            return OtherFormat(f"compressed with {method}", f"{command} {source}", "To unpack it on the way")
    for signature, what in SIGNATURES.items():
        if head.startswith(signature):
            return _parquet(what, "FILE" if name == "-" else name) if signature == b"PAR1" else OtherFormat(what)
    if head.startswith(UTF_16):
        return OtherFormat("text in UTF-16", f"iconv -f UTF-16 -t UTF-8 {source}", "To turn it into UTF-8 on the way")
    return _of_lines(head, name, source, whole)


def _parquet(what: str, name: str) -> OtherFormat:
    command = f"python3 -c {shlex.quote(PARQUET.format(name=json.dumps(name)))}"
    return OtherFormat(what, command, "With pyarrow installed, and the column's name for prompt")


def _of_lines(head: bytes, name: str, source: str, whole: bool) -> OtherFormat | None:
    lines = head.removeprefix(BOM).split(b"\n")
    lines = [line.strip() for line in (lines if whole else lines[:-1]) if line.strip()]
    if not lines or lines[0].startswith(b"[") or not (whole or lines[1:]):  # one bad row of a stream is a bad row
        return None
    if lines[0] == b"{" and len(lines) > 1:
        command = f"jq -c . {source}"
        return OtherFormat("JSON with objects over several lines", command, "To have each object on a line of its own")
    if any(map(_is_row, lines)):
        return None
    if b"\0" in head:
        return OtherFormat("binary")
    encoding = "utf-8-sig" if _is_utf8(head, whole) else "cp1252"
    first = lines[0].decode(encoding, errors="replace")
    delimiter = max(",\t;", key=first.count)
    columns = next(csv.reader([first], delimiter=delimiter))
    known = [column for wanted in TEXT_FIELDS for column in columns if column.strip().lower() == wanted]
    if name.lower().endswith((".csv", ".tsv")) or (known and len(columns) > 1):
        return _table(columns, known[0] if known else columns[0], delimiter, encoding, source)
    script = TEXT.format(encoding=encoding)
    return OtherFormat("plain text", f"python3 -c {shlex.quote(script)} < {source}", "To make each line a prompt")


def _table(columns: Sequence[str], column: str, delimiter: str, encoding: str, source: str) -> OtherFormat:
    dialect = f", delimiter={json.dumps(delimiter)}" if delimiter != "," else ""
    script = TABLE.format(column=json.dumps(column), encoding=encoding, dialect=dialect)
    what = f"a table with the columns {', '.join(columns)}"
    return OtherFormat(what, f"python3 -c {shlex.quote(script)} < {source}", f"To ask its column {column}")


def _is_row(line: bytes) -> bool:
    """Whether the line is meant as a row: an object, though it be broken, or a whole string."""
    if line.startswith(b"{"):
        return True
    try:
        return isinstance(msgspec.json.decode(line), str)
    except (ValueError, RecursionError):
        return False


def _is_utf8(head: bytes, whole: bool) -> bool:
    try:
        codecs.getincrementaldecoder("utf-8")().decode(head, final=whole)
    except UnicodeDecodeError:
        return False
    return True
