"""Reads a file or a stream of prompts, whichever form it has, as rows in blocks, with bounded memory."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path

import msgspec

from gpuinfer.errors import UsageError
from gpuinfer.serving.openai.row_forms import ForeignFormat, RowForm, form_of, shows_form
from gpuinfer.serving.openai.row_splitter import HEAD_BYTES, SPACE, Content, Piece, RowSplitter, Unusable
from gpuinfer.serving.openai.table_rows import TableColumns, check_parquet, csv_blocks, parquet_blocks, text_blocks

CHUNK = 1 << 18  # bytes of a file that are read at once
COUNT_BYTES = 4 << 30  # a larger file's rows are not counted beforehand
TO_FILE = "> rows.jsonl\nand give that file."


class RowFile:
    """A file of rows, or a stream of them. `name`: its path, - for standard input; `where`: what people call it;
    `column`: which column of a table, or field of an object, holds the prompts; `takes`: where the command that is
    named for another form writes to.
    """

    def __init__(self, name: str, where: str, column: str | None = None, takes: str = TO_FILE) -> None:
        self.name, self.where = name, where
        self._column, self._takes = column, takes
        self._form: RowForm | None = None  # once it is known
        self._splitter = RowSplitter()

    def check(self) -> None:
        """Raises `UsageError` for a file that is not there, that may not be read, or whose form or columns are not
        right. Reads the beginning alone, and opens nothing that is no regular file.
        """
        path = Path(self.name)
        if path.is_dir():
            raise UsageError(
                f"{self.where}: this is a folder. Give a file of prompts, or '{path}/*.parquet' of several."
            )
        if not path.exists():
            raise UsageError(f"{self.where}: there is no such file. Give the name of one that is there.")
        if not os.access(path, os.R_OK):
            raise UsageError(f"{self.where} cannot be read: permission denied. Give a file that you may read.")
        if path.is_file():
            try:
                with path.open("rb") as file:
                    head = file.read(HEAD_BYTES)
                    self._recognize(head, whole=not file.read(1))
            except OSError as error:
                why = f"{self.where} cannot be read: {error.strerror}. Give a file that you may read."
                raise UsageError(why) from error
            if self._form is not None and self._form.kind == "table":
                next(csv_blocks(iter([head]), self.where, self._form.delimiter, self._column), None)
            elif self._form is not None and self._form.kind == "parquet":
                check_parquet(path, self.where, self._column)

    def blocks(self, chunks: Iterator[bytes]) -> Iterator[list[Piece]]:
        """The rows of these bytes, as they come; Parquet is read from the path. Raises `UsageError` as `check`, and
        `WorkError` where the file can be read no further.
        """
        head = b""
        for chunk in chunks:
            head += chunk
            if shows_form(head):
                break
        whole = Path(self.name).is_file() and Path(self.name).stat().st_size <= len(head)
        form = self._recognize(head[:HEAD_BYTES], whole and len(head) <= HEAD_BYTES)
        stream = chain([head], chunks)
        if form.kind == "parquet":
            return parquet_blocks(Path(self.name), self.where, self._column)
        if form.kind == "table":
            return csv_blocks(stream, self.where, form.delimiter, self._column)
        if form.kind == "text":
            return text_blocks(stream, self.where)
        return self._json_blocks(stream)

    def _recognize(self, head: bytes, whole: bool) -> RowForm:
        found = form_of(head, self.name, whole, self._column)
        if isinstance(found, ForeignFormat):
            raise UsageError(found.refused(self.where, self._takes))
        self._form = found
        return found

    def _json_blocks(self, chunks: Iterable[bytes]) -> Iterator[list[Piece]]:
        for chunk in chunks:
            if pieces := self._splitter.feed(chunk):
                yield self._with_column(pieces)
        yield self._with_column(self._splitter.end())

    def _with_column(self, pieces: list[Piece]) -> list[Piece]:
        column = self._column
        return pieces if column is None else [(line, _row_with(content, column)) for line, content in pieces]

    @property
    def is_countable(self) -> bool:
        """Whether its rows can be counted without reading them, as far as is known."""
        return self._form is None or self._form.kind != "json" or self._splitter.by_lines

    def count(self, count_lines: Callable[[bool], int | None]) -> int | None:
        """How many rows a regular file has, about; None where that is not known. May take a while. `count_lines`
        counts the lines, with True those that end outside of quotes.
        """
        if self._form is None and Path(self.name).is_file():
            with open(self.name, "rb") as file:
                head = file.read(HEAD_BYTES)
                self._recognize(head, whole=not file.read(1))
        kind = "json" if self._form is None else self._form.kind
        if kind == "parquet":
            return check_parquet(Path(self.name), self.where, self._column)
        lines = count_lines(kind == "table")
        return None if lines is None else max(0, lines - (kind == "table"))


def _row_with(content: Content, column: str) -> Content:
    """The row of an object, whose field of this name holds the prompt."""
    if isinstance(content, Unusable) or not content.lstrip(SPACE).startswith(b"{"):
        return content
    try:
        row = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
        if column not in row:
            listed = ", ".join(row) or "none"
            return Unusable(f"the row has no field `{column}`, which --prompt-column names. It has {listed}.", content)
        values = [msgspec.json.decode(one) for one in row.values()]
        return TableColumns(list(row), "the row", column).row(values)
    except (ValueError, RecursionError):
        return content  # its reader says what is wrong


def input_files(name: str, where: str) -> list[str]:
    """The file of this name, or those that a pattern such as `data/*.parquet` means, by name. Raises `UsageError`."""
    if Path(name).exists() or not glob.has_magic(name):
        return [name]
    found = sorted(one for one in glob.glob(name, recursive=True) if Path(one).is_file())
    if not found:
        raise UsageError(f"{where}: no file has a name of this pattern. Give one that is there.")
    return found


def outside_quotes(data: bytes, inside: bool) -> tuple[int, bool]:
    """How many lines end outside of the quotes of a table, and whether the next byte is inside of some."""
    parts = data.split(b'"')
    ends = sum(part.count(b"\n") for part in parts[1 if inside else 0 :: 2])
    return ends, inside ^ (len(parts) % 2 == 0)


def pieces_of(path: Path, where: str, column: str | None = None) -> Iterator[Piece]:
    """The rows of a file, or of the files of a pattern, cut and not parsed. Raises as `RowFile.blocks`, when read."""
    for name in input_files(str(path), where):
        called = where if name == str(path) else f"{where} ({name})"
        source = RowFile(name, called, column)
        source.check()
        with open(name, "rb") as file:
            for block in source.blocks(iter(lambda file=file: file.read(CHUNK), b"")):  # type: ignore[misc]
                yield from block
