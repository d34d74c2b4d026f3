"""Rows shared out between threads when there is enough of them: each lane takes every so-manieth."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

LARGE = 200_000  # logits in a call from which on another thread pays: waking it costs as much as some ten thousand


class Lanes:
    """`threads` of them, the caller's among them. They are started with the first large call; one call at a time."""

    def __init__(self, threads: int, name: str) -> None:
        self.threads = max(1, threads)
        self._name = name
        self._pool: ThreadPoolExecutor | None = None

    def share(self, run: Callable[[int, int], None], size: int) -> None:
        """Call `run(lane, lanes)` for all lanes, the first in this thread. `size`: logits that are looked at."""
        lanes = self.threads if size >= LARGE else 1
        if lanes == 1:
            run(0, 1)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(self.threads - 1, self._name)
        others = [self._pool.submit(run, lane, lanes) for lane in range(1, lanes)]
        run(0, lanes)
        for other in others:
            other.result()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
