"""What self-play leaves on disk: a manifest and shards of finished games, each whole or not there at all.

A shard is an npz file without objects. One row a searched move:

    observation  [rows, features]  as the network saw it       player  int8 [rows]   seat that moved
    legal        bool [rows, actions]                          game    int64 [rows]  the game's number
    policy       float32 [rows, actions], visits, sum 1        move    int16 [rows]  moves made before, forced ones too
    value        float32 [rows, seats]: the game's returns, column k of the k-th seat after the one that moved

and one row a game: `finished` int64 [games], its number; `returns` float32 [games, seats], by seat; against an opponent
also `sides` bool [games, seats], true where the run's own model sat. Where players may resign also

    resigned  int8 [games]            the seat that resigned, and so lost, or would have if it were allowed to; -1: none
    checked   bool [games]            nobody was allowed to: the game was played to its end
    lowest    float32 [games, seats]  the least that a position was worth to the seat that moved, by its search, where
                                      no position of the game before it was worth less; inf: nowhere

A game is in exactly one shard, with all its rows; moves without a choice have no row.
"""

from __future__ import annotations

import json
import logging
import shlex
import uuid
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

import numpy as np

from gpuinfer.errors import UsageError
from gpuinfer.host.records import RecordFolder
from gpuinfer.positions.symmetries import Symmetries, checked

SCHEMA = "gpuinfer.records/1"
SYMMETRIES = "symmetries.json"  # of the game, where it declares some
UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)

log = logging.getLogger(__name__)


class Folder(RecordFolder):
    """The folder that `--out` names. Raises UsageError when it cannot serve."""

    tells: ClassVar[Sequence[str]] = (SYMMETRIES,)

    def __init__(self, path: Path) -> None:
        super().__init__(path, SCHEMA, ".npz")
        self._known: dict[str, list[int]] = {}  # the games of shards that have been read

    def open(self, settings: Mapping[str, Any], resume: bool) -> set[int]:
        """Claim the folder for these settings, until `close` or the end of this object; the games that it holds.

        `settings` are those that decide how a game goes. Raises UsageError as `claim` does.
        """
        return self.finished() if self.claim(settings, resume) else set()

    def close(self, games: int) -> None:
        """Note in the manifest what there is, and let others in. Raises WorkError when it cannot be written.

        Nobody may be writing any more: what a killed worker left half written goes.
        """
        try:
            self.remove_torn()
            self.note(games=games, shards=sorted(shard.name for shard in self.shards()))
        finally:
            self.release()

    def declare(self, symmetries: Symmetries) -> None:
        """Say how its positions can be turned. Raises WorkError when it cannot be written."""
        content = json.dumps(symmetries.plain(), separators=(",", ":")).encode()
        self.put(SYMMETRIES, lambda file: file.write(content))

    def symmetries(self, features: int, actions: int) -> Symmetries | None:
        """What it says of that; None where it says nothing. Raises UsageError for what cannot be."""
        path = self.path / SYMMETRIES
        try:
            found = json.loads(path.read_bytes())
            pairs = list(zip(found["features"], found["actions"], strict=True))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise UsageError(f"{path} cannot be read ({error}). Delete it, or train with --no-symmetries.") from error
        return checked(pairs, features, actions, str(path))

    def finished(self) -> set[int]:
        """The numbers of all games in whole shards; a shard that cannot be read is set aside. Each is read once."""
        for shard in self.shards():
            try:
                if shard.name not in self._known:
                    self._known[shard.name] = _finished(shard)
            except UNREADABLE as error:
                log.warning("%s cannot be read (%s): set aside as .broken, its games are played again", shard, error)
                shard.rename(shard.with_suffix(".broken"))
        return {game for games in self._known.values() for game in games}

    def write(self, arrays: Mapping[str, np.ndarray]) -> Path:
        """Add one shard: on disk, under its final name, when this returns. Raises WorkError when it cannot be."""

        def save(file: IO[bytes]) -> None:
            np.savez(file, **arrays)  # type: ignore[arg-type]  # its `allow_pickle` comes with NumPy 2.1

        return self.put(f"shard-{uuid.uuid4().hex}.npz", save)


def shards_of(path: Path) -> list[Path]:
    """In order. Raises `UsageError` where there are none."""
    if path.is_file():
        raise UsageError(f"{path} is a file. Give the folder that `gpuinfer selfplay --out` wrote.")
    shards = sorted(Folder(path).shards())
    if not shards:
        raise UsageError(
            f"{path} holds no records. Write some with `gpuinfer selfplay --out {shlex.quote(str(path))}`."
        )
    return shards


def merge(parts: list[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Several collections of finished games as one."""
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


def _finished(shard: Path) -> list[int]:
    """The games in a shard, all of whose bytes are as they were written. Raises one of UNREADABLE."""
    with zipfile.ZipFile(shard) as archive:
        if (damaged := archive.testzip()) is not None:
            raise ValueError(f"{damaged} is damaged")
    games: list[int] = read(shard, ["finished"])["finished"].tolist()
    return games


def read(shard: Path, names: Iterable[str]) -> dict[str, np.ndarray]:
    """Some arrays of a shard. Raises one of UNREADABLE."""
    with shard.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return {name: arrays[name] for name in names}
