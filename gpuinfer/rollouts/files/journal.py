"""Groups on their way into shards: added to a journal, line by line; when it is long enough it becomes a shard.

A shard of JSON is the journal under another name. One of Parquet is written from it, and then the journal goes: whoever
finds both knows that the shard is whole, and that all of the journal is in it.
"""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path

from gpuinfer.host.files import sync_folder
from gpuinfer.host.records import RecordFolder
from gpuinfer.rollouts.files import layout, lines

SHARD_BYTES = 64 << 20  # of journal, before it becomes a shard
APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC

log = logging.getLogger(__name__)


class Journal:
    """Belongs to one thread at a time. All of it raises `OSError` for what the disk refuses; what was added stays."""

    def __init__(self, folder: RecordFolder, form: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._form, self._shard_bytes = folder, form, shard_bytes
        self._number = 0
        self._bytes = 0
        self._descriptor: int | None = None

    def recover(self) -> set[int]:
        """What an earlier run left becomes shards; the numbers of all groups in them."""
        path = self._folder.path
        for stale in set(path.glob(f"shard-*{layout.JOURNAL}")) - set(layout.journals(path).values()):
            stale.unlink()
        for number, journal in layout.journals(path).items():
            _cut_torn(journal)
            self._seal(number, journal)
        whole = layout.shards(path)
        self._number = max(whole, default=-1) + 1
        return {group for shard in whole.values() for group in _numbers(self._folder, shard)}

    def add(self, line: bytes) -> None:
        """At the end. On the disk after `sync`."""
        if self._descriptor is None:
            self._descriptor = os.open(self._path, APPENDING, 0o666)
            sync_folder(self._folder.path)
        _write_whole_line(self._descriptor, line, self._bytes)
        self._bytes += len(line)

    @property
    def full(self) -> bool:
        """Whether it is to be sealed."""
        return self._bytes >= self._shard_bytes

    def sync(self) -> None:
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def seal(self) -> None:
        """Make it a shard, on the disk; what comes goes to the next."""
        if self._descriptor is None:
            return
        self.sync()
        self.close()
        self._seal(self._number, self._path)
        self._number, self._bytes = self._number + 1, 0

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    @property
    def _path(self) -> Path:
        return self._folder.path / layout.journal_name(self._number)

    def _seal(self, number: int, journal: Path) -> None:
        shard = self._folder.path / layout.shard_name(number, self._form)
        if not journal.stat().st_size:
            journal.unlink()
        elif self._form == "jsonl":
            journal.rename(shard)
        else:
            from gpuinfer.rollouts.files import parquet

            self._folder.put(shard.name, lambda file: parquet.write(file, parquet.groups_of(journal)))
            journal.unlink()
        sync_folder(self._folder.path)


def _write_whole_line(descriptor: int, line: bytes, before: int) -> None:
    """Of a line that could not be written whole nothing stays."""
    left = memoryview(line)
    try:
        while left:
            left = left[os.write(descriptor, left) :]
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, before)
            os.fsync(descriptor)
        raise


def _cut_torn(journal: Path) -> None:
    """Leave the groups up to the first line that is none: a killed run wrote no further."""
    whole = 0
    for line in layout.whole_lines(journal):
        if lines.decode(line) is None:
            break
        whole += len(line)
    if whole < journal.stat().st_size:
        with journal.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


def _numbers(folder: RecordFolder, shard: Path) -> set[int]:
    """The groups of a shard. Of one that is damaged those that can be read stay, and the others are played again."""
    if shard.suffix == ".parquet":
        from gpuinfer.rollouts.files import parquet

        if (numbers := parquet.numbers(shard)) is None:
            log.warning("%s is damaged: kept as .broken; its groups are played again", shard)
            shard.rename(shard.with_suffix(".broken"))
        return numbers or set()
    found = {number: len(line) for line in layout.whole_lines(shard) if (number := lines.number(line)) is not None}
    if sum(found.values()) < shard.stat().st_size:
        log.warning("%s is damaged: kept as .broken; its groups that cannot be read are played again", shard)
        kept = [line for line in layout.whole_lines(shard) if lines.number(line) is not None]
        with contextlib.suppress(FileExistsError):
            os.link(shard, shard.with_suffix(".broken"))
        folder.put(shard.name, lambda file: file.writelines(kept))
    return set(found)
