"""Writes groups as they end. A thread does it, so that nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import spoken
from gpuinfer.host.records import RecordFolder, unwritable
from gpuinfer.rollouts.files import layout, lines
from gpuinfer.rollouts.files.journal import SHARD_BYTES, Journal
from gpuinfer.rollouts.record import Group

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
        form: layout.Form,
        header: Mapping[str, Any],
        *,
        resume: bool = False,
        shard_bytes: int = SHARD_BYTES,
    ) -> None:
        if form not in layout.FORMS:
            raise UsageError(f"there is no form {form} of records. Give one of {', '.join(layout.FORMS)}.")
        if form == "parquet":
            from gpuinfer.rollouts.files import parquet

            parquet.require("--format parquet")
        self._folder = RecordFolder(Path(folder), layout.SCHEMA, f".{form}")
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
                groups=len(self._done), shards=[one.name for one in layout.shards(self._folder.path).values()]
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
                f"records cannot be written to {self._folder.path}: {spoken.in_full(error)}. Report this."
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
                self._journal.add(lines.encode(order))
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
