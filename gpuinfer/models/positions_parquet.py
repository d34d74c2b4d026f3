"""Positions of self-play as one Parquet file, for any reader of it (pyarrow, DuckDB, Polars, pandas, Spark).

One row a searched move, with the columns of the records (`positions.py`): `game` int64, `move` int16, `player` int8,
and lists of fixed length: `observation` (the features' own type), `legal` bool, `policy` float32, `value` float32. A
shard is a row group, its rows by game and move; no game is in two. The file's metadata has `gpuinfer.schema`,
`gpuinfer.settings` (JSON, of the run) and, where the game has some, `gpuinfer.symmetries` (JSON).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import IO, TYPE_CHECKING

import numpy as np

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.extras import require_extra
from gpuinfer.host.files import FULL, put_whole
from gpuinfer.models.positions import ARRAYS, SCHEMA, PositionsFolder, readable, shards_of, sizes_of

if TYPE_CHECKING:
    import pyarrow


def write_parquet(folder: Path, path: Path) -> int:
    """Write all positions of a folder to `path`, whole or not at all; one shard is in memory at a time. How many there
    are. Raises `UsageError` without pyarrow, for a folder without records or with a damaged shard, `WorkError` where
    `path` cannot be written.
    """
    require_extra("parquet", "Parquet")
    import pyarrow as pa
    from pyarrow import parquet

    sizes, records = sizes_of([folder]), PositionsFolder(folder)
    symmetries = records.symmetries(sizes.features, sizes.actions)
    facts = {"schema": SCHEMA, "settings": json.dumps((records.manifest() or {}).get("settings", {}))}
    facts |= {} if symmetries is None else {"symmetries": json.dumps(symmetries.plain())}
    rows, shards = 0, shards_of(folder)

    columns = {"game": pa.int64(), "move": pa.int16(), "player": pa.int8()}
    widths = {"observation": sizes.features, "legal": sizes.actions, "policy": sizes.actions, "value": sizes.seats}
    kinds = {"observation": pa.from_numpy_dtype(sizes.dtype), "legal": pa.bool_()}
    columns |= {name: pa.list_(kinds.get(name, pa.float32()), width) for name, width in widths.items()}
    schema = pa.schema(list(columns.items()), metadata={f"gpuinfer.{name}": one for name, one in facts.items()})

    def write(file: IO[bytes]) -> None:
        nonlocal rows
        with parquet.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
            for shard in shards:
                table = _table_of(shard, schema)
                writer.write_table(table, row_group_size=max(1, len(table)))
                rows += len(table)

    try:
        put_whole(path, write)
    except OSError as error:
        cure = "Free some space" if error.errno in FULL else "Name another file"
        raise WorkError(f"{path} cannot be written: {error.strerror}. {cure}.") from error
    return rows


def _table_of(shard: Path, schema: pyarrow.Schema) -> pyarrow.Table:
    """Raises `UsageError` for a shard that is damaged, or of another game."""
    import pyarrow as pa

    arrays = readable(shard, schema.names)
    order = np.lexsort((arrays["move"], arrays["game"]))
    columns = []
    try:
        for field in schema:
            values = np.ascontiguousarray(arrays[field.name][order])
            if field.name in ARRAYS:
                rows, width = values.shape
                column = pa.FixedSizeListArray.from_arrays(pa.array(values.reshape(rows * width)), width)
            else:
                column = pa.array(values)
            if column.type != field.type:
                raise ValueError(f"{field.name} is {column.type}, not {field.type}")
            columns.append(column)
        return pa.Table.from_arrays(columns, schema=schema)
    except (ValueError, IndexError, pa.ArrowException) as error:
        raise UsageError(
            f"{shard} does not hold what self-play writes, or not of this game: {error}. Take it out of the folder."
        ) from error
