"""The threads of a decoder's lanes: the caller's is lane 0, the others wait for the next step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.models.text.decoder import cpu_sizes as at
from gpuinfer.models.text.decoder import cpu_step
from gpuinfer.models.text.decoder.blas import Blas

JOIN_S = 10.0


def nothing() -> None:
    """What there is to prepare where no library computes."""


class Lanes:
    """Runs steps in `len(arguments)` threads. `arguments[lane]` go to the kernel after `control`."""

    def __init__(self, blas: Blas | None, arguments: list[tuple[Any, ...]]) -> None:
        self._arguments = arguments
        self._control: NDArray[np.int64] = np.zeros(at.ASLEEP + 8 * (len(arguments) + 1), np.int64)
        self._awake = [threading.Semaphore(0) for _ in arguments]
        self._one_thread_here = nothing if blas is None else blas.one_thread_here
        self._threads = [
            threading.Thread(target=self._serve, args=(lane, self._one_thread_here), name=f"lane {lane}", daemon=True)
            for lane in range(1, len(arguments))
        ]
        for thread in self._threads:
            thread.start()

    def step(self) -> None:
        """Run one step, whose sizes and tokens are where the arguments point."""
        self._one_thread_here()  # whoever sets torch's threads, or is another thread than before, undoes it
        if self._threads:
            self._begin()
        cpu_step.serve(0, self._control, *self._arguments[0])

    def close(self) -> None:
        self._control[at.STOP] = 1
        self._begin()
        for thread in self._threads:
            thread.join(JOIN_S)
        self._threads = []

    def _begin(self) -> None:
        cpu_step.go(self._control)
        for lane in range(1, len(self._arguments)):
            if cpu_step.take_asleep(self._control, lane):
                self._awake[lane].release()

    def _serve(self, lane: int, prepare: Callable[[], None]) -> None:
        prepare()
        while not cpu_step.serve(lane, self._control, *self._arguments[lane]):
            self._awake[lane].acquire()
