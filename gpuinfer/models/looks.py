"""How fast something runs, from many short looks at it: neither a neighbour nor a machine that stalls can lower it.

What other programs take of the cores is known to the system and left out. What the machine below takes is not; but it
only ever takes time away, so that the highest looks are the least disturbed. A single one may owe its height to how
the clock fell, which is why several must have come as high.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from gpuinfer.host import machine

LOOK_S = 0.1  # long enough for some forwards of most models, short enough to fall between two stalls
MARK_S = 0.02  # between two marks: one costs as much as some hundred rows of a small model
PASSES = 2  # of each thread in one look, at least
REPEATED = 3  # looks that have come as high, where there are enough of them
SERVED = 0.5  # of a look that each thread must have had a core for: with less of it too little is left to go by


class Mark(NamedTuple):
    """How far a thread was at one moment."""

    at: float
    waited: float  # seconds for a core, so far
    passes: int  # done so far


def marked(once: Callable[[], object], seconds: float) -> list[Mark]:
    """Do something again and again for so many seconds, once at least, and mark how far it has come."""
    marks = [Mark(time.perf_counter(), machine.thread_waited_s(), 0)]
    passes, ends = 0, marks[0].at + seconds
    while passes == 0 or marks[-1].at < ends:
        once()
        passes += 1
        now = time.perf_counter()
        if now >= marks[-1].at + MARK_S or now >= ends:
            marks.append(Mark(now, machine.thread_waited_s(), passes))
    return marks


def looks(threads: Sequence[Sequence[Mark]], look_s: float = LOOK_S) -> list[float]:
    """Passes per second of all threads together, in one stretch after another of the time in which all of them ran.

    Threads are not looked at one by one: while one stands still the others may have its share of the machine.
    """
    start, stop = max(marks[0].at for marks in threads), min(marks[-1].at for marks in threads)
    if stop <= start:  # they took turns: what each did in its own time is all that is known
        return [_rate(threads, [marks[0].at for marks in threads], [marks[-1].at for marks in threads])]
    pass_s = max(_had(marks) / marks[-1].passes for marks in threads)
    edges = np.linspace(start, stop, 1 + max(1, int((stop - start) / max(look_s, PASSES * pass_s))))
    found = [
        (_served(threads, a, b), _rate(threads, [a] * len(threads), [b] * len(threads))) for a, b in pairwise(edges)
    ]
    fair = [rate for served, rate in found if served >= SERVED]
    return fair or [_rate(threads, [start] * len(threads), [stop] * len(threads))]


def sustained(rates: Sequence[float]) -> float:
    """What several looks have reached: the third highest of eight or more, the second of four, else the highest."""
    highest_first = sorted(rates, reverse=True)
    return highest_first[min(REPEATED - 1, len(highest_first) // 4)]


def _had(marks: Sequence[Mark]) -> float:
    """Seconds that a thread had a core, or wanted none."""
    return marks[-1].at - marks[0].at - (marks[-1].waited - marks[0].waited)


def _rate(threads: Sequence[Sequence[Mark]], starts: Sequence[float], stops: Sequence[float]) -> float:
    """Of all threads together, each between two moments of its own, had none of them waited for a core."""
    total = 0.0
    for marks, start, stop in zip(threads, starts, stops, strict=True):
        passes, waited = _between(marks, start, stop)
        total += passes / max(stop - start - waited, 1e-9)
    return total


def _served(threads: Sequence[Sequence[Mark]], start: float, stop: float) -> float:
    """The share of this stretch in which the thread that waited most did not wait."""
    return 1 - max(_between(marks, start, stop)[1] for marks in threads) / (stop - start)


def _between(marks: Sequence[Mark], start: float, stop: float) -> tuple[float, float]:
    """A thread's passes, and its seconds of waiting, between two moments: steady from one mark to the next."""
    at = [mark.at for mark in marks]
    passes = np.interp([start, stop], at, [mark.passes for mark in marks])
    waited = np.interp([start, stop], at, [mark.waited for mark in marks])
    return float(passes[1] - passes[0]), float(waited[1] - waited[0])
