"""Writes lines to the output whole, by a thread that syncs them in groups.

Lines are written as they come or in the order of their rows; lines that wait for an earlier one lie in a spill file.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from gpuinfer.api import Lane
from gpuinfer.errors import WorkError
from gpuinfer.host.files import FULL, sync_folder
from gpuinfer.host.journal import AppendFile, JournalThread
from gpuinfer.serving.openai.row_names import KeySet
from gpuinfer.workloads.generate.answer_lines import digest_key, read_key

MOST_WAITING = 4 << 20  # bytes that wait to be written, before those who bring more must wait
END_S = 30.0  # for the last bytes to be taken; a reader that has stopped reading is not waited for longer


class Spilled(bytes):
    """A line that waits for an earlier one."""


class OutputWriter(JournalThread["bytes | list[bytes]"]):
    """Writes to a descriptor, which stays the caller's. `name` is what people call the output; `aside` takes lines that
    wait for earlier ones. `path`: where the output's file has to stay, if it is a file; answers that are removed
    meanwhile are not called done.

    After a failure nothing more is written; of a regular file the line that was half written is taken back. `lane` is
    told of the thread's time: write, sync.
    """

    def __init__(
        self,
        descriptor: int,
        name: str,
        lane: Lane | None = None,
        aside: SpillFile | None = None,
        path: Path | None = None,
    ) -> None:
        super().__init__("gpuinfer-output", MOST_WAITING)
        self._file, self._name, self._aside, self._path = AppendFile(descriptor), name, aside, path
        self._enter = (lambda station: None) if lane is None else lane.enter
        self.start()

    def put(self, line: bytes, aside: bool = False) -> None:
        """Write the line soon, or keep it `aside` on the disk until it is put. Raises `WorkError` after a failure."""
        if not aside:
            self.add(line, len(line))
        elif self._aside is not None:
            self.add(Spilled(line), len(line))

    def put_all(self, lines: Sequence[bytes], aside: bool = False) -> None:
        """As `put`, several."""
        if lines and (not aside or self._aside is not None):
            self.add_all([Spilled(line) for line in lines] if aside else lines, sum(map(len, lines)))

    def keep_aside(self, lines: Iterable[bytes]) -> None:
        """All other lines that were put aside have been put."""
        if self._aside is not None:
            self.add(list(lines))

    async def close(self) -> None:
        """Everything is on the disk when this returns. Raises `WorkError` when it cannot be."""
        self._patience_s = END_S
        await super().close()

    def _stuck(self) -> WorkError:
        return WorkError(f"nobody has read {self._name} for {END_S:g} s. Read it, or give --output a file.")

    def _write(self, items: Sequence[bytes | list[bytes]]) -> int:
        """Lines first: those that leave the spill file are in the output by then."""
        aside: list[bytes] = []
        kept: list[bytes] | None = None  # what alone stays in the spill file, before `aside` comes
        lines: list[bytes] = []
        for item in items:
            if isinstance(item, list):
                kept, aside = item, []
            else:
                (aside if isinstance(item, Spilled) else lines).append(item)
        self._enter("write")
        written = self._file.append(b"".join(lines))
        if self._aside is not None:
            if kept is not None:
                self._sync()
                self._aside.anew(kept)
            if aside:
                written += self._aside.append(b"".join(aside))
        self._enter("idle")
        return written

    def _sync(self) -> None:
        if self._file.regular:
            self._enter("sync")
            self._file.sync()
            if self._aside is not None:
                self._aside.sync()
            self._enter("idle")
        self._finish()

    def _finish(self) -> None:
        if displaced := self._displaced():
            raise displaced

    def _failed(self, error: Exception) -> WorkError:
        if not isinstance(error, OSError):
            return super()._failed(error)
        if displaced := self._displaced():
            return displaced
        if isinstance(error, BrokenPipeError):
            return WorkError(f"{self._name} was closed before all was answered. To go on later, give --output a file.")
        what = f"answers cannot be written to {self._name}: {error.strerror}."
        if not self._file.regular:
            return WorkError(f"{what} Give another --output.")
        cure = "Free some space" if error.errno in FULL else "Mend that"
        return WorkError(f"{what} What was answered before is kept. {cure}, then run again with --resume.")

    def _displaced(self) -> WorkError | None:
        """Why what is written does not come to lie at `path` any more, if so."""
        if self._path is None:
            return None
        try:
            opened = os.fstat(self._file.descriptor)
            if os.path.samestat(opened, self._path.stat()):
                return None
            there = "another file lies there now"
        except (FileNotFoundError, NotADirectoryError):
            there = "it is not there any more"
        except OSError:  # it cannot be known
            return None
        if not opened.st_nlink:
            return WorkError(
                f"{self._name} was removed while answers were written to it; {there}. They are lost: --resume has "
                "nothing to go on with. Run again, and leave the file and its folder alone until the run has ended."
            )
        with contextlib.suppress(OSError):  # Linux alone says where
            place = os.readlink(f"/proc/self/fd/{self._file.descriptor}")
            there += f", and the answers are in {place}" if os.path.exists(place) else ""
        return WorkError(
            f"{self._name} was moved while answers were written to it; {there}. What was answered before is kept. Move "
            f"it back to {self._path} with the files beside it, then run again with --resume."
        )


class SpillFile:
    """The file of lines that wait. `left` are lines of an earlier run, taken when their rows come; they are in memory.

    `append`, `anew` and `sync` belong to the thread that writes. There is no file before there is a line.
    """

    def __init__(self, path: Path, left: Iterable[bytes] = ()) -> None:
        self.path = path
        self._file: AppendFile | None = None
        self._left = {found[0]: line for line in left if (found := read_key(line)) is not None}
        if self._left or path.exists():
            self.anew(self._left.values())

    @property
    def left(self) -> Iterator[bytes]:
        """The lines of an earlier run that have not been taken."""
        yield from self._left.values()

    def take(self, digest: str) -> bytes | None:
        """The line of the row of this digest."""
        return self._left.pop(digest_key(digest), None) if self._left else None

    def append(self, data: bytes) -> int:
        """Returns the data's length. Raises `OSError`."""
        if self._file is None:
            self._file = AppendFile(self.path)
            sync_folder(self.path.parent)
        return self._file.append(data)

    def anew(self, lines: Iterable[bytes]) -> None:
        """Replace the content by these lines. A crash leaves the old file or the new one. Raises `OSError`."""
        new = self.path.with_name(f"{self.path.name}.new")
        file = AppendFile(new, empty=True)
        try:
            file.append(b"".join(lines))
            file.sync()
            new.replace(self.path)
            sync_folder(self.path.parent)
        except BaseException:
            file.close()
            with contextlib.suppress(OSError):
                new.unlink(missing_ok=True)
            raise
        self.close()
        self._file = file

    def sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def remove(self) -> None:
        """Delete the file: no line waits any more."""
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

    def __init__(self, writer: OutputWriter, window: float, others: Callable[[], Iterable[bytes]] = tuple) -> None:
        self._writer, self._window, self._others = writer, window, others
        self._held: dict[int, bytes] = {}
        self._next = 0
        self._moved = asyncio.Event()
        self._bytes_aside = self.held_bytes = 0

    def add(self, place: int, line: bytes, kept: bool = False) -> None:
        """Each place from 0 comes exactly once. `kept`: the line is on the disk elsewhere."""
        self.add_all((place,), (line,), kept)

    def add_all(self, places: Iterable[int], lines: Iterable[bytes], kept: bool = False) -> None:
        """As `add`, several, in the order of their places."""
        due, early, held = list[bytes](), list[int](), self._held
        for place, line in zip(places, lines, strict=True):
            if place != self._next:
                held[place] = line
                early.append(place)
                self.held_bytes += len(line)
                continue
            due.append(line)
            self._next += 1
            while held and (found := held.pop(self._next, None)) is not None:
                due.append(found)
                self.held_bytes -= len(found)
                self._next += 1
        if due:
            self._writer.put_all(due)
            self._moved.set()
        if early and not kept:
            aside = [held[place] for place in early if place in held]
            self._writer.put_all(aside, aside=True)
            self._bytes_aside += sum(map(len, aside))
            if self._bytes_aside > max(LEAST_ASIDE, SHARE * self.held_bytes):
                self._writer.keep_aside([*self._others(), *held.values()])
                self._bytes_aside = self.held_bytes

    async def near(self, place: int) -> None:
        """Wait until this place is within the window."""
        while place >= self._next + self._window:
            self._moved.clear()
            await self._moved.wait()

    def let_go(self) -> int:
        """Write what is held although lines before it are missing: none will come. How many there were."""
        held = [self._held.pop(place) for place in sorted(self._held)]
        for line in held:
            self._writer.put(line)
        return len(held)

    @property
    def waiting(self) -> int:
        """How many lines are held."""
        return len(self._held)


class UnorderedOutput:
    """Writes each line as it comes."""

    waiting = held_bytes = 0

    def __init__(self, writer: OutputWriter) -> None:
        self._writer = writer

    def add(self, place: int, line: bytes, kept: bool = False) -> None:
        self._writer.put(line)

    def add_all(self, places: Iterable[int], lines: Sequence[bytes]) -> None:
        self._writer.put_all(lines)

    async def near(self, place: int) -> None:
        return

    def let_go(self) -> int:
        return 0
