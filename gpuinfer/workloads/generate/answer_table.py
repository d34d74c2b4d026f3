"""Answers as one Parquet file, a row an answer, for any reader of it (pandas, Polars, DuckDB, `datasets`).

While a run goes on, answers are lines of JSON in a journal next to the file, as of any other output: so a run that was
killed loses none. At the end the journal becomes the file; a run that goes on with a file makes a journal of it first.
Objects whose fields differ from row to row (metadata, log-probabilities, OpenAI's responses) are JSON in texts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.extras import require_extra
from gpuinfer.host.files import FULL, put_whole
from gpuinfer.host.journal import whole_lines
from gpuinfer.workloads.generate.answer_lines import BATCH_ANSWER, AnswerTiming, digest_key
from gpuinfer.workloads.generate.opened_output import OpenedOutput

if TYPE_CHECKING:
    import pyarrow

GROUP_ROWS, GROUP_BYTES = 8192, 16 << 20  # of lines: a row group holds no more than both
AS_JSON = ("logprobs", "prompt_logprobs", "metadata", "response")
USAGE = ("prompt_tokens", "completion_tokens")

Row = dict[str, Any]


class AnswerTable(OpenedOutput):
    """The journal of the Parquet file at `table`."""

    def __init__(self, table: Path, *opened: Any, **facts: Any) -> None:
        super().__init__(*opened, **facts)
        self._table = table

    def finish(self, useless: bool = False) -> None:
        super().finish(useless)
        if self.path is None or self.is_useless:
            return
        try:
            pack_answers(self.path, self._table)
        except OSError as error:
            cure = "Free some space" if error.errno in FULL else "Mend that"
            raise WorkError(
                f"{self._table} cannot be written: {error.strerror}. All answers are in {self.path}. {cure}, then run "
                "again with --resume."
            ) from error
        self.path.unlink()


def answer_schema() -> pyarrow.Schema:
    import pyarrow as pa

    text, tokens = pa.string(), pa.list_(pa.int32())
    ending = [("text", text), ("finish_reason", text), ("stop_reason", text), ("token_ids", tokens), ("logprobs", text)]
    timing = [(name, pa.float64()) for name in AnswerTiming.__struct_fields__ if name != "cached_tokens"]
    error = [("type", text), ("message", text), ("row", pa.int64()), ("line", pa.int64()), ("file", text)]
    return pa.schema(
        [
            ("id", text),
            ("model", text),  # of several
            *ending,
            ("samples", pa.list_(pa.struct(ending))),
            ("prompt_logprobs", text),
            *((name, pa.int64()) for name in USAGE),
            ("timing", pa.struct([*timing, ("cached_tokens", pa.int64())])),
            ("error", pa.struct(error)),
            ("metadata", text),
            ("response", text),  # of a request in OpenAI's form
            ("digest", text),
        ]
    )


def pack_answers(journal: Path, table: Path) -> None:
    """Make the Parquet file of a journal, whole or not at all; one row group is in memory. Raises `OSError`."""
    import pyarrow as pa
    from pyarrow import parquet

    schema = answer_schema()

    def write(file: IO[bytes]) -> None:
        with parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
            for rows in _groups(journal):
                columns = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
                writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=len(rows))

    put_whole(table, write)


def _groups(journal: Path) -> Iterator[list[Row]]:
    rows, size = list[Row](), 0
    for line in whole_lines(journal):
        rows.append(_row_of(line))
        size += len(line)
        if len(rows) >= GROUP_ROWS or size >= GROUP_BYTES:
            yield rows
            rows, size = [], 0
    if rows:
        yield rows


def unpack_answers(table: Path, journal: Path) -> None:
    """Make a journal of the Parquet file of an earlier run. Raises `UsageError` for a file that none has written."""
    require_extra("parquet", str(table))
    import pyarrow as pa
    from pyarrow import parquet

    schema = answer_schema()

    def write(file: IO[bytes]) -> None:
        with parquet.ParquetFile(table, page_checksum_verification=True) as source:
            if not source.schema_arrow.equals(schema):
                raise ValueError("its columns are others")
            for batch in source.iter_batches(GROUP_ROWS):
                file.writelines(_line_of(row) for row in batch.to_pylist())

    try:
        put_whole(journal, write)
    except (pa.ArrowException, ValueError, OSError) as error:
        why = str(error).partition("\n")[0].rstrip(". ")
        raise UsageError(
            f"{table} does not hold answers that --resume can go on with: {why}. Give another --output."
        ) from error


_encode = msgspec.json.Encoder().encode


def _row_of(line: bytes) -> Row:
    found: Row = msgspec.json.decode(line)
    if "custom_id" in found:
        error = found["error"]
        if error is not None:
            error = {"type": error["code"], **{key: error.get(key) for key in ("message", "row", "line", "file")}}
        found = {
            "id": found["custom_id"],
            "error": error,
            "metadata": found.get("metadata"),
            "response": found["response"],
            "digest": found["id"].removeprefix(BATCH_ANSWER),
        }
    found["id"] = str(found["id"])
    for part in (found, *(found.get("samples") or ())):
        if part.get("stop_reason") is not None:
            part["stop_reason"] = str(part["stop_reason"])
        for name in AS_JSON:
            if part.get(name) is not None:
                part[name] = _encode(part[name]).decode()
    return {**found, **{name: (found.get("usage") or {}).get(name) for name in USAGE}}


def _line_of(row: Row) -> bytes:
    """What `_row_of` has made a row of; an id or the reason of an end that was a number is a text now."""
    digest_key(row["digest"])  # else no run of ours has written it
    error = {key: value for key, value in row["error"].items() if value is not None} if row["error"] else None
    found: Row = {}
    if row["response"] is not None:
        if error is not None:
            error = {"code": error.pop("type"), **error}
        found = {
            "id": BATCH_ANSWER + row["digest"],
            "custom_id": row["id"],
            "response": msgspec.Raw(row["response"].encode()),
            "error": error,
        }
        return (
            _encode(found | ({} if row["metadata"] is None else {"metadata": msgspec.Raw(row["metadata"].encode())}))
            + b"\n"
        )
    for name, value in row.items():
        if name in USAGE:
            continue
        if name == "samples" and value is not None:
            value = [{key: _plain_part(key, one) for key, one in sample.items() if one is not None} for sample in value]
        if value is not None:
            found[name] = _plain_part(name, value)
    if row[USAGE[0]] is not None:
        found["usage"] = {name: row[name] for name in USAGE}
    return _encode(found | ({} if error is None else {"error": error})) + b"\n"


def _plain_part(name: str, value: Any) -> Any:
    return msgspec.Raw(value.encode()) if name in AS_JSON else value
