"""What this process may use of the machine, and what it has used."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

MANY = 1 << 30  # descriptors, where there is no limit


def cores() -> int:
    """CPU cores that this process may use: its affinity, and the CPU quota of its control group or what SLURM has
    allocated to it on this node if that is less.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    allocated = os.environ.get("SLURM_CPUS_ON_NODE", "")  # which not every SLURM enforces
    if allocated.isdecimal() and int(allocated):
        allowed = min(allowed, int(allocated))
    try:  # a version 2 control group's "quota period", or "max period" where it is unlimited
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return max(1, min(allowed, round(int(quota) / int(period)) or allowed))
    except (OSError, ValueError):
        return allowed


def rss_peak_mb() -> float:
    """The most memory that this process has held so far, in MiB.

    Linux hands the parent's `ru_maxrss` down through `exec`, so the process's own high-water mark comes first.
    """
    try:
        with Path("/proc/self/status").open() as status:
            return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / 2**20 if sys.platform == "darwin" else peak / 1024


def cpu_times() -> tuple[float, float]:
    """Seconds that this process's threads have run, and that they have waited for a core while ready to run.

    The second never falls: of threads that have ended it has what the last call saw of them. It is 0 where the system
    does not tell (`/proc/self/task/*/schedstat` of Linux).
    """
    return time.process_time(), _waits.look() / 1e9


class _Waits:
    """Nanoseconds that threads waited for a core, of which the system tells for those alone that are alive."""

    def __init__(self) -> None:
        self._alive: dict[str, int] = {}  # by thread, as last seen
        self._ended = 0
        self._turn = threading.Lock()

    def look(self) -> int:
        with self._turn:
            seen: dict[str, int] = {}
            for task in Path("/proc/self/task").glob("*/schedstat"):
                with contextlib.suppress(OSError, ValueError, IndexError):  # a thread that ends meanwhile
                    seen[task.parent.name] = int(task.read_text().split()[1])
            # less than before: another thread has its number now
            self._ended += sum(waited for task, waited in self._alive.items() if seen.get(task, -1) < waited)
            self._alive = seen
            return self._ended + sum(seen.values())


_waits = _Waits()
os.register_at_fork(after_in_child=lambda: _waits.__init__())  # type: ignore[misc]  # threads and waits of its own


def thread_waited_s() -> float:
    """Seconds that the calling thread has waited for a core while ready to run; 0 where the system does not tell."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def has_cuda() -> bool:
    """Whether an NVIDIA driver is at work here, without asking torch, which takes a second to import."""
    return any(Path(node).exists() for node in ("/dev/nvidiactl", "/dev/dxg"))


def cuda_devices() -> int:
    """How many NVIDIA devices this process may see (CUDA_VISIBLE_DEVICES), 1 at least, without asking torch."""
    count = sum(node.name.removeprefix("nvidia").isdecimal() for node in Path("/dev").glob("nvidia*"))
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        count = min(count, sum(bool(name.strip()) for name in visible.split(",")))
    return max(1, count)


def wants_cuda(devices: Sequence[str]) -> bool:
    """Whether what is computed on these devices (`api.Setup.devices`) is computed on CUDA, as far as that is known
    without asking torch.
    """
    return any(device.startswith("cuda") for device in devices) or (
        not {"auto", "all"}.isdisjoint(devices) and has_cuda()
    )


def descriptors() -> int:
    """How many more files and connections this process may open, its limit raised to the most that it may have."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # macOS has a limit of its own below "unlimited"
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MANY if limit == resource.RLIM_INFINITY else max(0, limit - len(os.listdir("/dev/fd")))


def memory_available() -> int:
    """Bytes that can still be taken without swapping: the machine's, or less if the control group has a limit."""
    available = int(psutil.virtual_memory().available)
    try:
        group = Path("/sys/fs/cgroup")
        left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no version 2 control group, or no limit ("max")
        return available
    return max(0, min(available, left))
