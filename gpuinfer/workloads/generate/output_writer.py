"""Writes lines to the output at once, whole, and on the disk in groups, by a thread so that nothing waits.

Lines leave as they come or in the order of their places; what must wait lies in a spill file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from gpuinfer.api import Lane
from gpuinfer.errors import WorkError
from gpuinfer.host.files import FULL, sync_folder
from gpuinfer.workloads.generate.answer_lines import key_of, read_key
from gpuinfer.workloads.generate.input_rows import KeySet

SYNC_S, SYNC_BYTES = 1.0, 8 << 20  # whichever comes first: a line is on the disk no later
MOST_WAITING = 4 << 20  # bytes that wait to be written, before those who bring more must wait
END_S = 30.0  # for the last bytes to be taken; a reader that has stopped reading is not waited for longer
APPENDING = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC


class OutputWriter:
    """Writes to a descriptor, which stays the caller's. `name` is what people call it; `aside` takes what must wait.
    `path` is where its file has to stay, if it is one: answers that are removed meanwhile are not called done.

    `add` and its like belong to the event loop. After a failure nothing more is written, and everything raises it; of a
    regular file the line that was half written is taken back. `lane` is told of the thread's time: write, sync.
    """

    def __init__(
        self,
        descriptor: int,
        name: str,
        lane: Lane | None = None,
        aside: SpillFile | None = None,
        path: Path | None = None,
    ) -> None:
        self._descriptor, self._name, self._aside, self._path = descriptor, name, aside, path
        self._enter = (lambda station: None) if lane is None else lane.enter
        self._regular = stat.S_ISREG(os.fstat(descriptor).st_mode)
        self._waiting: list[bytes] = []
        self._for_aside: list[bytes] = []
        self._aside_anew: list[bytes] | None = None  # what alone is to stay there, before `_for_aside` comes
        self._bytes = 0
        self._change = threading.Condition()
        self._closing = False
        self._failure: BaseException | None = None
        self._loop = asyncio.get_running_loop()
        self._room = asyncio.Event()
        self._wanted = False  # `room` is waited for
        self._thread = threading.Thread(target=self._work, name="gpuinfer-output", daemon=True)
        self._thread.start()

    @property
    def full(self) -> bool:
        """Whether so much waits that no more should come before `room`."""
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

    def put_aside(self, line: bytes) -> None:
        """Keep it until it is added. Raises `WorkError` when something could not be written."""
        if self._failure is not None:
            raise self._failure
        if self._aside is not None:
            with self._change:
                self._change.notify()
                self._for_aside.append(line)
                self._bytes += len(line)

    def keep_aside(self, lines: Iterable[bytes]) -> None:
        """Of what was put aside, all but these has been added."""
        if self._aside is not None:
            with self._change:
                self._change.notify()
                self._aside_anew, self._for_aside = list(lines), []

    async def room(self) -> None:
        """Wait while too much waits to be written."""
        while self.full and self._failure is None:
            self._room.clear()
            self._wanted = True
            if self.full and self._failure is None:  # the thread may not have seen that `room` is waited for
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
            raise WorkError(f"nobody has read {self._name} for {END_S:g} s. Read it, or give --output a file.")

    def _work(self) -> None:
        try:
            self._write_all()
        except OSError as error:
            self._failure = self._displaced() or output_unwritable(self._name, error, self._regular)
            self._failure.__cause__ = error
        except WorkError as error:
            self._failure = error
        finally:
            self._say_room()

    def _write_all(self) -> None:
        unsynced, since = 0, time.monotonic()
        while True:
            with self._change:
                if self._idle and not self._closing:
                    self._change.wait(SYNC_S if unsynced else None)
                over = self._closing and self._idle
                lines, self._waiting = self._waiting, []
                aside, self._for_aside = self._for_aside, []
                anew, self._aside_anew = self._aside_anew, None
                self._bytes = 0
            if lines or aside:
                self._say_room()
                since = since if unsynced else time.monotonic()
                self._enter("write")
                unsynced += self._write(b"".join(lines)) + self._lay_aside(b"".join(aside), anew)
                self._enter("idle")
            if unsynced and (over or unsynced > SYNC_BYTES or time.monotonic() > since + SYNC_S):
                self._sync()
                unsynced = 0
            if not unsynced and (displaced := self._displaced()):
                raise displaced
            if over:
                return

    @property
    def _idle(self) -> bool:
        return not (self._waiting or self._for_aside or self._aside_anew is not None)

    def _lay_aside(self, data: bytes, anew: list[bytes] | None) -> int:
        """After the lines that were added: those that leave the one file are in the other."""
        if self._aside is None:
            return 0
        if anew is not None:
            self._sync()
            self._aside.anew(anew)
        if data:
            self._aside.append(data)
        return len(data)

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
        if not self._regular:
            return
        self._enter("sync")
        os.fsync(self._descriptor)
        if self._aside is not None:
            self._aside.sync()
        self._enter("idle")

    def _displaced(self) -> WorkError | None:
        """Why what is written does not come to lie at `path` any more, if so."""
        if self._path is None:
            return None
        opened = os.fstat(self._descriptor)
        try:
            if os.path.samestat(opened, self._path.stat()):
                return None
            there = "another file lies there now"
        except (FileNotFoundError, NotADirectoryError):
            there = "it is not there any more"
        except OSError:  # nobody can tell
            return None
        if not opened.st_nlink:
            return WorkError(
                f"{self._name} was removed while answers were written to it; {there}. They are lost: --resume has "
                "nothing to go on with. Run again, and leave the file and its folder alone until the run has ended."
            )
        with contextlib.suppress(OSError):  # Linux alone says where
            place = os.readlink(f"/proc/self/fd/{self._descriptor}")
            there += f", and the answers are in {place}" if os.path.exists(place) else ""
        return WorkError(
            f"{self._name} was moved while answers were written to it; {there}. What was answered before is kept. Move "
            f"it back to {self._path} with the files beside it, then run again with --resume."
        )


def output_unwritable(name: str, error: OSError, regular: bool) -> WorkError:
    """`regular`: what was written can be gone on with."""
    if isinstance(error, BrokenPipeError):
        return WorkError(f"{name} was closed before all was answered. To go on later, give --output a file.")
    if not regular:
        return WorkError(f"answers cannot be written to {name}: {error.strerror}. Give another --output.")
    cure = "Free some space" if error.errno in FULL else "Mend that"
    return WorkError(
        f"answers cannot be written to {name}: {error.strerror}. What was answered before is kept. "
        f"{cure}, then run again with --resume."
    )


class SpillFile:
    """What waits. `left` are lines of an earlier run, to be taken when their rows come by; they are held in memory.

    `append`, `anew` and `sync` belong to the thread that writes. There is no file before there is a line.
    """

    def __init__(self, path: Path, left: Iterable[bytes] = ()) -> None:
        self.path = path
        self._descriptor: int | None = None
        self._left = {found[0]: line for line in left if (found := read_key(line)) is not None}
        if self._left or path.exists():
            self.anew(self._left.values())

    @property
    def left(self) -> Iterator[bytes]:
        """Lines that have not been taken."""
        yield from self._left.values()

    def take(self, digest: str) -> bytes | None:
        """The line of the row of this digest."""
        return self._left.pop(key_of(digest), None) if self._left else None

    def append(self, data: bytes) -> None:
        """Raises `OSError`."""
        if self._descriptor is None:
            self._descriptor = os.open(self.path, APPENDING, 0o666)
            sync_folder(self.path.parent)
        left = memoryview(data)
        while left:
            left = left[os.write(self._descriptor, left) :]

    def anew(self, lines: Iterable[bytes]) -> None:
        """Only these still wait. A crash leaves the old file or the new one. Raises `OSError`."""
        new = self.path.with_name(f"{self.path.name}.new")
        descriptor = os.open(new, APPENDING | os.O_TRUNC, 0o666)
        try:
            with os.fdopen(os.dup(descriptor), "wb") as file:
                file.writelines(lines)
            os.fsync(descriptor)
            new.replace(self.path)
            sync_folder(self.path.parent)
        except BaseException:
            os.close(descriptor)
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        self.close()
        self._descriptor = descriptor

    def sync(self) -> None:
        if self._descriptor is not None:
            os.fsync(self._descriptor)

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def remove(self) -> None:
        """Nothing waits any more."""
        self.close()
        self.path.unlink(missing_ok=True)


def unfinished_lines(path: Path, done: KeySet, retry: bool) -> list[bytes]:
    """The lines of an earlier run's file that are whole and of rows not done; with `retry` no errors among them."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        found = [(line, one) for line in file if (one := read_key(line)) is not None and not (retry and one[1])]
    known = done.has([key for _, (key, _) in found]) if found else []
    return [line for (line, _), was_done in zip(found, known, strict=True) if not was_done]


LEAST_ASIDE = 16 << 20  # bytes that lie aside, before those that wait no more are thrown out
SHARE = 4  # and how many times as many as those that still wait


class OrderedOutput:
    """Holds lines back until all before them have been written; meanwhile they lie aside.

    `window` bounds how far ahead of the first that is missing a line may come. `others` are lines that lie aside too.
    """

    def __init__(self, outlet: OutputWriter, window: int, others: Callable[[], Iterable[bytes]] = tuple) -> None:
        self._outlet, self._window, self._others = outlet, window, others
        self._held: dict[int, bytes] = {}
        self._next = 0
        self._moved = asyncio.Event()
        self._bytes_aside = self._bytes_held = 0

    def add(self, place: int, line: bytes, kept: bool = False) -> None:
        """Each place from 0 comes exactly once. `kept`: the line is on the disk elsewhere."""
        if place != self._next:
            self._hold(place, line, kept)
            return
        self._outlet.add(line)
        self._next += 1
        while (held := self._held.pop(self._next, None)) is not None:
            self._outlet.add(held)
            self._bytes_held -= len(held)
            self._next += 1
        self._moved.set()

    def _hold(self, place: int, line: bytes, kept: bool) -> None:
        self._held[place] = line
        self._bytes_held += len(line)
        if kept:
            return
        self._outlet.put_aside(line)
        self._bytes_aside += len(line)
        if self._bytes_aside > max(LEAST_ASIDE, SHARE * self._bytes_held):
            self._outlet.keep_aside([*self._others(), *self._held.values()])
            self._bytes_aside = self._bytes_held

    async def near(self, place: int) -> None:
        """Wait until this place is within the window."""
        while place >= self._next + self._window:
            self._moved.clear()
            await self._moved.wait()

    def let_go(self) -> int:
        """Write what is held although lines before it are missing: none will come. How many there were."""
        held = [self._held.pop(place) for place in sorted(self._held)]
        for line in held:
            self._outlet.add(line)
        return len(held)

    @property
    def waiting(self) -> int:
        """How many lines are held."""
        return len(self._held)


class UnorderedOutput:
    """Writes each line as it comes."""

    waiting = 0

    def __init__(self, outlet: OutputWriter) -> None:
        self._outlet = outlet

    def add(self, place: int, line: bytes, kept: bool = False) -> None:
        self._outlet.add(line)

    async def near(self, place: int) -> None:
        return

    def let_go(self) -> int:
        return 0
