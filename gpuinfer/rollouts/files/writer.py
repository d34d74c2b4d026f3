"""Writes groups as they end, by a thread so that nothing waits: to a journal, line by line, which becomes a shard when
it is long enough.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import error_text
from gpuinfer.host.files import RecordFolder, sync_folder, unwritable
from gpuinfer.rollouts.files import shards
from gpuinfer.rollouts.record import Group

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
        for stale in set(path.glob(f"shard-*{shards.JOURNAL}")) - set(shards.list_journals(path).values()):
            stale.unlink()
        for number, journal in shards.list_journals(path).items():
            _cut_torn(journal)
            self._seal(number, journal)
        whole = shards.list_shards(path)
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
        return self._folder.path / shards.journal_name(self._number)

    def _seal(self, number: int, journal: Path) -> None:
        shard = self._folder.path / shards.shard_name(number, self._form)
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
    for line in shards.whole_lines(journal):
        if shards.decode(line) is None:
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
    found = {
        number: len(line) for line in shards.whole_lines(shard) if (number := shards.group_number(line)) is not None
    }
    if sum(found.values()) < shard.stat().st_size:
        log.warning("%s is damaged: kept as .broken; its groups that cannot be read are played again", shard)
        kept = [line for line in shards.whole_lines(shard) if shards.group_number(line) is not None]
        with contextlib.suppress(FileExistsError):
            os.link(shard, shard.with_suffix(".broken"))
        folder.put(shard.name, lambda file: file.writelines(kept))
    return set(found)


SYNC_S = 1.0  # a group is on the disk no later than this after it was written
MOST_WAITING = 16  # groups, before those who bring more must wait
PATIENCE_S = 120.0  # for the disk; whoever waits longer is told


class _Sync:
    """An order to the thread; `done` when all before it is on the disk."""

    done = False


class Writer:
    """The records of one run, in a folder that is its own until `close`. Its coroutines are those of one event loop; to
    make it takes as long as reading what is there, for which a thread may be the better place.

    `header` is what decides the records: the settings, the model's fingerprint; plain JSON. Raises `UsageError` when
    there are records and `resume` is not set, when they were made with another header, when another run writes here,
    and when a form needs a package that is not installed. What an earlier run left half written goes.
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

            parquet.require("--format parquet")
        self._folder = RecordFolder(Path(folder), shards.SCHEMA, f".{form}")
        self._journal = Journal(self._folder, form, shard_bytes)
        self._done = self._claimed({**header, "format": form}, resume)
        self._orders: queue.SimpleQueue[Group | _Sync | None] = queue.SimpleQueue()
        self._waiting = 0
        self._failure: WorkError | None = None
        self._ended = self._closed = False  # the thread; this
        self._loop: asyncio.AbstractEventLoop | None = None  # of whoever waits for the thread, once there is one
        self._moved = asyncio.Event()  # of this moment: set when the thread has come further, and replaced

    @property
    def done(self) -> frozenset[int]:
        """The groups that are there: those of earlier runs, and those that were added."""
        return frozenset(self._done)

    async def add(self, group: Group) -> None:
        """Write it soon; waits while too many wait. Raises `WorkError` when something could not be written."""
        if group.number in self._done:
            raise ValueError(f"group {group.number} is there already")
        self._done.add(group.number)
        self._start()
        try:
            while self._waiting >= MOST_WAITING and not self._ended:
                await self._further()
            self._raise()
        except BaseException:
            self._done.discard(group.number)
            raise
        self._waiting += 1
        self._orders.put(group)

    async def flush(self) -> None:
        """What was added is on the disk when this returns. Raises `WorkError` when it cannot be."""
        self._start()
        order = _Sync()
        self._orders.put(order)
        while not order.done and not self._ended:
            await self._further()
        self._raise()

    async def close(self) -> None:
        """What was added is in whole shards when this returns, and others may write. Raises `WorkError` as `add`."""
        if self._closed:
            return
        self._closed = True
        self._start()
        self._orders.put(None)
        try:
            while not self._ended:
                await self._further()
            self._raise()
            self._folder.note(
                groups=len(self._done), shards=[one.name for one in shards.list_shards(self._folder.path).values()]
            )
        finally:
            self._folder.release()

    def _start(self) -> None:
        """The thread, if it has not been."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._work, name="gpuinfer rollouts", daemon=True).start()

    def _claimed(self, header: Mapping[str, Any], resume: bool) -> set[int]:
        self._folder.claim(header, resume)
        try:
            return self._journal.recover()
        except OSError as error:
            self._folder.release()
            raise unwritable(self._folder.path, error) from error
        except BaseException:
            self._folder.release()
            raise

    async def _further(self) -> None:
        """Until the thread has done something. Raises `WorkError` when that takes too long."""
        try:
            await asyncio.wait_for(self._moved.wait(), PATIENCE_S)
        except TimeoutError:
            what = f"{self._folder.path} has taken nothing for {PATIENCE_S:g} s"
            raise WorkError(f"{what}. See to its disk, then run again with --resume.") from None

    def _raise(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _say(self, written: int, ended: bool) -> None:
        """On the loop: the thread has come further."""
        self._waiting -= written
        self._ended |= ended
        self._moved.set()
        self._moved = asyncio.Event()

    def _tell(self, written: int = 0, ended: bool = False) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is gone
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._say, written, ended)

    def _work(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            self._failure = unwritable(self._folder.path, error)
            self._failure.__cause__ = error
        except WorkError as error:
            self._failure = error
        except Exception as error:  # noqa: BLE001 (whoever brings groups must learn of it)
            self._failure = WorkError(
                f"records cannot be written to {self._folder.path}: {error_text.full_message(error)}. Report this."
            )
            self._failure.__cause__ = error
        finally:
            self._journal.close()
            if self._failure is not None:  # nothing more is written
                self._folder.release()
            self._tell(ended=True)

    def _write_all(self) -> None:
        sync_at: float | None = None  # when what was added must be on the disk
        while True:
            order = self._next(sync_at)
            if order is None:
                self._journal.seal()
                return
            if isinstance(order, Group):
                self._journal.add(shards.encode(order))
                sync_at = sync_at or time.monotonic() + SYNC_S
            else:
                self._journal.sync()
                sync_at = None
            if self._journal.full:
                self._journal.seal()
                sync_at = None
            if isinstance(order, _Sync):
                order.done = True
            self._tell(written=isinstance(order, Group))

    def _next(self, sync_at: float | None) -> Group | _Sync | None:
        """The next order; it is to sync when none has come in time."""
        if sync_at is not None and time.monotonic() >= sync_at:
            return _Sync()
        try:
            return self._orders.get(timeout=None if sync_at is None else max(0.0, sync_at - time.monotonic()))
        except queue.Empty:
            return _Sync()
