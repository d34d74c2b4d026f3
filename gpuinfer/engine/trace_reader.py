"""Reads a trace: what arrived, which batches were cut, when they ran, how each request ended.

A trace may come from a stranger: everything is checked. One line at a time is in memory, and no line may be longer than
a recorder writes.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import shlex
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from gpuinfer.api import Limits, Priority, Reason
from gpuinfer.engine.trace_recorder import KINDS, LONGEST_S, MOST_ROWS, OUTCOMES, SCHEMA, TEXT_CHARS
from gpuinfer.errors import UsageError

HEADER_BYTES = 10_000
LINE_BYTES = 2**24  # a batch of a million requests fits
MOST_LINES = 10**8
MOST_ENGINES = 10**6
MOST_LANES = 10**4

PRIORITIES = tuple(Priority)
REASONS = {reason.value: reason for reason in Reason}
GZIP = b"\x1f\x8b"
AGAIN = "Record the run again, with --trace."

_decode = json.JSONDecoder().raw_decode


class Arrival(NamedTuple):
    """A request arrived. Times are seconds since the first event."""

    at: float
    rows: int
    priority: Priority = Priority.NORMAL
    client: str | None = None  # as text
    left_s: float | None = None  # to its deadline
    group: str | None = None
    engine: int = 0
    id: int = 0  # among those of its engine


class CutRecord(NamedTuple):
    at: float
    batch: int  # among those of its engine
    rows: int
    reason: Reason
    ids: Sequence[int]  # of its requests
    engine: int = 0


class RanRecord(NamedTuple):
    at: float
    batch: int
    seconds: float  # in the backend
    engine: int = 0


class Settle(NamedTuple):
    at: float
    id: int
    outcome: str  # "ok" or one of `stats.ERRORS`
    engine: int = 0


@dataclass(frozen=True, slots=True)
class Header:
    """What was recorded, and where."""

    started_at: str  # ISO 8601
    gpuinfer: str  # the version
    strategy: str | None
    engines: int
    limits: Limits | None  # of the first engine
    incomplete: int = 0  # engines that ended before they had written all


@dataclass(frozen=True, slots=True)
class Trace:
    header: Header
    arrivals: list[Arrival] = field(default_factory=list)
    cuts: list[CutRecord] = field(default_factory=list)
    batches: list[RanRecord] = field(default_factory=list)
    settles: list[Settle] = field(default_factory=list)


def read(path: str | Path, *, arrivals_only: bool = False) -> Trace:
    """Read and check a whole trace, packed by gzip or not; with `arrivals_only` the other lists stay empty.

    Raises `UsageError` for a file that is none, of another version, cut off or garbled.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():  # a pipe would be waited for, and a device has no end
            raise UsageError(f"the trace {path} cannot be read: it is no plain file. Give a file that is.")
        with path.open("rb") as file:
            packed = file.read(2) == GZIP
            file.seek(0)
            with gzip.GzipFile(fileobj=file) if packed else contextlib.nullcontext(file) as lines:
                return _Reader(path, lines, arrivals_only).read()
    except FileNotFoundError:
        raise UsageError(
            f"there is no trace {path}. Record one: run a workload with --trace {shlex.quote(str(path))}."
        ) from None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UsageError(f"the trace {path} is cut off or damaged: {error}. {AGAIN}") from error
    except OSError as error:
        raise UsageError(f"the trace {path} cannot be read: {error.strerror}. Give a file that can.") from error


class _Reader:
    def __init__(self, path: Path, lines: Any, arrivals_only: bool) -> None:
        self._path, self._lines, self._arrivals_only = path, lines, arrivals_only
        self._number = 1  # of the line
        self._names: dict[str | None, str | None] = {}  # each kept once
        self._open: dict[int, set[int]] = {}  # engine → requests that have arrived and not been settled
        self._newest: dict[int, int] = {}  # engine → its last request

    def read(self) -> Trace:
        trace = Trace(self._header())
        take: dict[str, Any] = {"a": self._arrival, "c": self._cut, "b": self._ran, "s": self._settle}
        keep: dict[str, Any] = {"a": trace.arrivals, "c": trace.cuts, "b": trace.batches, "s": trace.settles}
        engines = trace.header.engines
        counts, last, kept = dict.fromkeys(KINDS, 0), 0.0, KINDS[:1] if self._arrivals_only else KINDS
        for event in self._events():
            try:
                kind, at, *rest = event
                if kind == "end":
                    if rest != [counts] or at < last:
                        raise UsageError(
                            f"the trace {self._path} is cut off or damaged: its end counts other events than there "
                            f"are. {AGAIN}"
                        )
                    if self._lines.readline(1):
                        self._number += 1
                        self._refuse("behind the end of the trace")
                    return trace
                if not last <= at <= LONGEST_S:
                    self._refuse(f"its time {at!r} is before that of the line above, or none at all")
                if not (_is_number(at) and _is_count(rest[0]) and rest[0] < engines):
                    raise ValueError
                last = at
                one = take[kind](float(at), *rest)
            except (TypeError, ValueError, KeyError, IndexError):
                self._refuse("no event of a trace")
            counts[kind] += 1
            if kind in kept:
                keep[kind].append(one)
        raise UsageError(f"the trace {self._path} is cut off after line {self._number}: it has no end. {AGAIN}")

    def _header(self) -> Header:
        none = UsageError(f"{self._path} is no trace. Give a file that a run has recorded with --trace.")
        line = self._lines.readline(HEADER_BYTES)
        try:
            head = json.loads(line)
            schema = head["schema"]
        except (ValueError, TypeError, KeyError, RecursionError):
            raise none from None
        if not isinstance(schema, str) or not schema.startswith(SCHEMA.partition("/")[0] + "/"):
            raise none
        if schema != SCHEMA:
            raise UsageError(
                f"{self._path} is a trace of another version, {schema[:40]}; this gpuinfer reads {SCHEMA}. {AGAIN}"
            )
        try:
            return _as_header(**{key: value for key, value in head.items() if key != "schema"})
        except (TypeError, ValueError):
            self._refuse("no header of a trace")

    def _events(self) -> Iterator[list[Any]]:
        lines: BinaryIO = self._lines
        while line := lines.readline(LINE_BYTES):
            self._number += 1
            if self._number > MOST_LINES:
                raise UsageError(f"the trace {self._path} is too long: over {MOST_LINES} lines. Record a shorter run.")
            try:
                text = line.decode("ascii")
                event, end = _decode(text)
                whole = type(event) is list and text[end:] in ("\n", "")
            except (ValueError, RecursionError):
                whole = False
            if not whole:
                self._refuse("too long" if len(line) == LINE_BYTES else "no event of a trace")
            yield event

    def _refuse(self, what: str) -> NoReturn:
        raise UsageError(f"the trace {self._path} is garbled: line {self._number} is {what}. {AGAIN}")

    # Events; each raises TypeError, ValueError or KeyError when it is none

    def _arrival(
        self, at: float, engine: int, number: int, rows: int, priority: int, client: Any, left_s: Any, group: Any
    ) -> Arrival:
        if not (_is_count(number) and number > self._newest.get(engine, -1) and _is_count(priority)):
            raise ValueError
        if not (_is_count(rows) and 1 <= rows <= MOST_ROWS and (left_s is None or _is_number(left_s))):
            raise ValueError
        self._newest[engine] = number
        self._open.setdefault(engine, set()).add(number)
        who, which = self._name(client), self._name(group)
        return Arrival(at, rows, PRIORITIES[priority], who, left_s, which, engine, number)

    def _cut(self, at: float, engine: int, batch: int, rows: int, reason: str, ids: Any) -> CutRecord:
        if not (_is_count(batch) and _is_count(rows) and rows <= MOST_ROWS and set(map(type, ids)) == {int}):
            raise ValueError
        if type(ids) is not list or not self._open[engine].issuperset(ids):
            raise ValueError
        return CutRecord(at, batch, rows, REASONS[reason], ids, engine)

    def _ran(self, at: float, engine: int, batch: int, seconds: float) -> RanRecord:
        if not (_is_count(batch) and _is_number(seconds)):
            raise ValueError
        return RanRecord(at, batch, seconds, engine)

    def _settle(self, at: float, engine: int, number: int, outcome: str) -> Settle:
        if not _is_count(number) or outcome not in OUTCOMES:
            raise ValueError
        self._open[engine].remove(number)
        return Settle(at, number, outcome, engine)

    def _name(self, name: Any) -> str | None:
        if name is None:
            return None
        if type(name) is not str or len(name) > TEXT_CHARS:
            raise ValueError
        return self._names.setdefault(name, name)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return (type(value) is float or type(value) is int) and 0 <= value <= LONGEST_S


def _as_header(
    *,
    started_at: str,
    gpuinfer: str,
    strategy: str | None = None,
    engines: int = 1,
    limits: list[Any] | None = None,
    incomplete: int = 0,
    **_: Any,
) -> Header:
    """Raises `TypeError` or `ValueError`. What a later gpuinfer adds is left alone."""
    texts = all(isinstance(text, str) for text in (started_at, gpuinfer, strategy or ""))
    if not (texts and _is_count(incomplete) and _is_count(engines) and engines <= MOST_ENGINES):
        raise ValueError
    if limits is None:
        return Header(started_at, gpuinfer, strategy, engines, None, incomplete)
    max_rows, in_flight, slots = limits
    sizes = (max_rows, in_flight, max_rows if slots is None else slots)
    if not all(_is_count(one) and 0 < one <= MOST_ROWS for one in sizes) or in_flight > MOST_LANES:
        raise ValueError
    return Header(started_at, gpuinfer, strategy, engines, Limits(max_rows, in_flight, slots), incomplete)
