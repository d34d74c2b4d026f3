"""Rows of tables, CSV and Parquet, as the rows that JSON Lines would have.

One column holds the prompts. Columns that are called as fields of a row are these fields; all others go into the row's
metadata, and so into its answer.
"""

from __future__ import annotations

import csv
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from gpuinfer.errors import UsageError, WorkError, nearest
from gpuinfer.host.extras import require_extra
from gpuinfer.serving.openai.row_forms import CHAT_COLUMNS, PROMPT_COLUMNS
from gpuinfer.serving.openai.row_splitter import BOM, MOST_BYTES, Content, Piece, Unusable
from gpuinfer.serving.openai.schema import SamplingFields

if TYPE_CHECKING:
    import pyarrow

FIELD_COLUMNS = frozenset((*SamplingFields.__struct_fields__, "adapter"))
AMBIGUOUS = FIELD_COLUMNS & {
    "n",
    "seed",
    "stop",
    "steps",
    "cache",
    "threshold",
    "decoder",
    "tools",
    "adapter",
    "truncate",
}
BLOCK_ROWS = 256
STREAM_BYTES = 1 << 20  # of a column of a row group, read at once
SHOWN_COLUMNS = 20
SHOWN_TYPE = 60  # characters

log = logging.getLogger(__name__)


class TableColumns:
    """What each column of a table is of its rows. `where`: what people call the file; `wanted`: the column of prompts,
    else one is found by its name.

    Raises `UsageError` for a table without one, for names that come twice, and lists the columns.
    """

    def __init__(self, names: Sequence[str], where: str, wanted: str | None = None) -> None:
        self.names, self.where = names, where
        if twice := next((name for name in names if name and list(names).count(name) > 1), None):
            raise UsageError(f"{where} has two columns '{twice}'. Give each a name of its own.")
        self.prompt = self._column_of_prompts(wanted)
        self._is_chat = self.prompt.lower() in CHAT_COLUMNS
        self._id = next((name for name in names if name.lower() == "id" and name != self.prompt), None)
        self.fields = [name for name in names if name in FIELD_COLUMNS and name != self.prompt]

    def tell_fields(self) -> None:
        """Say once which columns are fields of the rows for their name alone, where it is an ordinary word."""
        if told := tuple(name for name in self.fields if name in AMBIGUOUS):
            _say_fields(self.where, told)

    def _column_of_prompts(self, wanted: str | None) -> str:
        there = [name for name in self.names if name]
        listed = ", ".join(there[:SHOWN_COLUMNS]) + (", …" if len(there) > SHOWN_COLUMNS else "")
        if wanted is not None:
            if wanted in there:
                return wanted
            hint = f" Did you mean '{near}'?" if (near := nearest(wanted, there)) else ""
            raise UsageError(f"{self.where} has no column '{wanted}'.{hint} It has {listed}. Give one of them.")
        for known in PROMPT_COLUMNS:
            for name in there:
                if name.lower() == known:
                    return name
        raise UsageError(
            f"{self.where} is a table without a column of the name {', '.join(PROMPT_COLUMNS[:-1])} or "
            f"{PROMPT_COLUMNS[-1]}. It has {listed or 'none at all'}. Call that of the prompts prompt, or name "
            "it: --prompt-column NAME."
        )

    def row(self, values: Iterable[Any], are_texts: bool = False) -> Content:
        """The row of these values, one a column. `are_texts`: values of other types are written as JSON in texts, and
        an empty one is none.
        """
        row: dict[str, Any] = {}
        metadata: dict[str, Any] = {}
        for name, value in zip(self.names, values, strict=True):
            if name == self.prompt:
                row |= self._asked(value)
            elif name == self._id:
                whole = isinstance(value, float) and value.is_integer()
                row["id"] = int(value) if whole else None if value == "" else value
            elif name in self.fields:
                row[name] = _value_in(value) if are_texts else value
            elif name == "metadata" and isinstance(found := _value_in(value) if are_texts else value, dict):
                metadata |= found
            elif name and not isinstance(value, bytes):
                metadata[name] = value
        row |= {"metadata": metadata} if metadata else {}
        try:
            return msgspec.json.encode(row, enc_hook=str)
        except UnicodeEncodeError:
            return Unusable(
                "the row is not UTF-8. Turn the file into it: iconv -f CP1252 -t UTF-8, where it comes from Windows.",
                repr(row).encode(),
            )
        except (TypeError, ValueError, RecursionError) as error:
            return Unusable(f"the row cannot be used ({error}). Write it with plain values.", repr(row).encode())

    def _asked(self, value: Any) -> dict[str, Any]:
        if isinstance(value, str) and self._is_chat and value.lstrip().startswith("["):
            value = _value_in(value)
        if not isinstance(value, list):
            return {"prompt": value}
        if value and all(isinstance(one, str) for one in value):  # words of a text, such as the moves of a match
            return {"prompt": " ".join(value)}
        is_chat = bool(value) and isinstance(value[0], dict)
        return {"messages": _given_parts(value)} if is_chat else {"prompt_token_ids": value}


@cache
def _say_fields(where: str, fields: tuple[str, ...]) -> None:
    names, many = ", ".join(fields), len(fields) > 1
    log.warning(
        "%s: the column%s %s set%s that field of each row. Rename %s (to my_%s) where %s mere data: others go into the "
        "answers' metadata.",
        where,
        "s" if many else "",
        names,
        "" if many else "s",
        "them" if many else "it",
        fields[0],
        "they are" if many else "it is",
    )


def _value_in(text: Any) -> Any:
    """What a cell says in JSON, else its text; None for an empty cell."""
    if not isinstance(text, str):
        return text
    try:
        return msgspec.json.decode(text) if text.strip() else None
    except (ValueError, RecursionError):
        lowered = text.strip().lower()  # as spreadsheets and Python write them
        return lowered == "true" if lowered in ("true", "false") else text


def _given_parts(value: Any) -> Any:
    """Without the nulls that a table puts where one of its objects lacks what another has."""
    if isinstance(value, dict):
        return {key: _given_parts(one) for key, one in value.items() if one is not None}
    return [_given_parts(one) for one in value] if isinstance(value, list) else value


# CSV


class TextLines:
    """The lines of a stream of bytes as texts, with their ends. Bytes that are not UTF-8 come as half characters.

    `is_dry`: the next line has not come yet, as far as is known. Raises `WorkError` for a line without an end.
    """

    def __init__(self, chunks: Iterator[bytes], where: str) -> None:
        self._chunks, self._where = chunks, where
        self._lines: list[bytes] = []  # whole ones, the next last
        self._rest = b""
        self._number = 0
        self._marked = False

    @property
    def is_dry(self) -> bool:
        return not self._lines

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        while not self._lines:
            chunk = next(self._chunks, b"")
            if not chunk and not self._rest:
                raise StopIteration
            *whole, rest = (self._rest + chunk).split(b"\n")
            self._lines = [line + b"\n" for line in reversed(whole)]
            self._rest = rest if chunk else b""
            if not chunk:
                self._lines.append(rest)
            if len(self._rest) > MOST_BYTES:
                number = self._number + len(whole) + 1
                raise WorkError(f"{self._where}: line {number} has more than {MOST_BYTES:,} bytes. Take it out.")
        line = self._lines.pop()
        self._number += 1
        if not self._marked:
            self._marked, line = True, line.removeprefix(BOM)
        return line.decode(errors="surrogateescape")


def csv_blocks(chunks: Iterator[bytes], where: str, delimiter: str, wanted: str | None) -> Iterator[list[Piece]]:
    """The rows of a table of text, in blocks, as they come. Blank lines are none.

    Raises `UsageError` for a header without prompts, `WorkError` where a quote that is never closed hides all that
    follows.
    """
    if csv.field_size_limit() < MOST_BYTES:
        csv.field_size_limit(MOST_BYTES)  # of the process; there is none of a reader
    lines = TextLines(chunks, where)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    columns: TableColumns | None = None
    block: list[Piece] = []
    while True:
        begun = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            if "unexpected end" in str(error) or "field limit" in str(error):
                if block:
                    yield block
                raise WorkError(
                    f"{where}: a quote in the row that begins on line {begun} is not closed, and hides all that "
                    "follows. Close it, then run again (with --resume, if --output is a file)."
                ) from error
            if columns is None:
                raise UsageError(f"{where}: the first line is no header of a table ({error}). Correct it.") from error
            why = f"the row is no row of a table ({error}). Within quotes write each quote twice."
            block.append((begun, Unusable(why, str(begun).encode())))
        else:
            if columns is None and cells:
                columns = TableColumns([cell.strip() for cell in cells], where, wanted)
                columns.tell_fields()
            elif columns is not None and cells:
                block.append((begun, _row_of_cells(columns, cells)))
        if block and (len(block) >= BLOCK_ROWS or lines.is_dry):
            yield block
            block = []
    if block:
        yield block


def _row_of_cells(columns: TableColumns, cells: list[str]) -> Content:
    if len(cells) == len(columns.names):
        return columns.row(cells, are_texts=True)
    why = (
        f"the row has {len(cells)} cells, and the table {len(columns.names)} columns. Put what holds a delimiter or a "
        "line break into quotes."
    )
    return Unusable(why, "\0".join(cells).encode(errors="surrogatepass"))


def text_blocks(chunks: Iterator[bytes], where: str) -> Iterator[list[Piece]]:
    """Each line that is not blank is a prompt; blank ones count as lines alone."""
    lines, block = TextLines(chunks, where), list[Piece]()
    for number, line in enumerate(lines, 1):
        if text := line.strip():
            try:
                block.append((number, msgspec.json.encode(text)))
            except UnicodeEncodeError:
                why = "the line is not UTF-8. Write it in UTF-8."
                block.append((number, Unusable(why, text.encode(errors="surrogateescape"))))
        if block and (len(block) >= BLOCK_ROWS or lines.is_dry):
            yield block
            block = []
    if block:
        yield block


# Parquet


def check_parquet(path: Path, where: str, wanted: str | None = None) -> int:
    """How many rows it has. Raises `UsageError` without pyarrow, for a file that is damaged, and for columns that hold
    no prompts.
    """
    with _opened_parquet(path, where) as file:
        _prompt_columns(file.schema_arrow, where, wanted)
        return int(file.metadata.num_rows)


def parquet_blocks(path: Path, where: str, wanted: str | None = None) -> Iterator[list[Piece]]:
    """The rows of a Parquet file, in blocks, streamed through its row groups. The line of a row is its number.

    Raises what `check_parquet` raises, and `WorkError` where the file is damaged further on.
    """
    number = 0
    with _opened_parquet(path, where) as file:
        columns = _prompt_columns(file.schema_arrow, where, wanted)
        columns.tell_fields()
        try:
            for batch in file.iter_batches(BLOCK_ROWS, columns=list(columns.names)):
                values = [batch.column(name).to_pylist() for name in columns.names]
                rows = enumerate(zip(*values, strict=True), number + 1)
                block = [(place, columns.row(map(_plain, row))) for place, row in rows]
                number += len(block)
                yield block
        except _damage() as error:
            raise WorkError(
                f"{where} is damaged after row {number:,} ({_first_line(error)}). Copy it anew, then run again (with "
                "--resume, if --output is a file)."
            ) from error


def _plain(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _opened_parquet(path: Path, where: str) -> Any:
    require_extra("parquet", where)
    from pyarrow import parquet

    try:
        return parquet.ParquetFile(path, buffer_size=STREAM_BYTES, page_checksum_verification=True)
    except _damage() as error:
        raise UsageError(f"{where} is no whole Parquet file ({_first_line(error)}). Copy it anew.") from error


def _damage() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(". ")


def _prompt_columns(schema: pyarrow.Schema, where: str, wanted: str | None) -> TableColumns:
    """Without columns of bytes, such as images, which no answer takes over."""
    import pyarrow as pa

    def is_kind(kind: pyarrow.DataType, *tests: Any) -> bool:
        return any(test(kind) for test in tests)

    binary = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
    columns = TableColumns([one.name for one in schema if not is_kind(one.type, *binary)], where, wanted)
    kind = schema.field(columns.prompt).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    lists = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)
    texts = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)
    if is_kind(kind, *lists):
        fits = is_kind(kind.value_type, pa.types.is_integer, pa.types.is_struct, *texts)
    else:
        fits = is_kind(kind, *texts, pa.types.is_null)
    if not fits:
        raise UsageError(
            f"{where}: the column '{columns.prompt}' holds {str(kind)[:SHOWN_TYPE]}, and a prompt is text, a list of "
            f"words, token ids or messages. Of {', '.join(columns.names[:SHOWN_COLUMNS])}, name the one that holds "
            "them: --prompt-column NAME."
        )
    return columns
