"""Forecasts a change: replays the run on a virtual clock as it was and as it would be, and compares the two.

The replay is a closed queueing network: workers that search for one block at a time and have a few in flight, one
queue, lanes whose service takes longer the larger the batch; a discrete-event simulation, since no formula covers
service in batches (Bailey, 1954, solves only the open case). `RunCase` is the run as the causes see it.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from gpuinfer.config.options import OptionChange
from gpuinfer.report import thresholds
from gpuinfer.report.document import VerdictClass
from gpuinfer.report.evidence import Curve, Evidence, Lane, bounds, busy_s, cap, curve_of, place, think_s, visits

JITTER = 0.1  # of a search, both ways: without it blocks stay in step
MOST_BLOCKS = 1500  # replayed; a longer run is scaled down to it
ARRIVE, SERVED, LOOK = range(3)


@dataclass(frozen=True, slots=True)
class QueueSystem:
    """Workers that share one queue and its lanes."""

    search_s: Sequence[float]  # of one block, for each worker
    shares: Sequence[float]  # of the blocks, for each worker: how many it works through
    blocks: int  # of one worker, in flight
    rows: float  # of a block
    lanes: int
    curve: Curve
    cap: float = math.inf  # rows in one batch
    wait_s: float = 0.0  # that the oldest block may wait for company
    patience_s: float = (
        0.0  # that the oldest block waits for blocks about to come back, if that is less than a batch costs
    )


def rows_per_s(systems: Sequence[QueueSystem]) -> float:
    """Rows per second of all systems together, each working through its shares, until the last is done."""
    blocks = math.fsum(share for system in systems for share in system.shares)
    scale = min(1.0, MOST_BLOCKS / max(blocks, 1.0))
    runs = [_Replay(system, scale) for system in systems]
    seconds = max((run.play() for run in runs), default=0.0)
    rows = math.fsum(run.done * run.system.rows for run in runs)
    return rows / seconds if seconds > 0 else 0.0


class _Replay:
    def __init__(self, system: QueueSystem, scale: float) -> None:
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
                _, _, kind, workers = heapq.heappop(self._events)
                if kind == ARRIVE:
                    self._queue.append((now, workers[0]))
                elif kind == SERVED:
                    self._free += 1
                    self._serving -= len(workers)
                    self.done += len(workers)
                    self._under_way -= len(workers)
                    for worker in workers:
                        self._search(worker, now)
            self._cut(now)
        return now

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
        """Cut as `dynamic` does: when full, when the oldest block has waited, or when no other block can come."""
        while self._free and self._queue:
            # Without a timer, lanes share the blocks under way evenly.
            share = sys.maxsize if self.system.wait_s else math.ceil(self._under_way / self.system.lanes)
            fits, due = min(self._fits, share), self._queue[0][0] + (self.system.wait_s or self.system.patience_s)
            anybody_else = len(self._queue) + self._serving < self._under_way
            if len(self._queue) < fits and due > now and anybody_else:
                self._schedule(due, LOOK, [])
                return
            batch = [self._queue.popleft()[1] for _ in range(min(fits, len(self._queue)))]
            self._free -= 1
            self._serving += len(batch)
            self._schedule(now + self.system.curve.seconds(len(batch) * self.system.rows), SERVED, batch)

    def _schedule(self, when: float, kind: int, workers: list[int]) -> None:
        self._number += 1
        heapq.heappush(self._events, (when, self._number, kind, workers))


@dataclass(frozen=True, slots=True)
class Gain:
    """A factor of the throughput. `expected` is None where only a range is known."""

    low: float = 1.0
    high: float = 1.0
    expected: float | None = None

    @classmethod
    def up_to(cls, high: float, otherwise: float = 1.0) -> Gain:
        """A gain between none and `high`; `otherwise` if `high` is infinite."""
        return cls(1.0, max(1.0, high if math.isfinite(high) else otherwise))


def systems_of(run: Evidence, curve: Curve | None) -> list[QueueSystem]:
    """The run's queues with their workers and lanes; none if too little is known."""
    places = dict.fromkeys(place(lane["name"]) for lane in run.forwards)
    blocks = run.blocks_outstanding
    if curve is None or not blocks or round(blocks) < 1 or not run.requests or not run.block_rows:
        return []
    if not run.work:
        each = [think_s(run)] * round(blocks)
        return [_system(run, curve, each, [run.requests / len(each)] * len(each), 1, len(run.forwards))]
    systems = []
    for at in places:
        lanes = [lane for lane in run.work if len(places) == 1 or place(lane["name"]) == at]
        forwards = sum(place(lane["name"]) == at for lane in run.forwards)
        if lanes:
            each, shares = search_times(run, lanes), _shares(run, lanes)
            systems.append(_system(run, curve, each, shares, max(1, round(blocks / len(run.work))), forwards))
    return systems


def search_times(run: Evidence, lanes: Sequence[Lane]) -> list[float]:
    """Seconds of work a block, for each of these lanes in order; 0 for lanes without requests."""
    return [busy_s([lane]) / share if share else 0.0 for lane, share in zip(lanes, _shares(run, lanes), strict=True)]


def _shares(run: Evidence, lanes: Sequence[Lane]) -> list[float]:
    """The requests of each lane, in proportion to its visits, of which a request may have several."""
    counted = sum(visits(lane) for lane in run.work)
    return [run.requests * (visits(lane) / counted if counted else 1 / len(run.work)) for lane in lanes]


def _system(
    run: Evidence, curve: Curve, search_s: Sequence[float], shares: Sequence[float], blocks: int, lanes: int
) -> QueueSystem:
    wait_s = run.longest_wait_s if run.cut_by("waited") >= 0.5 else 0.0
    back_s, cost_s = statistics.fmean(search_s) * (blocks + 1) / 2, curve.seconds(run.block_rows)
    patience_s = min(cost_s, thresholds.PATIENCE * back_s) if back_s < cost_s else 0.0
    return QueueSystem(search_s, shares, blocks, run.block_rows, lanes, curve, cap(run), wait_s, patience_s)


def forecast(
    run: Evidence,
    now: Sequence[QueueSystem],
    change: Callable[[Sequence[QueueSystem]], Sequence[QueueSystem]],
    most: float = math.inf,
    *,
    anchored: bool = True,
) -> Gain:
    """The gain of a change to these systems, at most `most` and what the roofline leaves.

    Anchored, it compares two replays, and promises nothing when the first is far from the measurement. Otherwise it
    compares the second replay with the measurement: for a change that removes what a replay cannot contain.
    """
    most = max(1.0, min(most, 1 / run.efficiency if run.efficiency else math.inf))
    before = rows_per_s(now) if anchored or not now else run.rows_per_s
    if not before:
        return Gain.up_to(most)
    expected = max(1.0, min(rows_per_s(change(now)) / before, most))
    off = abs(before / run.rows_per_s - 1)
    if off > thresholds.REPLAY_FITS:
        return Gain.up_to(most, expected)
    spread = max(thresholds.REPLAY_DOUBT, off)
    return Gain(max(1.0, expected * (1 - spread)), max(expected, min(expected * (1 + spread), most)), expected)


# Changes


def with_rows(systems: Sequence[QueueSystem], factor: float, search: float) -> list[QueueSystem]:
    """Blocks of `factor` times the rows, as many fewer, each `search` times as long to search for."""
    return [
        replace(
            system,
            rows=system.rows * factor,
            search_s=[seconds * search for seconds in system.search_s],
            shares=[share / factor for share in system.shares],
        )
        for system in systems
    ]


def with_workers(systems: Sequence[QueueSystem], factor: float) -> list[QueueSystem]:
    """`factor` times the workers, alike; each with a queue of its own where there are several queues."""
    if len(systems) > 1:
        count = max(1, round(len(systems) * factor))
        likes = [systems[index % len(systems)] for index in range(count)]
        scale = len(systems) / count
        return [replace(system, shares=[share * scale for share in system.shares]) for system in likes]
    found = []
    for system in systems:
        count = max(1, round(len(system.search_s) * factor))
        each, share = statistics.fmean(system.search_s), math.fsum(system.shares) / count
        found.append(replace(system, search_s=[each] * count, shares=[share] * count))
    return found


def alike(systems: Sequence[QueueSystem]) -> list[QueueSystem]:
    """All workers as fast as the median one, with equal shares."""
    middle = statistics.median([seconds for system in systems for seconds in system.search_s])
    share = statistics.fmean([share for system in systems for share in system.shares])
    return [
        replace(system, search_s=[middle] * len(system.search_s), shares=[share] * len(system.shares))
        for system in systems
    ]


@dataclass(frozen=True, slots=True)
class RunCase:
    """The run, its bounds in rows/s by name, its curve, and its queues for a replay, as far as known."""

    run: Evidence
    bounds: Mapping[str, float]
    curve: Curve | None
    systems: Sequence[QueueSystem]

    @classmethod
    def of(cls, run: Evidence) -> RunCase:
        curve = curve_of(run)
        if run.slots:  # rows per second of steps are no rows per second of answers: a row takes many steps
            return cls(run, {}, curve, ())
        return cls(run, bounds(run, curve), curve, systems_of(run, curve))

    def binds(self, limit: str) -> bool:
        """Whether the run is so close to this bound that no other change can help much."""
        return self.reached(limit) >= thresholds.BINDS

    def reached(self, limit: str) -> float:
        """The share of a bound that the run has reached; 0 for an unknown bound."""
        bound = self.bounds.get(limit, 0.0)
        return self.run.rows_per_s / bound if bound else 0.0

    def faster(self, rows: float) -> float:
        """How many times as fast the model is with batches of so many rows as with the run's own."""
        usual = self.run.rows_usual
        return self.curve.rate(rows) / self.curve.rate(usual) if self.curve and usual else 1.0

    def gain_of(
        self,
        change: Callable[[Sequence[QueueSystem]], Sequence[QueueSystem]],
        most: float = math.inf,
        *,
        anchored: bool = True,
    ) -> Gain:
        return forecast(self.run, self.systems, change, most, anchored=anchored)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence of evidence, one of advice, and the gain to expect."""

    kind: VerdictClass
    station: str
    why: str
    advice: str
    change: OptionChange | None = None  # that the advice speaks of
    gain: Gain = field(default_factory=Gain)
    healthy: bool = False  # nothing to mend: the run does what it can, or what is asked of it
