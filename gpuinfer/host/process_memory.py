"""How much memory this process holds, a limit on what it may take, and what page faults cost.

A page fault has no clock of its own, but the system time and the faults of the calling thread are counted: over many
stretches of work least squares tell the cost of a fault from that of other system calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import psutil

from gpuinfer.host.machine import rss_peak_mb

STATUS, CLEAR_REFS, OOM_SCORE = (
    Path("/proc/self/status"),
    Path("/proc/self/clear_refs"),
    Path("/proc/self/oom_score_adj"),
)
MEBIBYTE = 1 << 20


def resident_bytes() -> int:
    """What of this process lies in memory now."""
    return int(psutil.Process().memory_info().rss)


def peak_bytes() -> int:
    """The most that has lain there since the last `forget_peak`, or since the process began where nothing forgets."""
    return max(round(rss_peak_mb() * MEBIBYTE), resident_bytes())


def return_free_memory() -> None:
    """What this process has freed goes back to the system, as far as the C library (glibc) can do that."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


MADV_DONTNEED = 4  # of Linux


def give_back(address: int, size: int) -> None:
    """The system may have these bytes of anonymous memory back, as far as they are whole pages (Linux). They are zero
    from now on, and take memory again once they are written.
    """
    first, last = -(-address // mmap.PAGESIZE), (address + size) // mmap.PAGESIZE
    if last > first and sys.platform == "linux":
        where, count = ctypes.c_void_p(first * mmap.PAGESIZE), ctypes.c_size_t((last - first) * mmap.PAGESIZE)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).madvise(where, count, MADV_DONTNEED)


def consecutive_runs(numbers: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Numbers as runs without gaps, ascending: the first of each, and one more than its last."""
    first = last = -1
    for number in sorted(set(numbers)):
        if number != last:
            if last > first:
                yield first, last
            first = number
        last = number + 1
    if last > first:
        yield first, last


def reset_peak() -> None:
    """Begin a new peak at what is resident now (Linux); what has been freed is given back to the system before."""
    return_free_memory()
    with contextlib.suppress(OSError):  # no such file, or a kernel that keeps it to itself
        CLEAR_REFS.write_text("5")


def limit_memory(beside: int) -> None:
    """Let memory run out for this process alone once it has taken `beside` bytes more than now: what it asks for then
    is refused, which libraries raise as an error. Where the system has no such bound it is the first to be killed.
    """
    with contextlib.suppress(OSError):
        OOM_SCORE.write_text("1000")
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        # what RLIMIT_DATA counts (Linux): memory of its own that may be written to, taken or only promised
        lines = STATUS.read_text().splitlines() if STATUS.exists() else []
        private = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData")), resident_bytes())
        wanted = private + beside
        if most == resource.RLIM_INFINITY or wanted < most:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))


class FaultUsage(NamedTuple):
    at: float  # seconds, of any clock that goes on
    system_s: float  # that the calling thread spent in the system
    faults: int  # of the whole process, those that needed no disk


def fault_usage() -> FaultUsage:
    """Of the calling thread; of the process where the system does not tell threads apart."""
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return FaultUsage(time.perf_counter(), resource.getrusage(who).ru_stime, faults)


class FirstTouchCost:
    """Counts stretches of one thread's work: `begin`, the work, `end`."""

    def __init__(self, read: Callable[[], FaultUsage] = fault_usage) -> None:
        self._read = read
        self._began: FaultUsage | None = None
        self._sums = [0.0] * 5  # over stretches: faults², faults × seconds, seconds², faults × system, seconds × system
        self._system_s = 0.0
        self._booked = 0.0
        self.faults = 0

    def begin(self) -> None:
        self._began = self._read()

    def end(self) -> float:
        """Seconds of the stretch, at most, that went into faults, as all stretches until now tell; 0 without any."""
        began, ended = self._began, self._read()
        if began is None:
            return 0.0
        self._began = None
        seconds, system_s, faults = (late - early for late, early in zip(ended, began, strict=True))
        added = (faults * faults, faults * seconds, seconds * seconds, faults * system_s, seconds * system_s)
        self._sums = [known + more for known, more in zip(self._sums, added, strict=True)]
        self.faults += int(faults)
        self._system_s += system_s
        more = min(max(0.0, self._total() - self._booked), seconds) if faults else 0.0
        self._booked += more
        return more

    def _total(self) -> float:
        """What all faults cost so far, by the least squares of system = faults × cost + seconds × share."""
        ff, fs, ss, fy, sy = self._sums
        determinant = ff * ss - fs * fs
        if determinant <= 1e-6 * ff * ss:  # every stretch had as many faults for its length: one share fits them all
            return 0.0
        cost = (fy * ss - sy * fs) / determinant
        if (sy * ff - fy * fs) < 0:  # the other calls took less than nothing: the faults took all
            cost = fy / ff
        return min(max(0.0, cost) * self.faults, self._system_s)
