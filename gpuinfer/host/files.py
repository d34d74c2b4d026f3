"""Files that are there whole or not at all, also after a power failure, and folders of records that a run can resume.
Such a folder holds a manifest of the settings that decide what the records are (a run with others is refused) and
shards, each whole or absent; one run at a time writes to it.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import shlex
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, ClassVar

from gpuinfer.errors import UsageError, WorkError

TORN = ".tmp"  # the end of a name under which nothing is whole yet


def write_whole(path: Path, content: bytes) -> None:
    """Readable by their owner alone; whoever sees the name sees all of the content."""
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def read_regular(path: Path, most: int) -> tuple[bytes, os.stat_result]:
    """The first `most` bytes of a regular file, and its status. Raises OSError, also for what is no regular file.

    A FIFO or a device in its place would block its reader, or have no end.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
        parts, left = [], most
        while left and (part := os.read(descriptor, left)):
            parts.append(part)
            left -= len(part)
        return b"".join(parts), status
    finally:
        os.close(descriptor)


def no_folder(flag: str, path: Path) -> UsageError:
    """Of a file that is to be written, and there is no folder for it."""
    folder = path.parent
    return UsageError(f"{flag} {path}: there is no folder {folder}. Create it (mkdir -p {shlex.quote(str(folder))}).")


def make_ours(folder: Path) -> bool:
    """Make the folder if need be; whether it can be written to, and by nobody else: code that is cached there is run as
    it is found.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(exist_ok=True, mode=0o700)
        status = folder.stat()
        owners = {status.st_uid, folder.lstat().st_uid}  # of the folder, and of a link that leads there
    except OSError:
        return False
    return owners == {os.getuid()} and not status.st_mode & 0o022 and os.access(folder, os.W_OK)


def sync_folder(path: Path) -> None:
    """The names in it are on the disk when this returns: what was made, renamed or removed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def put_whole(path: Path, write: Callable[[IO[bytes]], object]) -> None:
    """What `write` writes, on the disk under that name when this returns; else the name is as it was. Raises what the
    disk and `write` raise. For files of any size: `write_whole` holds the content in memory, and hides it from others.
    """
    torn = path.with_name(path.name + TORN)
    try:
        with torn.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        torn.rename(path)
        sync_folder(path.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            torn.unlink(missing_ok=True)
        raise


MANIFEST = "manifest.json"
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
SHOWN_VALUE = 80  # characters
DIGESTS = {
    "rules": "the game's rules or its sizes",
    "network": "the source of the network",
    "opponent_network": "the source of the opponent's network",
}
"""Settings that are digests of what somebody wrote, in words: their values say nothing to people."""

log = logging.getLogger(__name__)


class RecordFolder:
    """The folder that `--out` names. `schema` is the manifest's; shards are named shard-*, with `suffix` in the end.

    `holds` is what it is called in errors.
    """

    tells: ClassVar[Sequence[str]] = ()  # files beside the shards that say how it went: alone, they are no records

    def __init__(self, path: Path, schema: str, suffix: str, holds: str = "records") -> None:
        self.path, self._schema, self._suffix, self._holds = path, schema, suffix, holds
        self._release: Callable[[], object] = lambda: None

    def claim(self, settings: Mapping[str, Any], resume: bool) -> bool:
        """Have it for these settings, until `release` or the end of this object; whether there are records already.

        `settings` are those that decide what the records are. Raises UsageError when there are some and `resume` is not
        set, when they were made with other settings, or when another run is writing here. A manifest without anything
        beside it is replaced.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as if_refused:
                self._lock()
                if_refused.callback(self.release)
                held = self._go_on(json.loads(json.dumps(dict(settings))), resume)
                if_refused.pop_all()
            return held
        except OSError as error:
            why = f"{self.path} cannot be written: {error.strerror}. Give another folder with --out."
            raise UsageError(why) from error

    def release(self) -> None:
        self._release()

    def shards(self) -> Iterator[Path]:
        return self.path.glob(f"shard-*{self._suffix}")

    def put(self, name: str, write: Callable[[IO[bytes]], object]) -> Path:
        """Add one file: on disk, under its name, when this returns. Raises WorkError when it cannot be."""
        try:
            put_whole(self.path / name, write)
        except OSError as error:
            raise unwritable(self.path, error, self._holds) from error
        return self.path / name

    def manifest(self) -> dict[str, Any] | None:
        """None where there is none. Raises UsageError for what is no manifest of this schema."""
        path = self.path / MANIFEST
        try:
            manifest: Any = json.loads(path.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (ValueError, RecursionError) as error:
            raise UsageError(f"{path} is not JSON ({error}). Give another folder with --out.") from error
        ours = isinstance(manifest, dict) and manifest.get("schema") == self._schema
        if not ours or not isinstance(manifest.get("settings"), dict):
            raise UsageError(f"{path} is not of schema {self._schema}. Give another folder with --out.")
        return dict(manifest)

    def note(self, **facts: Any) -> None:
        """Add to the manifest. Raises WorkError when it cannot be written."""
        try:
            self._write_manifest({**(self.manifest() or {}), **facts})
        except OSError as error:
            raise unwritable(self.path, error, self._holds) from error

    def remove_torn(self) -> None:
        """What a killed run left half written goes. Nobody may be writing any more."""
        for torn in self.path.glob(f"shard-*{TORN}"):
            with contextlib.suppress(OSError):  # another time
                torn.unlink()

    def _lock(self) -> None:
        """Two runs that write here at once would do the same work."""
        descriptor = os.open(self.path, os.O_RDONLY)
        self._release = weakref.finalize(self, os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.release()
            raise UsageError(f"{self.path} is in use by another run. Wait for it, or give another --out.") from None
        except OSError as error:
            log.info("%s: no locks on this file system (%s)", self.path, error)

    def _go_on(self, settings: Mapping[str, Any], resume: bool) -> bool:
        found = self.manifest()
        # A manifest and nothing else: its run ended before it had anything to keep, such as for a misspelt model, and
        # so decides nothing about the next one.
        nothing = (MANIFEST, *self.tells)
        if found is None or all(one.name in nothing or one.name.endswith(TORN) for one in self.path.iterdir()):
            if found is None and any(self.shards()):
                raise UsageError(f"{self.path} has shards but no {MANIFEST}. Give another folder with --out.")
            self.remove_torn()
            self._write_manifest({"schema": self._schema, "settings": settings})
            return False
        if not resume:
            raise UsageError(
                f"{self.path} holds {self._holds} already. Add --resume to go on with "
                f"{'them' if self._holds == 'records' else 'it'}, or give another --out."
            )
        if shown := differences(found["settings"], settings):
            raise UsageError(
                f"{self.path} was made with other settings ({shown}). Use those, or give another folder with --out."
            )
        self.remove_torn()
        return True

    def _write_manifest(self, manifest: Mapping[str, Any]) -> None:
        text = json.dumps(manifest, indent=2, ensure_ascii=False) + "\n"
        put_whole(self.path / MANIFEST, lambda file: file.write(text.encode()))


def unwritable(path: Path, error: OSError, what: str = "records") -> WorkError:
    cure = "Free some space" if error.errno in FULL else "Mend that"
    return WorkError(
        f"{what} cannot be written to {path}: {error.strerror}. What was finished before is kept. "
        f"{cure}, then run again with --resume."
    )


def differences(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """For people, with the names of settings within settings; "" when there are none."""
    return "; ".join(_differences(found, wanted, ""))


def _differences(found: Mapping[str, Any], wanted: Mapping[str, Any], before: str) -> Iterator[str]:
    """Within settings of the same names: of others all is shown, as one that is missing is not one that is null."""
    for name in sorted({*found, *wanted}):
        there, here = found.get(name), wanted.get(name)
        if isinstance(there, Mapping) and isinstance(here, Mapping) and there.keys() == here.keys():
            yield from _differences(there, here, f"{before}{name}.")
        elif there == here:
            continue
        elif name in DIGESTS and name not in found:
            yield f"{DIGESTS[name]}: not noted there, as an earlier gpuinfer wrote it"
        elif name in DIGESTS and there and here:
            yield f"{DIGESTS[name]}: changed since"
        else:
            yield f"{before}{name}: {_short(there)} there, {_short(here)} here"


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_VALUE else f"{text[: SHOWN_VALUE - 3]}…"
