"""Puts lines where they belong: at once, whole, and on the disk in groups. A thread does it, so that nothing waits."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import stat
import threading
import time

from gpuinfer.api import Lane
from gpuinfer.errors import WorkError

SYNC_S, SYNC_BYTES = 1.0, 8 << 20  # whichever comes first: a line is on the disk no later
MOST_WAITING = 4 << 20  # bytes that wait to be written, before those who bring more must wait
END_S = 30.0  # for the last bytes to be taken; a reader that has stopped reading is not waited for longer
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Outlet:
    """Writes to a descriptor, which stays the caller's. `name` is what people call it.

    `add` belongs to the event loop. After a failure nothing more is written, and everything raises it; of a regular
    file the line that was half written is taken back. `lane` is told of the thread's time: write, sync.
    """

    def __init__(self, descriptor: int, name: str, lane: Lane | None = None) -> None:
        self._descriptor, self._name = descriptor, name
        self._enter = (lambda station: None) if lane is None else lane.enter
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._waiting: list[bytes] = []
        self._bytes = 0
        self._change = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._wanted = False  # somebody waits for room
        self._thread = threading.Thread(target=self._work, name="gpuinfer-output", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether so much waits that nobody should bring more before `room`."""
        return self._bytes > MOST_WAITING

    def add(self, line: bytes) -> None:
        """Write it soon. Raises `WorkError` when something could not be written."""
        if self._failure is not None:
            raise self._failure
        with self._change:
            if not self._waiting:
                self._change.notify()
            self._waiting.append(line)
            self._bytes += len(line)

    async def room(self) -> None:
        """Wait while too much waits to be written."""
        while self.full and self._failure is None:
            self._room.clear()
            self._wanted = True
            if self.full and self._failure is None:  # the thread may not have seen that somebody waits
                await self._room.wait()
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Everything is on the disk when this returns. Raises `WorkError` when it cannot be."""
        with self._change:
            self._closing = True
            self._change.notify()
        await asyncio.to_thread(self._thread.join, END_S)
        if self._failure is not None:
            raise self._failure
        if self._thread.is_alive():
            raise WorkError(f"nobody has read {self._name} for {END_S:g} s. Read it, then run again with --resume.")

    def _work(self) -> None:
        try:
            self._write_all()
        except BrokenPipeError as error:
            self._failure = error  # whoever reads has enough
        except OSError as error:
            self._failure = unwritable(self._name, error)
            self._failure.__cause__ = error
        finally:
            self._say_room()

    def _write_all(self) -> None:
        unsynced, since = 0, time.monotonic()
        while True:
            with self._change:
                if not self._waiting and not self._closing:
                    self._change.wait(SYNC_S if unsynced else None)
                lines, self._waiting = self._waiting, []
                self._bytes, over = 0, self._closing and not lines
            if lines:
                self._say_room()
                since = since if unsynced else time.monotonic()
                self._enter("write")
                unsynced += self._write(b"".join(lines))
                self._enter("idle")
            if unsynced and (over or unsynced > SYNC_BYTES or time.monotonic() > since + SYNC_S):
                self._sync()
                unsynced = 0
            if over:
                return

    def _say_room(self) -> None:
        if not self._wanted:
            return
        self._wanted = False
        with contextlib.suppress(RuntimeError):  # the loop is gone
            self._loop.call_soon_threadsafe(self._room.set)

    def _write(self, data: bytes) -> int:
        """Raises what the disk raises, with only whole lines left behind where that can be had."""
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            self._take_back(data[: len(data) - len(left)])
            raise
        return len(data)

    def _take_back(self, written: bytes) -> None:
        torn = len(written) - (written.rfind(b"\n") + 1)
        if torn and self._regular:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - torn)
                self._sync()

    def _sync(self) -> None:
        if self._regular:
            self._enter("sync")
            os.fsync(self._descriptor)
            self._enter("idle")


def unwritable(name: str, error: OSError) -> WorkError:
    cure = "Free some space" if error.errno in FULL else "Mend that"
    return WorkError(
        f"answers cannot be written to {name}: {error.strerror}. What was answered before is kept. "
        f"{cure}, then run again with --resume."
    )
