"""Writes groups as they end, by a thread: to a journal, line by line, which becomes a shard when it is long enough."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.files import RecordFolder, sync_folder, unwritable
from gpuinfer.host.journal import AppendFile, JournalThread, cut_torn, whole_lines
from gpuinfer.rollouts.files import shards
from gpuinfer.rollouts.record import Group

SHARD_BYTES = 64 << 20  # of journal, before it becomes a shard
MOST_QUEUED = 16  # groups, before `Writer.add` waits
PATIENCE_S = 120.0  # for the disk to take something

log = logging.getLogger(__name__)


class ShardJournal:
    """The journal that becomes the next shard. Belongs to one thread at a time.

    All methods raise `OSError` for what the disk refuses; what was added stays.
    """

    def __init__(self, folder: RecordFolder, form: str, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder, self._form, self._shard_bytes = folder, form, shard_bytes
        self._number = self._bytes = 0
        self._file: AppendFile | None = None

    def recover(self) -> set[int]:
        """What an earlier run left becomes shards; the numbers of all groups in them."""
        path = self._folder.path
        for stale in set(path.glob(f"shard-*{shards.JOURNAL}")) - set(shards.list_journals(path).values()):
            stale.unlink()
        for number, journal in shards.list_journals(path).items():
            cut_torn(journal, lambda line: shards.decode(line) is not None)
            self._seal(number, journal)
        whole = shards.list_shards(path)
        self._number = max(whole, default=-1) + 1
        return {group for shard in whole.values() for group in _numbers(self._folder, shard)}

    def add(self, line: bytes) -> int:
        """At the end; sealed when the journal is long enough. Returns how many bytes are to be synced."""
        if self._file is None:
            self._file = AppendFile(self._folder.path / shards.journal_name(self._number))
            sync_folder(self._folder.path)
        self._bytes += self._file.append(line)
        if self._bytes < self._shard_bytes:
            return len(line)
        self.seal()
        return 0

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def seal(self) -> None:
        """Make it a shard, on the disk; the next group begins another journal."""
        if self._file is None:
            return
        self.sync()
        self.close()
        self._seal(self._number, self._folder.path / shards.journal_name(self._number))
        self._number, self._bytes = self._number + 1, 0

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _seal(self, number: int, journal: Path) -> None:
        shard = self._folder.path / shards.shard_name(number, self._form)
        if not journal.stat().st_size:
            journal.unlink()
        elif self._form == "jsonl":
            journal.rename(shard)
        else:
            from gpuinfer.rollouts.files import parquet

            groups = (group for line in whole_lines(journal) if (group := shards.decode(line)) is not None)
            self._folder.put(shard.name, lambda file: parquet.write_groups(file, groups))
            journal.unlink()
        sync_folder(self._folder.path)


def _numbers(folder: RecordFolder, shard: Path) -> set[int]:
    """The groups of a shard. Of one that is damaged those that can be read stay, and the others are played again."""
    if shard.suffix == ".parquet":
        from gpuinfer.rollouts.files import parquet

        if (numbers := parquet.numbers(shard)) is None:
            log.warning("%s is damaged: kept as .broken; its groups are played again", shard)
            shard.rename(shard.with_suffix(".broken"))
        return numbers or set()
    found = {group.number: line for line in whole_lines(shard) if (group := shards.decode(line)) is not None}
    if sum(map(len, found.values())) < shard.stat().st_size:
        log.warning("%s is damaged: kept as .broken; its groups that cannot be read are played again", shard)
        with contextlib.suppress(FileExistsError):
            os.link(shard, shard.with_suffix(".broken"))
        folder.put(shard.name, lambda file: file.writelines(found.values()))
    return set(found)


class GroupWriter(JournalThread["Group | bytes"]):
    """Writes groups, or their lines, to the journal of a claimed folder, and lets others have the folder after a
    failure.
    """

    _patience_s = PATIENCE_S

    def __init__(self, folder: RecordFolder, journal: ShardJournal) -> None:
        super().__init__("gpuinfer rollouts", MOST_QUEUED)
        self._folder, self._journal = folder, journal
        self.start()

    def _write(self, items: Sequence[Group | bytes]) -> int:
        return sum(self._journal.add(one if isinstance(one, bytes) else shards.encode(one)) for one in items)

    def _sync(self) -> None:
        self._journal.sync()

    def _finish(self) -> None:
        self._journal.seal()

    def _release(self) -> None:
        self._journal.close()
        if self._failure is not None:
            self._folder.release()

    def _stuck(self) -> WorkError:
        return WorkError(
            f"{self._folder.path} has taken nothing for {PATIENCE_S:g} s. See to its disk, then run again with "
            "--resume."
        )

    def _failed(self, error: Exception) -> WorkError:
        return unwritable(self._folder.path, error) if isinstance(error, OSError) else super()._failed(error)


class GroupKeeper(Protocol):
    """Where groups go that were played."""

    @property
    def done(self) -> Collection[int]:
        """The numbers of groups that are there."""
        ...

    async def add(self, group: Group) -> None: ...

    async def flush(self) -> None:
        """What was added is kept when this returns."""
        ...


class Writer:
    """The records of one run, in a folder that is its own until `close`. Its coroutines belong to one event loop; its
    making reads what is there, which may take long enough for a thread.

    `header` is what decides the records: the settings, the model's fingerprint; plain JSON. Raises `UsageError` when
    there are records and `resume` is not set, when they were made with another header, when another run writes here,
    and when a form needs a package that is not installed. What an earlier run left half written is removed.
    """

    def __init__(
        self,
        folder: str | Path,
        form: shards.Form,
        header: Mapping[str, Any],
        *,
        resume: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if form not in shards.FORMS:
            raise UsageError(f"there is no form {form} of records. Give one of {', '.join(shards.FORMS)}.")
        if form == "parquet":
            from gpuinfer.rollouts.files import parquet

            parquet.require_pyarrow("--format parquet")
        self._folder = RecordFolder(Path(folder), shards.SCHEMA, f".{form}")
        self._journal = ShardJournal(self._folder, form, shard_bytes)
        self._folder.claim({**header, "format": form}, resume)
        try:
            self._done = self._journal.recover()
        except BaseException as error:
            self._folder.release()
            if isinstance(error, OSError):
                raise unwritable(self._folder.path, error) from error
            raise
        self._started: GroupWriter | None = None
        self._closed = False

    @property
    def done(self) -> frozenset[int]:
        """The groups that are there: those of earlier runs, and those that were added."""
        return frozenset(self._done)

    @property
    def _thread(self) -> GroupWriter:
        """Started with the first group, on that event loop."""
        if self._started is None:
            self._started = GroupWriter(self._folder, self._journal)
        return self._started

    async def add(self, group: Group) -> None:
        """Write it soon; waits while too many are queued. Raises `WorkError` when something could not be written."""
        await self._add(group.number, group)

    async def add_line(self, number: int, line: bytes) -> None:
        """As `add`, the line that `shards.encode` has made of the group of this number, in another process."""
        await self._add(number, line)

    async def _add(self, number: int, group: Group | bytes) -> None:
        if number in self._done:
            raise ValueError(f"group {number} is there already")
        self._done.add(number)
        try:
            await self._thread.room()
            self._thread.add(group)
        except BaseException:
            self._done.discard(number)
            raise

    async def flush(self) -> None:
        """What was added is on the disk when this returns. Raises `WorkError` when it cannot be."""
        await self._thread.flush()

    async def close(self) -> None:
        """What was added is in whole shards when this returns, and others may write. Raises `WorkError` as `add`."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._thread.close()
            self._folder.note(
                groups=len(self._done), shards=[one.name for one in shards.list_shards(self._folder.path).values()]
            )
        finally:
            self._folder.release()
