"""Where answers go: a file that a run can go on with, or a stream. Beside a file lies a note of how it was made.

The note (`out.jsonl.run.json`) is written before the first answer and stays: it holds the settings and the model's
fingerprint, and whoever writes to the output holds a lock on it. With ordered output, what must be put in the midst of
old answers (`--retry-errors`) is written anew from the start, and old answers come from `out.jsonl.before` until all is
done.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpuinfer.errors import UsageError
from gpuinfer.workloads.generate.done import Done, Earlier, rewrite, sync_folder
from gpuinfer.workloads.generate.seen import Seen

SCHEMA = "gpuinfer.generate/1"
NOTE, BEFORE = ".run.json", ".before"

log = logging.getLogger(__name__)


class Output:
    """An opened output: `descriptor` takes lines, `done` are the rows that it holds, `earlier` may be taken over."""

    def __init__(self, name: str, descriptor: int, lock: int | None = None) -> None:
        self.name = name
        self.descriptor = descriptor
        self.done = Seen()
        self.earlier: Earlier | None = None
        self._lock = lock

    def finish(self) -> None:
        """Everything that there was to write has been written."""
        if self.earlier is not None:
            self.earlier.path.unlink()

    def close(self) -> None:
        if self.earlier is not None:
            self.earlier.close()
        for descriptor in (self.descriptor, self._lock):
            if descriptor is not None and descriptor > 2:
                os.close(descriptor)


def check(name: str, input_name: str, resume: bool) -> None:
    """Raises `UsageError` for an output that cannot be. Touches nothing."""
    path = Path(name)
    if name == "-" or (path.exists() and not path.is_file() and not path.is_dir()):
        if resume:
            raise UsageError(f"--resume needs to see what is done, and --output {name} cannot be read. Give a file.")
        return
    if path.is_dir():
        raise UsageError(f"--output {name}: this is a folder. Give a file, such as {path / 'answers.jsonl'}.")
    if not path.parent.is_dir():
        raise UsageError(f"--output {name}: there is no folder {path.parent}. Create it (mkdir -p {path.parent}).")
    if input_name != "-" and path.exists() and Path(input_name).exists() and path.samefile(input_name):
        raise UsageError(f"--input and --output are the same file, {name}. Give the answers a file of their own.")
    if path.exists() and not resume:
        raise UsageError(f"{name} exists already. Add --resume to go on with it, or give another --output.")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise UsageError(f"--output {name} cannot be written. Give a file in a folder of yours.")


def open_output(
    name: str, settings: Mapping[str, Any], *, resume: bool = False, retry: bool = False, ordered: bool = False
) -> Output:
    """Claim the output for a run of these settings. May take a while: what there is is read.

    Raises `UsageError` when there are answers and `resume` is not set, when they were made with other settings, or when
    another run writes there.
    """
    if name == "-":
        sys.stdout.flush()
        return Output("standard output", sys.stdout.fileno())
    path = Path(name)
    try:
        if path.exists() and not path.is_file():  # a device, or a pipe
            return Output(name, os.open(path, os.O_WRONLY | os.O_CLOEXEC))
        with contextlib.ExitStack() as if_refused:
            lock = _claim(path.resolve())
            if_refused.callback(os.close, lock)
            output = _opened(path.resolve(), lock, json.loads(json.dumps(dict(settings))), resume, retry, ordered)
            if_refused.pop_all()
        return output
    except OSError as error:
        raise UsageError(f"--output {name} cannot be written: {error.strerror}. Give another.") from error


def _claim(path: Path) -> int:
    """A lock on the output's note."""
    note = path.with_name(path.name + NOTE)
    lock = os.open(note, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        raise UsageError(f"{path} is being written by another run. Wait for it, or give another --output.") from None
    except OSError as error:
        log.info("%s: no locks on this file system (%s)", note, error)
    return lock


def _opened(path: Path, lock: int, settings: Mapping[str, Any], resume: bool, retry: bool, ordered: bool) -> Output:
    before = path.with_name(path.name + BEFORE)
    if path.exists() and not resume:  # since it was looked for
        raise UsageError(f"{path} exists already. Add --resume to go on with it, or give another --output.")
    if before.exists() or (path.exists() and path.stat().st_size):
        _refuse_difference(path, _noted(lock), settings)
    else:
        _note(lock, settings)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    done = _mend(path, before, retry, ordered) if path.exists() else Seen()
    output = Output(str(path), os.open(path, flags, 0o666), lock)
    output.done = done
    output.earlier = Earlier(before) if before.exists() else None
    sync_folder(path.parent)
    return output


def _mend(path: Path, before: Path, retry: bool, ordered: bool) -> Seen:
    """Leave only whole lines that are to stay; the rows that are done."""
    with path.open("r+b") as file:
        done = Done(file, retry and not before.exists())
        if done.whole_bytes < os.fstat(file.fileno()).st_size:
            file.truncate(done.whole_bytes)
    if done.unreadable:
        log.warning("%s: %d lines cannot be read; their rows are asked again", path, done.unreadable)
    if not done.dropped:
        return done.rows
    if ordered and not before.exists():
        path.rename(before)
        return Seen()
    rewrite(path, done.keeps)
    return done.rows


def _note(lock: int, settings: Mapping[str, Any]) -> None:
    text = json.dumps({"schema": SCHEMA, "settings": settings}, indent=2, ensure_ascii=False) + "\n"
    os.ftruncate(lock, 0)
    os.pwrite(lock, text.encode(), 0)
    os.fsync(lock)


def _noted(lock: int) -> Mapping[str, Any] | None:
    """The settings of the run that began this output; None when nothing legible says them."""
    try:
        note: Any = json.loads(os.pread(lock, os.fstat(lock).st_size, 0))
        return dict(note["settings"]) if note["schema"] == SCHEMA else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _refuse_difference(path: Path, found: Mapping[str, Any] | None, wanted: Mapping[str, Any]) -> None:
    if found is None:
        raise UsageError(f"{path}{NOTE} does not say how {path} was made. Give another --output.")
    different = [name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]
    if different:
        shown = "; ".join(
            f"{name}: {_short(found.get(name))} there, {_short(wanted.get(name))} here" for name in different
        )
        raise UsageError(f"{path} was made with other settings ({shown}). Use those, or give another --output.")


def _short(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "…"


def is_stream(name: str) -> bool:
    """Whether the output is no regular file, so that nobody can go on with it."""
    return name == "-" or (Path(name).exists() and not stat.S_ISREG(os.stat(name).st_mode))
