"""What self-play leaves on disk: a manifest and shards of finished games, each whole or not there at all.

A shard is an npz file without objects. One row a searched move:

    observation  [rows, features]  as the network saw it       player  int8 [rows]   seat that moved
    legal        bool [rows, actions]                          game    int64 [rows]  the game's number
    policy       float32 [rows, actions], visits, sum 1        move    int16 [rows]  moves made before, forced ones too
    value        float32 [rows, seats]: the game's returns, column k of the k-th seat after the one that moved

and one row a game: `finished` int64 [games], its number; `returns` float32 [games, seats], by seat. A game is in
exactly one shard, with all its rows; moves without a choice have no row.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import uuid
import weakref
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from gpuinfer.errors import UsageError, WorkError

SCHEMA = "gpuinfer.records/1"
MANIFEST = "manifest.json"
UNREADABLE = (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error)

log = logging.getLogger(__name__)


class Folder:
    """The folder that `--out` names. Raises UsageError when it cannot serve."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._known: dict[str, list[int]] = {}  # the games of shards that have been read
        self._release: Callable[[], object] = lambda: None

    def open(self, settings: Mapping[str, Any], resume: bool) -> set[int]:
        """Claim the folder for these settings, until `close` or the end of this object; the games that it holds.

        `settings` are those that decide how a game goes. Raises UsageError when there are records and `resume` is not
        set, when they were made with other settings, or when another run is writing here.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as if_refused:
                self._claim()
                if_refused.callback(lambda: self._release())
                finished = self._go_on(json.loads(json.dumps(dict(settings))), resume)
                if_refused.pop_all()
            return finished
        except OSError as error:
            raise UsageError(
                f"{self.path} cannot be written: {error.strerror}. Give another folder with --out."
            ) from error

    def _claim(self) -> None:
        """Lock the folder: two runs that write to it at once would play the same games."""
        descriptor = os.open(self.path, os.O_RDONLY)
        self._release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{self.path} is in use by another run. Wait for it, or give another --out.") from None
        except OSError as error:
            log.info("%s: no locks on this file system (%s)", self.path, error)

    def _go_on(self, settings: Mapping[str, Any], resume: bool) -> set[int]:
        found = self._manifest()
        if found is None:
            if any(self.shards()):
                raise UsageError(f"{self.path} has shards but no {MANIFEST}. Give another folder with --out.")
            self._write_manifest({"schema": SCHEMA, "settings": settings})
            return set()
        if not resume:
            raise UsageError(
                f"{self.path} holds records already. Add --resume to go on with them, or give another --out."
            )
        refuse_difference(self.path, found["settings"], settings)
        self._remove_torn()
        return self.finished()

    def close(self, games: int) -> None:
        """Note in the manifest what there is, and let others in. Raises WorkError when it cannot be written.

        Nobody may be writing any more: what a killed worker left half written goes.
        """
        manifest = self._manifest() or {}
        shards = [shard.name for shard in sorted(self.shards())]
        try:
            self._remove_torn()
            self._write_manifest({**manifest, "games": games, "shards": shards})
        except OSError as error:
            raise unwritable(self.path, error) from error
        finally:
            self._release()

    def shards(self) -> Iterator[Path]:
        return self.path.glob("shard-*.npz")

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
        path = self.path / f"shard-{uuid.uuid4().hex}.npz"
        torn = path.with_suffix(".tmp")
        try:
            with torn.open("xb") as file:
                np.savez(file, **arrays)  # type: ignore[arg-type]  # its `allow_pickle` comes with NumPy 2.1
                file.flush()
                os.fsync(file.fileno())
            torn.rename(path)
            _sync_folder(self.path)
        except OSError as error:
            torn.unlink(missing_ok=True)
            raise unwritable(self.path, error) from error
        return path

    def _manifest(self) -> dict[str, Any] | None:
        try:
            manifest: Any = json.loads((self.path / MANIFEST).read_text())
        except FileNotFoundError:
            return None
        except (ValueError, RecursionError) as error:
            raise UsageError(
                f"{self.path / MANIFEST} is not JSON ({error}). Give another folder with --out."
            ) from error
        if (
            not isinstance(manifest, dict)
            or manifest.get("schema") != SCHEMA
            or not isinstance(manifest.get("settings"), dict)
        ):
            raise UsageError(f"{self.path / MANIFEST} is not of schema {SCHEMA}. Give another folder with --out.")
        return dict(manifest)

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        torn = self.path / f"{MANIFEST}.tmp"
        with torn.open("w") as file:
            json.dump(manifest, file, indent=2)
            file.flush()
            os.fsync(file.fileno())
        torn.rename(self.path / MANIFEST)
        _sync_folder(self.path)

    def _remove_torn(self) -> None:
        for torn in self.path.glob("shard-*.tmp"):
            torn.unlink()


def unwritable(path: Path, error: OSError) -> WorkError:
    cure = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Mend that"
    return WorkError(
        f"records cannot be written to {path}: {error.strerror}. What was finished before is kept. "
        f"{cure}, then run again with --resume."
    )


def refuse_difference(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    """Raises UsageError that shows what differs."""
    different = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    if not different:
        return
    shown = "; ".join(f"{name}: {found.get(name)!r} there, {wanted.get(name)!r} here" for name in different)
    raise UsageError(f"{path} was made with other settings ({shown}). Use those, or give another folder with --out.")


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


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
