"""The threads of a decoder: how they begin a step, share out its pieces of work, and wait for one another.

The caller's thread is number 0; the others wait for the next step that they take part in. A step is a sequence of
phases with a barrier behind each. The pieces of a phase are taken from a counter, so that a thread that another program
holds up takes fewer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_math import (
    atomic_add,
    atomic_load,
    atomic_swap,
    call_int,
    compiled,
    inlined,
    relax,
    ticks,
)

SPINS_BEFORE_YIELD = 2000
SPINS_BEFORE_SLEEP = 40_000  # about a millisecond: longer than what lies between two steps
JOIN_S = 10.0


@inlined
def claim(control):
    """The number of the next piece of this phase."""
    return atomic_add(control, at.NEXT, 1)


@inlined
def barrier(thread, threads, control, addresses):
    """Wait until all threads of this step have come here. The counter of pieces begins anew."""
    line = at.OF_THREAD + at.LINE * thread
    came = ticks()
    control[line + at.BUSY] += came - control[line + at.SINCE]
    control[line + at.SINCE] = came
    phase = atomic_load(control, at.PHASE)
    if atomic_add(control, at.ARRIVED, 1) == threads - 1:
        atomic_add(control, at.ARRIVED, -threads)
        atomic_swap(control, at.NEXT, 0)
        atomic_add(control, at.PHASE, 1)
        return
    spins = 0
    while atomic_load(control, at.PHASE) == phase:
        spins = spin(spins, addresses)
    control[line + at.SINCE] = ticks()
    control[line + at.WAITED] += control[line + at.SINCE] - came


@inlined
def spin(spins, addresses):
    """Wait for a moment; how often the thread has. Now and then others may have the core."""
    relax()
    spins += 1
    if spins % SPINS_BEFORE_YIELD == 0:
        call_int(addresses[at.YIELD])
    return spins


@inlined
def wait_for_go(thread, control, addresses):
    """Whether a step has begun in which this thread takes part. If not, it is to sleep until it is woken.

    Which step that is and how many take part is one number, so that no thread joins a step that is over.
    """
    line = at.OF_THREAD + at.LINE * thread
    spins = 0
    while True:
        latest = atomic_load(control, at.GO)
        if latest != control[line + at.SEEN]:
            control[line + at.SEEN] = latest
            if thread < latest % at.MOST_THREADS:
                return True
        spins = spin(spins, addresses)
        if spins > SPINS_BEFORE_SLEEP or atomic_load(control, at.REST):
            atomic_swap(control, line + at.ASLEEP, 1)
            # A step may have begun meanwhile: then its leader has seen the flag, and wakes us, or has not.
            if atomic_load(control, at.GO) == latest or atomic_swap(control, line + at.ASLEEP, 0) == 0:
                return False


@compiled
def clock():
    """The processor's counter of time, whose ticks are counted in `control`."""
    return ticks()


@compiled
def go(control, threads):
    """Have so many threads begin the next step."""
    atomic_swap(control, at.REST, 0)
    atomic_swap(control, at.GO, (control[at.GO] // at.MOST_THREADS + 1) * at.MOST_THREADS + threads)


@compiled
def rest(control):
    """Have threads that wait for the next step sleep at once: others need their cores."""
    atomic_swap(control, at.REST, 1)


@compiled
def take_asleep(control, thread):
    """Whether this thread sleeps and must be woken. It is answered so once."""
    return atomic_swap(control, at.OF_THREAD + at.LINE * thread + at.ASLEEP, 0) == 1


class Threads:
    """Runs `serve(thread, control, *arguments)`, compiled, in up to `count` threads."""

    def __init__(self, count: int, serve: Callable[..., int], arguments: tuple[Any, ...]) -> None:
        self._serve, self._arguments, self._count = serve, arguments, count
        self._control: NDArray[np.int64] = np.zeros(at.OF_THREAD + at.LINE * count, np.int64)
        self._awake = [threading.Semaphore(0) for _ in range(count)]
        self._began = clock(), time.perf_counter()
        self._threads = [
            threading.Thread(target=self._wait, args=(number,), name=f"decoder {number}", daemon=True)
            for number in range(1, count)
        ]
        for thread in self._threads:
            thread.start()

    def step(self, threads: int) -> None:
        """Run one step, whose sizes and tokens are where the arguments point, in so many threads."""
        self._begin(threads)
        self._serve(0, self._control, *self._arguments)

    def rest(self) -> None:
        """Leave the cores to others until the next step."""
        rest(self._control)

    def usage(self) -> Mapping[str, float]:
        """Seconds that the threads have computed and waited at barriers, summed over them, since they were started."""
        lines = self._control[at.OF_THREAD :].reshape(self._count, at.LINE)
        busy, waited = int(lines[:, at.BUSY].sum()), int(lines[:, at.WAITED].sum())
        tick_s = (time.perf_counter() - self._began[1]) / max(1, clock() - self._began[0])
        return {"threads": self._count, "busy_s": busy * tick_s, "waited_s": waited * tick_s}

    def close(self) -> None:
        self._control[at.STOP] = 1
        self._begin(self._count)
        for thread in self._threads:
            thread.join(JOIN_S)
        self._threads = []

    def _begin(self, threads: int) -> None:
        go(self._control, threads)
        for number in range(1, threads):
            if take_asleep(self._control, number):
                self._awake[number].release()

    def _wait(self, number: int) -> None:
        while not self._serve(number, self._control, *self._arguments):
            self._awake[number].acquire()
