"""The format of traces, and the recorder: writes what happens in one engine's queue to a part of the trace, as cheaply
as it can. A trace is JSON lines (`docs/traces.md`): a header, one list for each event in the order of their times,
an end that counts them. While a run goes on each engine writes a part of its own beside it. A part's lines are `KIND
MICROSECONDS REST`: the clock as it stands, and what follows the engine's number in the trace. A part that was closed
ends in `end`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import re
import stat
import threading
import time
from collections.abc import Hashable, Sequence
from pathlib import Path

from gpuinfer.api import Limits, Reason, Request, Setup
from gpuinfer.errors import UsageError
from gpuinfer.stats import ERRORS

SCHEMA = "gpuinfer.trace/1"
PART_SCHEMA = "gpuinfer.trace-part/1"
PART_END = "end\n"
KINDS = ("a", "c", "b", "s")  # arrived, cut, backend has answered, settled
OUTCOMES = ("ok", *ERRORS)
MOST_ROWS = 2**53  # of one request
LONGEST_S = 1e9  # of a time; a deadline further away is none
TEXT_CHARS = 200  # of a client's or a group's name; the rest is cut off
WHOLE = "whole"  # in the place of a part's number: the trace while it is put together


def part_path(trace: Path, number: int | str) -> Path:
    """Where this process writes a part: hidden beside the trace."""
    return trace.with_name(f".{trace.name}.{os.getpid()}.{number}.part")


def lock_path(trace: Path) -> Path:
    """What the run that records to this trace holds locked."""
    return trace.with_name(f".{trace.name}.lock")


def trace_parts(trace: Path) -> list[Path]:
    """All parts that lie beside a trace. Only plain files of this user's count: others may write to the folder too."""
    pattern = re.compile(rf"\.{re.escape(trace.name)}\.\d+\.(\d+|{WHOLE})\.part")
    found = []
    for path in sorted(trace.parent.iterdir()):
        with contextlib.suppress(OSError):
            if pattern.fullmatch(path.name) and stat.S_ISREG((status := path.lstat()).st_mode):
                found += [path] if status.st_uid == os.geteuid() else []
    return found


def create_private(path: Path) -> int:
    """A descriptor of a new file that only this user may read. Raises `OSError`, also when there is one."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def unwritable_trace(trace: Path, error: OSError) -> UsageError:
    """What to say of a place that cannot be written."""
    return UsageError(f"--trace {trace}: {error.strerror}. Give a file in a folder of yours.")


log = logging.getLogger(__name__)

CHUNK_LINES = 512  # kept in memory at most
CHUNK_S = 1.0  # and for so long, as long as something happens: what a killed process loses
NAMES = 4096  # of clients and groups that are kept ready as JSON

_part_numbers = itertools.count()


class Recorder:
    """Records one engine. Every call belongs to one thread at a time, except `close`; none of them raises.

    The part is made with the first lines that are written. When that fails, the run goes on unrecorded and says so.
    Times are seconds of the engine's clock: the monotonic one, which all processes of a machine share. They are cut to
    microseconds, always downwards, so that what came later never comes earlier.
    """

    def __init__(self, trace: Path, limits: Limits | None = None, strategy: str | None = None) -> None:
        self.limits = limits  # for the header; may be set until the first requests come
        self._trace, self._strategy = trace, strategy
        self._requests = self._batches = 0
        self._numbers: dict[Request, str] = {}  # of requests that are not settled
        self._names: dict[Hashable, str] = {None: "null"}
        self._lines: list[str] = []
        self._flush_at = -math.inf
        self._lock = threading.Lock()  # of what is written
        self._descriptor: int | None = None
        self._over = False

    @classmethod
    def of(cls, setup: Setup, limits: Limits | None, strategy_name: str | None) -> Recorder | None:
        """One more recorder for the run's trace; None when the run records none."""
        return None if setup.trace is None else cls(Path(setup.trace), limits, strategy_name)

    def arrived(self, request: Request) -> None:
        """A request has arrived, also one that is turned away: then `settled` follows.

        One of a number of rows that cannot be is no load, and is not recorded.
        """
        if not 1 <= request.rows <= MOST_ROWS:
            return
        self._requests += 1
        number = self._numbers[request] = str(self._requests)
        arrived, names = request.arrived, self._names
        left_s = request.deadline - arrived
        line = "a %d %s,%d,%d,%s,%s,%s\n" % (  # noqa: UP031 (an f-string takes twice as long for an enumeration)
            arrived * 1e6,
            number,
            request.rows,
            request.priority,
            names.get(request.client) or self._name(request.client),
            f"{max(0.0, left_s):.6f}" if left_s < LONGEST_S else "null",
            names.get(request.group) or self._name(request.group),
        )
        self._add(line, arrived)

    def cut(self, requests: Sequence[Request], rows: int, reason: Reason, now: float) -> int:
        """These requests make a batch; returns its number, which `ran` takes."""
        self._batches += 1
        numbers = self._numbers
        members = ",".join([numbers[request] for request in requests if request in numbers])
        self._add(f'c {int(now * 1e6)} {self._batches},{int(rows)},"{reason.value}",[{members}]\n', now)
        return self._batches

    def ran(self, batch: int, seconds: float, now: float) -> None:
        """The backend has answered this batch, in so many seconds."""
        self._add(f"b {int(now * 1e6)} {batch},{seconds:.6f}\n", now)

    def settled(self, request: Request, outcome: str, now: float) -> None:
        """`outcome` is "ok" or one of `stats.ERRORS`. A request that has not arrived, or is settled, counts no more."""
        number = self._numbers.pop(request, None)
        if number is not None:
            self._add('s %d %s,"%s"\n' % (now * 1e6, number, outcome), now)  # noqa: UP031

    def close(self) -> None:
        """Write what is left. What comes later is not recorded."""
        if self._lines or self._descriptor is not None:
            self._flush(last=True)
        self._over = True

    def _add(self, line: str, now: float) -> None:
        lines = self._lines
        lines.append(line)
        if len(lines) >= CHUNK_LINES or now >= self._flush_at:
            self._flush_at = now + CHUNK_S
            self._flush()

    def _flush(self, last: bool = False) -> None:
        with self._lock:
            lines, self._lines = self._lines, []
            if self._over:
                return
            try:
                while self._descriptor is None:
                    with contextlib.suppress(FileExistsError):  # of a process long gone that had our number
                        self._descriptor = create_private(part_path(self._trace, next(_part_numbers)))
                        lines.insert(0, self._header())
                if last:
                    lines.append(PART_END)
                data = memoryview("".join(lines).encode("ascii"))
                while data:
                    data = data[os.write(self._descriptor, data) :]
            except OSError as error:
                log.warning("the trace ends here, as it cannot be written: %s. Make room there.", error.strerror)
                self._over = True
            if self._descriptor is not None and (last or self._over):
                os.close(self._descriptor)
                self._descriptor = None

    def _header(self) -> str:
        limits = self.limits and [self.limits.max_rows, self.limits.in_flight, self.limits.slots]
        clocks = {"wall": time.time(), "monotonic": time.monotonic()}
        return json.dumps({"schema": PART_SCHEMA, **clocks, "strategy": self._strategy, "limits": limits}) + "\n"

    def _name(self, name: Hashable) -> str:
        if len(self._names) >= NAMES:
            self._names = {None: "null"}
        try:
            told = str(name)
        except Exception:  # noqa: BLE001 (a workload's own object may raise anything)
            told = type(name).__name__
        text = self._names[name] = json.dumps(told[:TEXT_CHARS])
        return text
