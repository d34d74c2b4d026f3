"""How much memory this process holds, looked at closely enough to measure one call, and a bound on what it may take."""

from __future__ import annotations

import contextlib
import ctypes
import resource
from pathlib import Path

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


def give_back() -> None:
    """What this process has freed goes back to the system, as far as the C library (glibc) can do that."""
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak() -> None:
    """Begin a new peak at what is resident now (Linux); what has been freed is given back to the system before."""
    give_back()
    with contextlib.suppress(OSError):  # no such file, or a kernel that keeps it to itself
        CLEAR_REFS.write_text("5")


def take_at_most(beside: int) -> None:
    """Let memory run out for this process alone once it has taken `beside` bytes more than now: what it asks for then
    is refused, which libraries raise as an error. Where the system has no such bound it is the first to be killed.
    """
    with contextlib.suppress(OSError):
        OOM_SCORE.write_text("1000")
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        wanted = _private_bytes() + beside
        if most == resource.RLIM_INFINITY or wanted < most:
            resource.setrlimit(resource.RLIMIT_DATA, (wanted, most))


def _private_bytes() -> int:
    """What RLIMIT_DATA counts (Linux): memory of its own that may be written to, taken or only promised."""
    try:
        lines = STATUS.read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmData")) * 1024
    except (OSError, StopIteration):
        return resident_bytes()
