"""How many threads compute a step that waits for memory: the fewest that are as fast as all of them.

A step of few rows reads all weights and multiplies little with them, and a few cores may read as fast as memory gives.
More threads then only wait, on cores that others could use. How many it takes is tried out on the steps of the run
itself, since a step has the same bits for any number of threads.
"""

from __future__ import annotations

from gpuinfer.text.decoder.cpu_step import FEW_ROWS

SETTLE = 32  # such steps before the first trial: a short run is not worth one
TURNS = 4  # steps with each of two numbers of threads, in turn
AS_FAST = 1.03  # times the seconds of more threads
FAR_SLOWER = 1.2  # times: no more turns are needed
AGAIN = 2048  # such steps between two trials: what else reads memory comes and goes


class FewestThreads:
    """Ask `threads_for` before each step, and tell it with `took` how long the step took."""

    def __init__(self) -> None:
        self._most = self._chosen = 0  # of how many, and so many of them are enough
        self._until_trial = SETTLE
        self._rows = 0  # of the trial's steps
        self._seconds: dict[int, list[float]] = {}  # of the trial, by threads; empty: there is none now

    def threads_for(self, rows: int, most: int) -> int:
        """How many of `most` threads compute a step of `rows` tokens."""
        if most != self._most:
            self._most, self._chosen, self._until_trial, self._seconds = most, most, SETTLE, {}
        if rows > FEW_ROWS or most == 1:
            return most
        if self._seconds and rows == self._rows:
            return min(self._seconds, key=lambda threads: (len(self._seconds[threads]), -threads))
        return self._chosen

    def took(self, rows: int, threads: int, seconds: float) -> None:
        """A step of `rows` tokens has taken so many seconds with so many threads."""
        if rows > FEW_ROWS or self._most == 1:
            return
        if self._seconds and rows == self._rows:
            self._seconds[threads].append(seconds)
            self._judge()
            return
        self._until_trial -= 1
        if self._until_trial <= 0:
            self._rows = rows
            self._try(self._most)

    def _try(self, threads: int) -> None:
        """Begin the turns of so many threads and of half as many."""
        self._seconds = {threads: [], threads // 2: []}

    def _judge(self) -> None:
        """Whether half as many threads are as fast: then half of those are tried, else the trial is over."""
        more, fewer = max(self._seconds), min(self._seconds)
        if not self._seconds[fewer]:
            return
        ratio = min(self._seconds[fewer]) / min(self._seconds[more])
        complete = len(self._seconds[fewer]) == TURNS
        if ratio > FAR_SLOWER or (complete and ratio > AS_FAST):
            self._end(more)
        elif complete and fewer > 1:
            self._try(fewer)
        elif complete:
            self._end(fewer)

    def _end(self, threads: int) -> None:
        self._chosen, self._until_trial, self._seconds = threads, AGAIN, {}
