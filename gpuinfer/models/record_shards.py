"""One shard of self-play's records: its arrays, read or mapped into memory, and games taken out of shards in any order.

`positions.py` describes the arrays.
"""

from __future__ import annotations

import io
import mmap
import struct
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error, struct.error)
OF_MOVES = ("observation", "legal", "policy", "value", "player", "game", "move")  # one row a searched move
OF_GAMES = ("finished", "returns", "sides", "resigned", "checked", "lowest", "version")  # one row a game, if there
LOCAL_HEADER = struct.Struct("<26xHH")  # of a file in a zip archive: the lengths of its name and of what follows that


def read_shard(shard: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Read some arrays of a shard. Raises one of UNREADABLE."""
    with shard.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in names}


def mapped_arrays(shard: Path, names: Sequence[str] | None = None, check: bool = True) -> dict[str, NDArray[Any]]:
    """Arrays of an npz file, by default all, read-only and in the file's own memory, where nothing is packed. `check`:
    compare each with its checksum. Raises one of `UNREADABLE`.
    """
    with shard.open("rb") as file, zipfile.ZipFile(file) as archive:
        names = [name.removesuffix(".npy") for name in archive.namelist()] if names is None else names
        infos = {name: archive.getinfo(f"{name}.npy") for name in names}
        if any(info.compress_type != zipfile.ZIP_STORED for info in infos.values()):
            return read_shard(shard, names)
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    found = {}
    for name, info in infos.items():
        begin = info.header_offset + LOCAL_HEADER.size
        begin += sum(LOCAL_HEADER.unpack_from(whole, info.header_offset))
        content = memoryview(whole)[begin : begin + info.file_size]
        if len(content) != info.file_size or (check and zlib.crc32(content) != info.CRC):
            raise ValueError(f"{info.filename} is damaged")
        found[name] = _array_of(content)
    return found


def _array_of(content: memoryview) -> NDArray[Any]:
    """The array of an npy file's bytes, without copying them. Raises `ValueError` for one of Python objects."""
    head = io.BytesIO(content[: 1 << 16])
    version = npy.read_magic(head)
    read_header = npy.read_array_header_1_0 if version == (1, 0) else npy.read_array_header_2_0
    shape, fortran, dtype = read_header(head)
    if dtype.hasobject or fortran:
        raise ValueError("it holds Python objects, or columns in the place of rows")
    return np.frombuffer(content, dtype, int(np.prod(shape)), head.tell()).reshape(shape)


class GameArrays:
    """The arrays of some games, with the place of each game in them. Rows that are not by game and move already are
    sorted first. Arrays with a row a move may be missing, all of them.
    """

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.numbers: NDArray[np.int64] = arrays["finished"]  # [games]
        games, moves = (arrays.get(name, np.zeros(0, np.int64)) for name in ("game", "move"))
        begins = np.flatnonzero(np.diff(games, prepend=-1))  # of each run of rows of one game
        follows = np.diff(games) == 0
        if len(np.unique(games[begins])) < len(begins) or (np.diff(moves)[follows] <= 0).any():
            order = np.lexsort((moves, games))
            arrays = {name: array[order] if name in OF_MOVES else array for name, array in arrays.items()}
            games = arrays["game"]
            begins = np.flatnonzero(np.diff(games, prepend=-1))
        self.arrays = arrays
        ends = np.append(begins[1:], len(games))
        by_number = np.argsort(games[begins])
        found = np.searchsorted(games[begins], self.numbers, sorter=by_number) if len(begins) else self.numbers
        self.starts = np.zeros(len(self.numbers), np.int64)  # [games]: the first row of each, and the one after its
        self.ends = np.zeros(len(self.numbers), np.int64)  # last; the same of a game without a searched move
        if len(begins):
            runs = by_number[np.minimum(found, len(begins) - 1)]
            has_rows = games[begins][runs] == self.numbers
            self.starts[has_rows], self.ends[has_rows] = begins[runs][has_rows], ends[runs][has_rows]

    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each game, [games], the same in whatever shard it is."""
        move = sum(_bytes_of_row(array) for name, array in self.arrays.items() if name in OF_MOVES)
        game = sum(_bytes_of_row(self.arrays[name]) for name in ("finished", "returns"))
        return (self.ends - self.starts) * move + game


def _bytes_of_row(array: NDArray[Any]) -> int:
    return array.dtype.itemsize * int(np.prod(array.shape[1:]))


class GameRecord(NamedTuple):
    """One game among others."""

    games: GameArrays
    place: int
    version: str = ""  # of the weights that played it, where they change during a run


def gathered(records: Sequence[GameRecord]) -> dict[str, NDArray[Any]]:
    """The arrays of these games, at least one, in this order. Raises as `join_games` does."""
    groups: dict[int, tuple[GameArrays, list[int], list[int]]] = {}
    for target, (games, place, _) in enumerate(records):
        group = groups.setdefault(id(games), (games, [], []))
        group[1].append(place)
        group[2].append(target)
    parts = [(games, np.array(places), np.array(targets)) for games, places, targets in groups.values()]
    rows = np.zeros(len(records), np.int64)
    for games, places, targets in parts:
        rows[targets] = games.ends[places] - games.starts[places]
    made = join_games(parts, rows)
    if any(record.version for record in records):
        made["version"] = np.array([record.version for record in records])
    return made


def join_games(
    parts: Iterable[tuple[GameArrays, NDArray[np.int64], NDArray[np.int64]]], rows: NDArray[np.int64]
) -> dict[str, NDArray[Any]]:
    """The arrays of games from several shards: of each some places, and the places that they get. One of `parts` is
    held at a time. rows: of each game in the result. Raises `KeyError` where one lacks an array of another,
    `ValueError` where their sizes differ.
    """
    made: dict[str, NDArray[Any]] = {}
    starts = np.cumsum(rows) - rows
    for games, places, targets in parts:
        found = games.arrays
        for name in sorted(found, key=_rank) if not made else ():
            count = int(rows.sum()) if name in OF_MOVES else len(rows)
            made[name] = np.empty((count, *found[name].shape[1:]), found[name].dtype)
        if made.keys() != found.keys():
            raise KeyError(f"not all have {', '.join(sorted(made.keys() ^ found.keys()))}")
        begins, lengths = games.starts[places], rows[targets]
        source, target = _rows(begins, lengths), _rows(starts[targets], lengths)
        for name, array in found.items():
            if array.dtype != made[name].dtype and array.dtype.kind == "U":  # of another length
                made[name] = made[name].astype(np.promote_types(array.dtype, made[name].dtype))
            elif (array.dtype, array.shape[1:]) != (made[name].dtype, made[name].shape[1:]):
                raise ValueError(f"{name} is {array.dtype} {array.shape[1:]} in one of them")
            if name in OF_MOVES:
                made[name][target] = array[source]
            else:
                made[name][targets] = array[places]
    return made


def _rank(name: str) -> tuple[int, str]:
    known = (*OF_MOVES, *OF_GAMES)
    return (known.index(name) if name in known else len(known), name)


def _rows(begins: NDArray[np.int64], lengths: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """The rows of some games, one game after the other; a slice where they lie next to one another."""
    begins, lengths = begins[lengths > 0], lengths[lengths > 0]
    if not len(begins):
        return slice(0)
    ends = begins + lengths
    if (begins[1:] == ends[:-1]).all():
        return slice(int(begins[0]), int(ends[-1]))
    before = np.cumsum(lengths) - lengths
    return np.repeat(begins - before, lengths) + np.arange(int(lengths.sum()))


def pack_shard(records: Sequence[GameRecord]) -> bytes:
    """A shard of these games, the same bytes wherever it is made, as the archive's dates are fixed. Raises as
    `gathered` does.
    """
    file = io.BytesIO()
    np.savez(file, **gathered(records))  # type: ignore[arg-type]  # its `allow_pickle` comes with NumPy 2.1
    return file.getvalue()


def unpack_shard(content: bytes | memoryview) -> dict[str, NDArray[Any]]:
    """The arrays of a shard's bytes. Raises one of `UNREADABLE`."""
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        return {name: arrays[name] for name in arrays.files}
