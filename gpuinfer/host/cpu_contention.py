"""CPU contention: how much of the cores this program has, how much other programs, and how much the machine below us
takes. Known on Linux only, and not where a container is told of other cores than its own.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from gpuinfer.host import machine

PROC = Path("/proc")
BUSY = slice(0, 3)  # of a "cpu" line: user, nice, system; guests are in there already
INTERRUPTS = slice(5, 7)  # hardware's, software's
STOLEN = 7
PARENT, OWN_AND_REAPED = 1, slice(11, 15)  # of a process's line behind its name: the times are user's and system's
HONEST = 0.5  # of our own time, that the machine must have counted as busy at least


@dataclass(frozen=True, slots=True)
class CoreTime:
    """Seconds on the cores that this process may use, all cores added up; the difference of two tells of a stretch."""

    ours: float  # of this process and all that it has started, those that have ended included
    busy: float  # of all programs
    stolen: float = 0.0  # that a core of ours was wanted and the machine below us ran something else

    @property
    def others(self) -> float:
        return max(0.0, self.busy - self.ours)

    def since(self, then: CoreTime) -> CoreTime | None:
        """What came to it after `then`; None when the machine's counters miss what we ourselves have run."""
        ours, busy = max(0.0, self.ours - then.ours), max(0.0, self.busy - then.busy)
        if busy < HONEST * ours:
            return None
        return CoreTime(ours, busy, max(0.0, self.stolen - then.stolen))


def core_time(proc: Path = PROC, cores: int | None = None) -> CoreTime | None:
    """Since the machine started; None where the system does not tell it of exactly the cores that we may use."""
    try:
        lines = [line.split() for line in (proc / "stat").read_text().splitlines() if line.startswith("cpu")]
        found = {int(name[3:]): [int(word) for word in words] for name, *words in lines if name != "cpu"}
        counted, cores = list(found.values()), machine.cores() if cores is None else cores
        if len(found) != cores:  # else a container may count its cores anew from 0
            allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(found)
            counted = [found[core] for core in allowed if core in found]
        ours = _family(proc, os.getpid())
        busy = sum(sum(line[BUSY]) + sum(line[INTERRUPTS]) for line in counted)
        stolen = sum(line[STOLEN] for line in counted)
    except (OSError, ValueError, LookupError):
        return None
    if not counted or len(counted) != cores or ours is None:  # a quota gives us less than those cores
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    return CoreTime(ours / ticks, busy / ticks, stolen / ticks)


def _family(proc: Path, root: int) -> int | None:
    """Ticks that a process and its descendants have run, those that ended and were waited for included."""
    children: dict[int, list[int]] = defaultdict(list)
    ticks: dict[int, int] = {}
    for name in os.listdir(proc):
        if not name.isdecimal():
            continue
        try:
            fields = (proc / name / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended meanwhile
            continue
        children[int(fields[PARENT])].append(int(name))
        ticks[int(name)] = sum(map(int, fields[OWN_AND_REAPED]))
    if root not in ticks:
        return None
    total, line = 0, [root]
    while line:
        process = line.pop()
        total += ticks[process]
        line += children[process]
    return total
