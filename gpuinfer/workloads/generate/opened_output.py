"""An output that has been opened: it takes lines, and knows the rows that it holds; and the note of how it was made."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpuinfer.api import Lane
from gpuinfer.errors import UsageError
from gpuinfer.serving.openai.row_names import KeySet, NamedRow
from gpuinfer.workloads.generate.answer_lines import EarlierAnswers, read_key
from gpuinfer.workloads.generate.output_writer import OutputWriter, SpillFile

BEFORE, EARLY = ".before", ".early"
STDOUT = "standard output"
NOTE, NOTE_SCHEMA = ".run.json", "gpuinfer.generate/1"

log = logging.getLogger(__name__)


class OpenedOutput:
    """An opened output: `descriptor` takes lines, `done` are the rows that it holds.

    A file has a `path`, with a note; `is_ours`: there was no such file before. Else it is a stream.
    """

    def __init__(
        self,
        name: str,
        descriptor: int,
        *,
        path: Path | None = None,
        note: RunNote | None = None,
        is_ours: bool = False,
        done: KeySet | None = None,
    ) -> None:
        self.name, self.descriptor, self.path = name, descriptor, path
        self.done = KeySet() if done is None else done
        self.aside: SpillFile | None = None  # for answers that wait for an earlier one
        self.before: EarlierAnswers | None = None
        self._note, self._is_ours, self._finished = note, is_ours, False
        self.is_useless = False  # it goes when it is closed

    def writer(self, lane: Lane | None) -> OutputWriter:
        """What writes lines to it; `lane` learns of its time. Belongs to the event loop on which this is called."""
        return OutputWriter(self.descriptor, self.name, lane, self.aside, self.path)

    def check_names(self, rows: Sequence[NamedRow]) -> None:
        """Give an error to rows whose answers it cannot keep under their ids. All rows come by, in their order."""

    def take(self, digest: str) -> bytes | None:
        """The line of the row of this digest, where an earlier run has answered it and it is to be put in its place."""
        stores = [store for store in (self.aside, self.before) if store is not None]
        lines = [line for store in stores if (line := store.take(digest)) is not None]
        return lines[0] if lines else None

    def left(self) -> Iterator[bytes]:
        """Lines in the spill file of an earlier run whose rows have not come yet."""
        return iter(()) if self.aside is None else self.aside.left

    def rest(self) -> Iterator[bytes]:
        """Lines of an earlier run whose rows the input has no more, each once."""
        for line in (*self.left(), *(self.before.rest() if self.before else ())):
            found = read_key(line)
            if found is not None and not self.done.count([found[0]])[0]:
                yield line

    def finish(self, useless: bool = False) -> None:
        """Everything that there was to write has been written. `useless`: no row of the input was right, and a file
        that this run has made is removed. May take a while. Raises `WorkError`.
        """
        self.is_useless = useless and self._is_ours
        if self.before is not None:
            self.before.path.unlink()
        if self.aside is not None:
            self.aside.remove()
        self._finished = True

    def _is_empty(self) -> bool:
        return not os.fstat(self.descriptor).st_size and not (self.path and output_parts(self.path))

    def _remove(self) -> None:
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Without a single answer no file stays, so that the next run may have any settings."""
        for store in (self.aside, self.before):
            if store is not None:
                store.close()
        if self._note is not None and self.path is not None:
            unused = (not self._finished and self._is_empty()) or self.is_useless
            if unused and self._is_ours:
                self._remove()
            self._note.close(remove=unused)
        if self.name != STDOUT:
            os.close(self.descriptor)


def waiting_files(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + BEFORE), path.with_name(path.name + EARLY)


def output_parts(path: Path) -> list[Path]:
    """Files of an output that hold something."""
    return [one for one in (path, *waiting_files(path)) if one.exists() and one.stat().st_size]


class RunNote:
    """The note of the output at `path`, locked. Raises `UsageError` when another run has it."""

    def __init__(self, output: Path) -> None:
        self.path = output.with_name(output.name + NOTE)
        while True:
            lock = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(lock)
                why = f"{output} is being written by another run. Wait for it, or give another --output."
                raise UsageError(why) from None
            except OSError as error:
                log.info("%s: no locks on this file system (%s)", self.path, error)
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), self.path.stat()):
                    self._descriptor = lock
                    return
            os.close(lock)  # the run that had it has removed it meanwhile

    def settings(self) -> Mapping[str, Any] | None:
        """Those of the run that began this output; None when nothing legible says them."""
        try:
            note: Any = json.loads(os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0))
            return dict(note["settings"]) if note["schema"] == NOTE_SCHEMA else None
        except (ValueError, KeyError, TypeError, RecursionError):
            return None

    def write(self, settings: Mapping[str, Any]) -> None:
        text = json.dumps({"schema": NOTE_SCHEMA, "settings": settings}, indent=2, ensure_ascii=False) + "\n"
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, text.encode(), 0)
        os.fsync(self._descriptor)

    def close(self, remove: bool = False) -> None:
        """Release the lock. An empty note is deleted."""
        if remove or not os.fstat(self._descriptor).st_size:
            self.path.unlink(missing_ok=True)
        os.close(self._descriptor)
