"""The output: a file that a later run can go on with, or a stream. Beside a file lies a note of how it was made.

The note (`out.jsonl.run.json`) is written before the first answer and stays: it holds the settings and the model's
fingerprint, and the run that writes to the output holds a lock on it. With ordered output, answers that wait for an
earlier one lie in `out.jsonl.early`; and what must be put in the midst of old answers (`--retry-errors`) is written
anew from the start, and old answers come from `out.jsonl.before` until all is done. An output without one answer binds
no later run.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.host.files import differences, no_folder, put_whole, sync_folder
from gpuinfer.serving.openai.row_names import KeySet
from gpuinfer.workloads.generate.answer_lines import DoneRows, EarlierAnswers, read_key
from gpuinfer.workloads.generate.output_writer import SpillFile, unfinished_lines

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
        that this run has made is removed.
        """
        self.is_useless = useless and self._is_ours
        if self.before is not None:
            self.before.path.unlink()
        if self.aside is not None:
            self.aside.remove()
        self._finished = True

    def close(self) -> None:
        """Without a single answer no file stays, so that the next run may have any settings."""
        for store in (self.aside, self.before):
            if store is not None:
                store.close()
        if self._note is not None and self.path is not None:
            empty = not self._finished and not os.fstat(self.descriptor).st_size and not _parts(self.path)
            unused = empty or self.is_useless
            if unused and self._is_ours:
                self.path.unlink(missing_ok=True)
            self._note.close(remove=unused)
        if self.name != STDOUT:
            os.close(self.descriptor)


def check_output(name: str, input_name: str, resume: bool) -> None:
    """Raises `UsageError` for an output that cannot be. Touches nothing."""
    path = Path(name)
    if name == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
        if resume:
            raise UsageError(f"--resume needs to see what is done, and --output {name} cannot be read. Give a file.")
        return
    if path.is_dir():
        raise UsageError(f"--output {name}: this is a folder. Give a file, such as {path / 'answers.jsonl'}.")
    if not path.parent.is_dir():
        raise no_folder("--output", path)
    if input_name != "-" and path.exists() and Path(input_name).exists() and path.samefile(input_name):
        raise UsageError(f"--input and --output are the same file, {name}. Give the answers a file of their own.")
    if not resume:
        _refuse_overwriting(path)
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--output {name} cannot be written. Give a file in a folder of yours.")


def open_output(
    name: str, settings: Mapping[str, Any], *, resume: bool = False, retry: bool = False, ordered: bool = False
) -> OpenedOutput:
    """Claim the output for a run of these settings. May take a while: what there is is read.

    Raises `UsageError` when there are answers and `resume` is not set, when they were made with other settings, or when
    another run writes there.
    """
    if name == "-":
        sys.stdout.flush()
        return OpenedOutput(STDOUT, sys.stdout.fileno())
    path = Path(name)
    try:
        if path.exists() and not path.is_file():  # a device, or a pipe
            return OpenedOutput(name, os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        with contextlib.ExitStack() as if_refused:
            note = RunNote(path.resolve())
            if_refused.callback(note.close)
            output = _opened(path.resolve(), note, json.loads(json.dumps(dict(settings))), resume, retry, ordered)
            if_refused.pop_all()
        return output
    except OSError as error:
        raise UsageError(f"--output {name} cannot be written: {error.strerror}. Give another.") from error


def _opened(
    path: Path, note: RunNote, settings: Mapping[str, Any], resume: bool, retry: bool, ordered: bool
) -> OpenedOutput:
    if not resume:  # there may be something since it was looked for
        _refuse_overwriting(path)
    if parts := _parts(path):
        found = note.settings()
        if found is None:
            raise UsageError(f"{note.path} does not say how {path} was made. Give another --output.")
        if shown := differences(found, settings):
            if any(map(_answers, parts)):
                raise UsageError(f"{path} was made with other settings ({shown}). Use those, or give another --output.")
            log.warning("%s held errors alone, of other settings (%s): it begins anew", path, shown)
            for part in parts:
                part.unlink()
    note.write(settings)
    is_new = not path.exists()
    before, early = _beside(path)
    retry = retry and not before.exists()  # else that has begun already
    done = KeySet() if is_new else _mend(path, before, retry, ordered)
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    output = OpenedOutput(str(path), descriptor, path=path, note=note, is_ours=is_new, done=done)
    if ordered:
        output.aside = SpillFile(early, unfinished_lines(early, done, retry))
        output.before = EarlierAnswers(before) if before.exists() else None
    sync_folder(path.parent)
    return output


def _beside(path: Path) -> tuple[Path, Path]:
    return path.with_name(path.name + BEFORE), path.with_name(path.name + EARLY)


def _parts(path: Path) -> list[Path]:
    """Files of an output that hold something."""
    return [one for one in (path, *_beside(path)) if one.exists() and one.stat().st_size]


def _refuse_overwriting(path: Path) -> None:
    for part in _parts(path):
        raise UsageError(f"{part} exists already. Add --resume to go on with it, or give another --output.")


def _answers(path: Path) -> bool:
    """Whether there is any line but errors."""
    with path.open("rb") as file:
        found = (read_key(line) for line in file if line.endswith(b"\n"))
        return any(one is None or not one[1] for one in found)


def _mend(path: Path, before: Path, retry: bool, ordered: bool) -> KeySet:
    """Remove torn lines and lines to be tried again; returns the rows that are done."""
    with path.open("r+b") as file:
        done = DoneRows(file, retry)
        if done.whole_bytes < os.fstat(file.fileno()).st_size:
            file.truncate(done.whole_bytes)
    if done.unreadable:
        log.warning("%s: %d lines cannot be read; their rows are asked again", path, done.unreadable)
    if done.dropped and ordered and not before.exists():
        path.rename(before)
        return KeySet()
    if done.dropped:  # a crash leaves the old file or the new one
        with path.open("rb") as old:
            put_whole(path, lambda new: new.writelines(line for line in old if done.keeps(line) is not None))
    return done.rows


def is_stream(name: str) -> bool:
    """Whether the output is no regular file, so that no run can go on with it."""
    return name == "-" or (Path(name).exists() and not stat.S_ISREG(os.stat(name).st_mode))


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
