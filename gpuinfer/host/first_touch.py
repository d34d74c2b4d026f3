"""What the first touch of memory costs: the system gives a page when it is first written to, and clears it before.

A page fault has no clock of its own. But the system time of the calling thread is counted, and so are the process's
faults: over many stretches of work the time is what faults cost, each, and what the other calls of the system take of
every second. Both follow by least squares. So a machine whose pages are dear (huge ones that it clears, or ones that
the machine below it must find first) is seen as it is, and waiting that costs system time is not taken for faults.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import NamedTuple


class Spent(NamedTuple):
    """Counted until now."""

    at: float  # seconds, of any clock that goes on
    system_s: float  # that the calling thread spent in the system
    faults: int  # of the whole process, those that needed no disk


def spent() -> Spent:
    """Of the calling thread; of the process where the system does not tell threads apart."""
    who = getattr(resource, "RUSAGE_THREAD", resource.RUSAGE_SELF)
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    return Spent(time.perf_counter(), resource.getrusage(who).ru_stime, faults)


class FirstTouch:
    """Counts stretches of one thread's work: `begin`, the work, `end`."""

    def __init__(self, read: Callable[[], Spent] = spent) -> None:
        self._read = read
        self._began: Spent | None = None
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
