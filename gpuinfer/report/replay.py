"""A run played again on a virtual clock, from what was measured of its parts: what would a change bring?

The parts are those of a closed queueing network: workers that search for one block at a time and have a few in flight,
one queue, lanes whose service takes longer the larger the batch. A discrete-event simulation, since no formula covers
service in batches (Bailey, 1954, solves only the open case).
"""

from __future__ import annotations

import heapq
import math
import random
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from gpuinfer.report.laws import Curve

JITTER = 0.1  # of a search, both ways: without any, blocks march in step for ever
MOST_BLOCKS = 1500  # replayed; a longer run is scaled down to it
ARRIVE, SERVED, LOOK = range(3)


@dataclass(frozen=True, slots=True)
class System:
    """Workers that share one queue and its lanes."""

    search_s: Sequence[float]  # of one block, for each worker
    shares: Sequence[float]  # of the blocks, for each worker: how many it works through
    blocks: int  # of one worker, in flight
    rows: float  # of a block
    lanes: int
    curve: Curve
    cap: float = math.inf  # rows in one batch
    wait_s: float = 0.0  # that the oldest block may wait for company
    patience_s: float = 0.0  # that it waits for those who are about to come back, where that is less than a batch costs


def rows_per_s(systems: Sequence[System]) -> float:
    """Of all systems together, each working through its shares beside the others, until the last is done."""
    blocks = math.fsum(share for system in systems for share in system.shares)
    scale = min(1.0, MOST_BLOCKS / max(blocks, 1.0))
    runs = [_Replay(system, scale) for system in systems]
    seconds = max((run.play() for run in runs), default=0.0)
    rows = math.fsum(run.done * run.system.rows for run in runs)
    return rows / seconds if seconds > 0 else 0.0


class _Replay:
    def __init__(self, system: System, scale: float) -> None:
        self.system = system
        self.done = 0  # blocks answered
        capped = math.isfinite(system.cap)
        self._fits = max(1, int(system.cap / system.rows + 0.01)) if capped else sys.maxsize  # blocks in one batch
        self._random = random.Random(0)
        self._left = [max(1, round(share * scale)) for share in system.shares]  # blocks that a worker has yet to begin
        self._free_at = [0.0] * len(self._left)  # when a worker's thread is next free
        self._queue: deque[tuple[float, int]] = deque()  # (arrived, worker)
        self._free = system.lanes
        self._serving = 0  # blocks in a lane
        self._under_way = 0  # blocks there, in the queue, or searched for
        self._events: list[tuple[float, int, int, list[int]]] = []
        self._number = 0

    def play(self) -> float:
        """Seconds until the last block was answered."""
        now = 0.0
        for _ in range(min(self.system.blocks, max(self._left, default=0))):
            for worker in range(len(self._left)):
                self._search(worker, now)
        while self._events:
            now = self._events[0][0]
            while self._events and self._events[0][0] <= now:  # all that happens at once, before a batch is cut
                self._happen(now, *heapq.heappop(self._events)[2:])
            self._cut(now)
        return now

    def _happen(self, now: float, kind: int, workers: list[int]) -> None:
        if kind == ARRIVE:
            self._queue.append((now, workers[0]))
        elif kind == SERVED:
            self._free += 1
            self._serving -= len(workers)
            self.done += len(workers)
            self._under_way -= len(workers)
            for worker in workers:
                self._search(worker, now)

    def _search(self, worker: int, now: float) -> None:
        """The worker's thread takes its blocks in the order in which they come back."""
        if not self._left[worker]:
            return
        self._left[worker] -= 1
        self._under_way += 1
        seconds = self.system.search_s[worker] * self._random.uniform(1 - JITTER, 1 + JITTER)
        self._free_at[worker] = max(now, self._free_at[worker]) + seconds
        self._schedule(self._free_at[worker], ARRIVE, [worker])

    def _cut(self, now: float) -> None:
        """Cut as `dynamic` does: when full, when the oldest has waited, or when there is nobody else to wait for."""
        while self._free and self._queue:
            fits, due = self._room(), self._queue[0][0] + (self.system.wait_s or self.system.patience_s)
            anybody_else = len(self._queue) + self._serving < self._under_way
            if len(self._queue) < fits and due > now and anybody_else:
                self._schedule(due, LOOK, [])
                return
            batch = [self._queue.popleft()[1] for _ in range(min(fits, len(self._queue)))]
            self._free -= 1
            self._serving += len(batch)
            self._schedule(now + self.system.curve.seconds(len(batch) * self.system.rows), SERVED, batch)

    def _room(self) -> int:
        """Blocks for the next batch: without a timer the lanes share what is under way alike."""
        share = sys.maxsize if self.system.wait_s else math.ceil(self._under_way / self.system.lanes)
        return min(self._fits, share)

    def _schedule(self, when: float, kind: int, workers: list[int]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, kind, workers))
