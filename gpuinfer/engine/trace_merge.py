"""Joins the parts that a run's engines have written into one trace, in the order of their times.

Only a stretch of each part is in memory: a part is nearly sorted, since each thread of an engine writes soon after it
has read the clock. One run at a time records to one file: a second run would take the parts of the first for leftovers.
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import heapq
import io
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TextIO

from gpuinfer import __version__
from gpuinfer.engine.trace_recorder import (
    KINDS,
    PART_END,
    PART_SCHEMA,
    SCHEMA,
    WHOLE,
    create_private,
    lock_path,
    part_path,
    trace_parts,
    unwritable_trace,
)
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.files import no_folder


@contextlib.contextmanager
def alone(trace: Path) -> Iterator[None]:
    """Hold the trace's lock. The system lets go of it when the process ends, however it does.

    Raises `UsageError` while another run records to this file, and where no file can be made. Where files cannot be
    locked, as on some network drives, nothing is.
    """
    path = lock_path(trace)
    try:
        while True:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(descriptor)
                raise UsageError(
                    f"--trace {trace}: another run records to this file. Wait for its end, or name another file."
                ) from None
            except OSError:
                break
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor)):
                    break
            os.close(descriptor)  # the process that held the lock has removed the file meanwhile
    except OSError as error:
        raise unwritable_trace(trace, error) from error
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            lock_path(trace).unlink(missing_ok=True)  # while it is still held, so that it is ours that goes
        os.close(descriptor)


log = logging.getLogger(__name__)

STRETCH = 20_000  # lines of a part that are sorted together, twice over; a line may be late by as many at most
HEADER_BYTES = 10_000

Entry = tuple[int, int, str, str]  # microseconds, number of the engine, kind, the rest of the line


@dataclass(frozen=True, slots=True)
class Merged:
    """A trace that has been put together."""

    path: Path
    requests: int  # that arrived
    incomplete: int  # engines that were killed, or found no more room, before they could write all


@contextlib.contextmanager
def recording(trace: str | None, merged: Callable[[Merged], None] = lambda merged: None) -> Iterator[None]:
    """Record what runs inside to this file: `prepare` before, `merge` after, whatever happens. None: do nothing.

    `merged` gets the outcome. Raises what they raise, an error from inside before all others, and `UsageError`
    while another run records to the same file.
    """
    if trace is None:
        yield
        return
    _check(Path(trace))
    with alone(Path(trace)):
        prepare_trace(trace)
        try:
            yield
        except BaseException:
            try:
                merged(merge_trace(trace))
            except WorkError as error:
                log.warning("%s", error)
            raise
        merged(merge_trace(trace))


def prepare_trace(trace: str | Path) -> None:
    """Make sure that the trace can be written, and take away what a run that crashed has left.

    A trace that is there stays until the new one takes its place. Raises `UsageError`.
    """
    path = Path(trace)
    _check(path)
    try:
        for part in trace_parts(path):
            part.unlink(missing_ok=True)
        probe = part_path(path, WHOLE)
        os.close(create_private(probe))
        probe.unlink()
    except OSError as error:
        raise unwritable_trace(path, error) from error


def _check(path: Path) -> None:
    """Raises `UsageError` for a place where no trace can be."""
    if path.is_dir():
        raise UsageError(f"--trace {path}: this is a folder. Give a file, such as {path / 'trace.jsonl'}.")
    if path.exists() and not path.is_file():
        raise UsageError(f"--trace {path}: this is no plain file. Give a file of its own, such as trace.jsonl.")
    if not path.parent.is_dir():
        raise no_folder("--trace", path)


def merge_trace(trace: str | Path) -> Merged:
    """Put the trace together, replace what was there by it at once, and take the parts away.

    Raises `WorkError` when it cannot be written; then the parts stay until the next `prepare`.
    """
    path = Path(trace)
    temporary = part_path(path, WHOLE)
    try:
        found = [one for one in trace_parts(path) if one != temporary]
        parts = sorted(filter(None, map(_TracePart.of, found)), key=lambda part: float(part.header["monotonic"]))
        temporary.unlink(missing_ok=True)
        counts = _write_whole(temporary, path.suffix == ".gz", parts)
        temporary.replace(path)
        for one in found:
            one.unlink(missing_ok=True)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise WorkError(f"the trace could not be written to {path}: {error.strerror}. Make room there.") from error
    return Merged(path, counts["a"], sum(not part.complete for part in parts))


@dataclass(frozen=True, slots=True)
class _TracePart:
    path: Path
    header: dict[str, Any]
    complete: bool

    @classmethod
    def of(cls, path: Path) -> _TracePart | None:
        """None for one that was killed before it had written its first line."""
        with path.open("rb") as file:
            first = file.readline(HEADER_BYTES)
            file.seek(max(0, path.stat().st_size - len(PART_END) - 1))
            last = file.read()
        try:
            header = json.loads(first)
            known = header["schema"] == PART_SCHEMA and first.endswith(b"\n")
        except (ValueError, TypeError, KeyError):
            return None
        return cls(path, header, last == f"\n{PART_END}".encode()) if known else None

    def entries(self, engine: int) -> Iterator[Entry]:
        """Its events in the order of their times, those of one time as they were written."""
        with self.path.open(encoding="ascii", errors="replace", newline="\n") as file:
            next(file)
            lines = self._read(file, engine)
            held: list[Entry] = []
            while stretch := list(itertools.islice(lines, STRETCH)):
                held += stretch
                held.sort(key=lambda entry: entry[0])
                yield from held[:-STRETCH]
                del held[:-STRETCH]
            yield from held

    def _read(self, file: TextIO, engine: int) -> Iterator[Entry]:
        """Up to the first line that is not whole, which none is behind."""
        for line in file:
            kind, _, rest = line.partition(" ")
            at, _, rest = rest.partition(" ")
            if not (at.isdecimal() and kind in KINDS and rest.endswith("\n")):
                return
            yield int(at), engine, kind, rest[:-1]


def _write_whole(path: Path, packed: bool, parts: list[_TracePart]) -> dict[str, int]:
    """Write the trace to a new file; how many events of each kind it has."""
    with contextlib.ExitStack() as stack:
        file: Any = stack.enter_context(os.fdopen(create_private(path), "wb"))
        below = stack.enter_context(gzip.GzipFile("", "wb", 6, file)) if packed else file
        text = stack.enter_context(io.TextIOWrapper(below, encoding="ascii", newline="\n"))
        counts = _write_lines(text, parts)
        text.flush()
        if packed:
            below.close()
        file.flush()
        os.fsync(file.fileno())
    return counts


def _write_lines(text: TextIO, parts: list[_TracePart]) -> dict[str, int]:
    entries = heapq.merge(*(part.entries(engine) for engine, part in enumerate(parts)))
    first = next(entries, None)
    start = last = 0 if first is None else first[0]
    counts = dict.fromkeys(KINDS, 0)
    head = parts[0].header if parts else {"wall": time.time(), "monotonic": start / 1e6}
    wall = datetime.fromtimestamp(head["wall"] + start / 1e6 - head["monotonic"], UTC)
    header = {
        "schema": SCHEMA,
        "started_at": wall.isoformat(timespec="milliseconds"),
        "gpuinfer": __version__,
        "strategy": head.get("strategy"),
        "engines": len(parts),
        "limits": head.get("limits"),
        "incomplete": sum(not part.complete for part in parts),
    }
    text.write(json.dumps(header) + "\n")
    for at, engine, kind, rest in itertools.chain([] if first is None else [first], entries):
        counts[kind] += 1
        last = max(last, at)  # a line that came later than any stretch sorts
        text.write(f'["{kind}",{(last - start) / 1e6:.6f},{engine},{rest}]\n')
    text.write(json.dumps(["end", round((last - start) / 1e6, 6), counts]) + "\n")
    return counts
