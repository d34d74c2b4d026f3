"""Files to which whole lines are appended, by a thread that syncs them in groups, and which a later run goes on with.

After a crash such a file ends in a whole line or in a torn one, which the next run cuts off.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from gpuinfer.errors import WorkError
from gpuinfer.host import error_text

SYNC_S, SYNC_BYTES = 1.0, 8 << 20  # whichever comes first: what was written is on the disk no later

Item = TypeVar("Item")


class AppendFile:
    """A file that lines are appended to, made if need be, or an open descriptor, which stays its owner's.

    All methods raise `OSError` for what the disk refuses.
    """

    def __init__(self, place: Path | int, *, empty: bool = False) -> None:
        self._owns = not isinstance(place, int)
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | (os.O_TRUNC if empty else 0)
        self.descriptor = place if isinstance(place, int) else os.open(place, flags, 0o666)
        self.regular = stat.S_ISREG(os.fstat(self.descriptor).st_mode)

    def append(self, data: bytes) -> int:
        """Write all of it; returns its length. If the disk refuses some, a line that is half written is taken back."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self.descriptor, left) :]
        except OSError:
            written = data[: len(data) - len(left)]
            torn = len(written) - (written.rfind(b"\n") + 1)
            if torn and self.regular:
                with contextlib.suppress(OSError):
                    os.ftruncate(self.descriptor, os.fstat(self.descriptor).st_size - torn)
                    self.sync()
            raise
        return len(data)

    def sync(self) -> None:
        if self.regular:
            os.fsync(self.descriptor)

    def close(self) -> None:
        if self._owns:
            os.close(self.descriptor)


def whole_lines(path: Path) -> Iterator[bytes]:
    """Up to the first that is torn. Raises `OSError`."""
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                return
            yield line


def cut_torn(path: Path, is_whole: Callable[[bytes], bool] = lambda line: True) -> None:
    """Leave the lines up to the first that is torn, or that is not whole by the format's own rule. Raises `OSError`."""
    whole = 0
    for line in whole_lines(path):
        if not is_whole(line):
            break
        whole += len(line)
    if whole < path.stat().st_size:
        with path.open("r+b") as file:
            file.truncate(whole)
            os.fsync(file.fileno())


class JournalThread(ABC, Generic[Item]):
    """Writes items in their order in a thread of its own, so that the event loop never waits for a disk.

    `add` and the coroutines belong to the event loop on which this is made; `_write`, `_sync` and `_finish` run in the
    thread. After a failure nothing more is written, and the others raise the failure.
    """

    def __init__(self, name: str, most: int) -> None:
        """`most`: how much may be queued, in the unit of `add`'s `size`, before `room` waits."""
        self._most = most
        self._items: list[Item] = []
        self._queued = 0
        self._change = threading.Condition()
        self._flushes = self._flushed = 0  # requests for everything to be on the disk, and those that were served
        self._closing = self._ended = False
        self._failure: WorkError | None = None
        self._loop = asyncio.get_running_loop()
        self._moved = asyncio.Event()
        self._watched = False  # a coroutine waits for `_moved`
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether so much is queued that no more should be added before `room`."""
        return self._queued >= self._most

    def add(self, item: Item, size: int = 1) -> None:
        """Write the item soon. Raises `WorkError` when an earlier one could not be written."""
        if self._failure is not None:
            raise self._failure
        with self._change:
            if not self._items:
                self._change.notify()
            self._items.append(item)
            self._queued += size

    def add_all(self, items: Sequence[Item], size: int) -> None:
        """As `add`, several, of this size together."""
        if self._failure is not None:
            raise self._failure
        with self._change:
            if not self._items:
                self._change.notify()
            self._items.extend(items)
            self._queued += size

    async def room(self) -> None:
        await self._until(lambda: not self.full)

    async def flush(self) -> None:
        """What was added is on the disk when this returns."""
        with self._change:
            self._flushes += 1
            wanted = self._flushes
            self._change.notify()
        await self._until(lambda: self._flushed >= wanted)

    async def close(self) -> None:
        """What was added is on the disk, and the thread over, when this returns."""
        with self._change:
            self._closing = True
            self._change.notify()
        await self._until(lambda: self._ended)

    async def _until(self, reached: Callable[[], bool]) -> None:
        while not reached() and not self._ended:
            self._moved.clear()
            self._watched = True
            if reached() or self._ended:  # before the thread could see that it is watched
                break
            try:
                await asyncio.wait_for(self._moved.wait(), self._patience_s)
            except TimeoutError:
                raise self._stuck() from None
        if self._failure is not None:
            raise self._failure

    def _tell(self) -> None:
        if self._watched:
            self._watched = False
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._moved.set)

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # noqa: BLE001 (who adds items must learn of any fault)
            self._failure = error if isinstance(error, WorkError) else self._failed(error)
            if self._failure is not error:
                self._failure.__cause__ = error
        finally:
            self._release()
            self._ended = self._watched = True
            self._tell()

    def _write_all(self) -> None:
        unsynced, since = 0, time.monotonic()
        while True:
            with self._change:
                if not (self._items or self._closing or self._flushes > self._flushed):
                    self._change.wait(max(0.0, since + SYNC_S - time.monotonic()) if unsynced else None)
                items, self._items, self._queued = self._items, [], 0
                over, flushes = self._closing, self._flushes
            if items:
                self._tell()
                since = since if unsynced else time.monotonic()
                unsynced += self._write(items)
            due = over or unsynced > SYNC_BYTES or time.monotonic() >= since + SYNC_S
            if flushes > self._flushed or (unsynced and due):
                self._sync()
                unsynced, self._flushed = 0, flushes
                self._tell()
            if over:
                self._finish()
                return

    _patience_s: float | None = None  # for the thread to come further, before `_stuck` is raised

    def _stuck(self) -> WorkError:
        """The error where the thread does not come further; needed with `_patience_s`."""
        raise NotImplementedError

    @abstractmethod
    def _write(self, items: Sequence[Item]) -> int:
        """Write the items; returns how many bytes are to be synced."""

    @abstractmethod
    def _sync(self) -> None:
        """What was written is on the disk when this returns."""

    def _finish(self) -> None:
        """All is written and synced."""

    def _release(self) -> None:
        """The thread ends, after a failure too."""

    def _failed(self, error: Exception) -> WorkError:
        """The failure for what `_write`, `_sync` or `_finish` raised."""
        return WorkError(f"what was finished cannot be written: {error_text.full_message(error)}. Report this.")
