"""A profile of this process: torch's profiler over all threads for a bounded time, written as a Chrome trace with one
more row for each lane, whose ranges are the lane's stations. A lane's station may begin on one thread and end on
another, so that its ranges are recorded here, at each change: a `record_function` ends on the thread that began it.

With CUDA each station is an NVTX range too. Under Nsight Systems, which has the device's counters for itself, there is
nothing but these ranges, and no trace of torch's.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec

from gpuinfer import stats
from gpuinfer.api import Setup
from gpuinfer.errors import UsageError
from gpuinfer.stats import Lane

log = logging.getLogger(__name__)

MOST_S = 60.0  # of one profile
LOOK_S = 0.05  # between two checks whether a profile is to begin or to end
NSYS = "NSYS_PROFILING_SESSION_ID"  # set by nsys for what it starts
SUFFIX = ".trace.json"
CATEGORY = "station"
WAITING = ("idle", "queue")  # stations of a lane that has no work
_BASE = re.compile(rb'"baseTimeNanoseconds":\s*(\d+)')
_EVENTS = re.compile(rb'"traceEvents":\s*\[')
_PIECE = 1 << 20  # bytes
COMPLAINT = b"ERROR: External init callback must run in same thread"
_one = threading.Lock()

Change = tuple[int, Lane, str, str]
"""When, in nanoseconds since 1970, a lane has left which station for which."""


class StationRanges:
    """The lanes' changes of station, from `start` to `stop`, and as NVTX ranges where there is CUDA."""

    def __init__(self, nvtx: Any = None) -> None:
        self._changes: list[Change] = []
        self._nvtx, self._open = nvtx, dict[int, int]()  # lane → its range
        self._began = self._ended = 0

    def start(self) -> None:
        self._began = time.time_ns()
        stats.watch_stations(self._changed)

    def stop(self) -> None:
        stats.watch_stations(None)
        self._ended = time.time_ns()
        for opened in list(self._open.values()):
            self._nvtx.range_end(opened)
        self._open.clear()

    def _changed(self, lane: Lane, left: str, entered: str) -> None:
        """Called by the thread that takes the lane from one station to the next."""
        self._changes.append((time.time_ns(), lane, left, entered))
        if self._nvtx is not None:
            if (opened := self._open.pop(id(lane), None)) is not None:
                self._nvtx.range_end(opened)
            self._open[id(lane)] = self._nvtx.range_start(f"{lane.name}: {entered}")

    def events(self, base_ns: int) -> Iterator[dict[str, Any]]:
        """As Chrome's "Trace Event Format" has them: times in microseconds from `base_ns` on. Idle time is a gap."""
        lanes: dict[int, tuple[int, int, str, Lane]] = {}  # lane → its row, since when it is where
        pid = os.getpid()
        for at, lane, left, entered in self._changes:
            row, since, _, _ = lanes.get(id(lane), (len(lanes), self._began, left, lane))
            lanes[id(lane)] = (row, at, entered, lane)
            if left != "idle":
                yield _range(left, pid, row, since - base_ns, at - since)
        for row, since, station, lane in lanes.values():
            if station != "idle":
                yield _range(station, pid, row, since - base_ns, self._ended - since)
            named = {"ph": "M", "pid": pid, "tid": _row(row)}
            yield {**named, "name": "thread_name", "args": {"name": f"gpuinfer: {lane.name}"}}
            yield {**named, "name": "thread_sort_index", "args": {"sort_index": row - 1000}}


def _row(row: int) -> int:
    return (1 << 24) + row  # no thread of Linux has such a number


def _range(station: str, pid: int, row: int, begin_ns: int, length_ns: int) -> dict[str, Any]:
    where = {"pid": pid, "tid": _row(row), "ts": begin_ns / 1e3, "dur": length_ns / 1e3}
    return {"ph": "X", "cat": CATEGORY, "name": station, **where}


class Profile:
    """One profile: `start`, and `stop` on the same thread; then `write`, on any. One at a time in a process."""

    def __init__(self) -> None:
        self._torch: Any = None
        self._stations = StationRanges(_nvtx())

    def start(self) -> None:
        """Raises `UsageError` while another one is made, and where torch's profiler sees one thread alone."""
        if not _one.acquire(blocking=False):
            raise UsageError("a profile of this process is being made. Wait until it is over.")
        try:
            # A process that computes with a server's answers has no torch, and gets none for this.
            self._torch = _torch_profiler() if "torch" in sys.modules and NSYS not in os.environ else None
            if self._torch is not None:
                with _without_complaints():
                    self._torch.__enter__()
            self._stations.start()
        except BaseException:
            _one.release()
            raise

    def stop(self) -> None:
        try:
            self._stations.stop()
            if self._torch is not None:
                self._torch.__exit__(None, None, None)
        finally:
            _one.release()

    def write(self, path: Path) -> None:
        """Replaces the file. Raises `OSError`."""
        draft = path.with_name(f".{path.name}.part")
        try:
            if self._torch is None:
                draft.write_bytes(b'{"baseTimeNanoseconds": 0, "traceEvents": [\n]}')
            else:
                self._torch.export_chrome_trace(str(draft))
            self._add_stations(draft, path)
        finally:
            draft.unlink(missing_ok=True)
            self._torch = None

    def _add_stations(self, source: Path, target: Path) -> None:
        """Copy the trace with the stations as its first events, piece by piece: it may be large."""
        encode = msgspec.json.Encoder().encode
        with source.open("rb") as read, target.open("wb") as write:
            head = read.read(_PIECE)
            found, base = _EVENTS.search(head), _BASE.search(head)
            if found is None or base is None:
                raise OSError(f"torch has written a trace of an unknown form ({source.name})")
            write.write(head[: found.end()])
            rest = head[found.end() :]
            several = rest.lstrip()[:1] != b"]"
            mark = b"\n"
            for event in self._stations.events(int(base[1])):
                write.write(mark + encode(event))
                mark = b",\n"
            if mark != b"\n" and several:
                write.write(b",")
            while rest:
                write.write(rest)
                rest = read.read(_PIECE)


def _torch_profiler() -> Any:
    """Raises `UsageError` for a torch that profiles no other threads than its own."""
    import torch
    from torch.autograd import profiler

    try:
        config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True, trace_only=True)
    except TypeError:
        try:
            config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
        except TypeError:
            raise UsageError(
                f"the profiler of torch {torch.__version__} sees one thread alone. Install torch 2.9 or later."
            ) from None
    cuda = torch.cuda.is_available()
    return profiler.profile(use_device="cuda" if cuda else None, use_kineto=True, experimental_config=config)


@contextlib.contextmanager
def _without_complaints() -> Iterator[None]:
    """Leave out what torch's profiler (Kineto) prints when it first starts on another thread than the one that has
    imported torch, which is no fault; all else that the process prints meanwhile is passed on.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # nor that it starts and stops
    kept = os.dup(2)
    try:
        with tempfile.TemporaryFile() as printed:
            os.dup2(printed.fileno(), 2)
            try:
                yield
            finally:
                os.dup2(kept, 2)
                printed.seek(0)
                lines = printed.read().splitlines(keepends=True)
                os.write(2, b"".join(line for line in lines if not line.startswith(COMPLAINT)))
    finally:
        os.close(kept)


def _nvtx() -> Any:
    """Where a device of CUDA is at work in this process."""
    torch = sys.modules.get("torch")
    return torch.cuda.nvtx if torch is not None and torch.cuda.is_initialized() else None


class ProfileWindow:
    """The profile of a run's process, from when its work begins, for so many seconds or to its end, to a file. `look`
    is called again and again, and `end` at last, on one thread.
    """

    def __init__(self, folder: str, name: str, seconds: float) -> None:
        self._path, self._seconds = Path(folder, f"{name}{SUFFIX}"), seconds
        self._profile: Profile | None = None
        self._ends_at, self._over = 0.0, False
        self._writing: threading.Thread | None = None
        self._begun = threading.Event()  # a lane has been at work
        stats.watch_stations(self._first)

    @classmethod
    def of(cls, setup: Setup, name: str) -> ProfileWindow | None:
        """None where no profile is wanted."""
        return None if setup.profile is None else cls(setup.profile, name, setup.profile_s)

    def _first(self, lane: Lane, left: str, entered: str) -> None:
        if entered not in WAITING:
            self._begun.set()

    def look(self) -> None:
        """Begin or end the profile when its time has come. What goes wrong is logged: no run ends for it."""
        if self._over:
            return
        try:
            if self._profile is None:
                if self._begun.is_set():
                    profile = Profile()
                    profile.start()
                    self._profile, self._ends_at = profile, time.monotonic() + self._seconds
            elif time.monotonic() >= self._ends_at:
                self._end(self._profile)
        except Exception as error:  # noqa: BLE001 (whatever the profiler raises)
            self._failed(error)

    def end(self) -> None:
        """End the profile, if it has begun and goes on."""
        if self._profile is None:
            self._over = True
            stats.watch_stations(None)
        self._ends_at = 0.0
        self.look()

    def join(self) -> None:
        """Wait until the profile is written, on any thread."""
        if self._writing is not None:
            self._writing.join()

    def _end(self, profile: Profile) -> None:
        self._over = True
        profile.stop()
        self._writing = threading.Thread(target=self._write, args=(profile,), name="gpuinfer-profile")
        self._writing.start()

    def _write(self, profile: Profile) -> None:
        try:
            profile.write(self._path)
        except Exception as error:  # noqa: BLE001 (a full disk, a profiler's own)
            self._failed(error)
        finally:
            gc.collect()  # of events there are many

    def _failed(self, error: Exception) -> None:
        self._over = True
        log.warning("there is no profile %s: %s", self._path, error)


@contextlib.asynccontextmanager
async def profiled(window: ProfileWindow | None) -> AsyncIterator[None]:
    """Look after the window meanwhile, on this event loop."""
    if window is None:
        yield
        return

    async def look() -> None:
        while True:
            window.look()
            await asyncio.sleep(LOOK_S)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.wait({looking})
        window.end()
        await asyncio.to_thread(window.join)
