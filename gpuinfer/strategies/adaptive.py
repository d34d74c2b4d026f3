"""Batches that keep a latency target, from what batches have been seen to cost; without one, the most throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import BatchRecord, QueueView, Reason, Request, Strategy
from gpuinfer.strategies.priority import oldest_first
from gpuinfer.strategies.timing import CutTiming

GROWTH = 2  # a batch is at most so many times larger than any that was seen, while there is a target to miss
ROOM = 1.1  # a cap must leave capacity for this many times what arrives
SURE = 16  # batches after which a target may be called infeasible
PROBES = 3  # batches of a single request that are looked at before
EVERY = 4  # batches between two of them
EXPLORE = 4  # batches of which one may be smaller than it might be, to see whether small ones are faster
AGAIN = 0.8  # of the target: once single requests are served within so much of it, it counts again


class Adaptive(Strategy):
    """Adaptive batching: learns what batches cost, and keeps a latency target where that is possible.

    A batch is cut as soon as there is room for it, later only for company that comes soon (see `Timing`), and never so
    late that the oldest request would miss the target or its own deadline. Batches are as large as the target allows
    (the largest whose own service time keeps it: Crankshaw et al., "Clipper", NSDI 2017), as long as such batches can
    serve what arrives: below that a cap would only lengthen the queue (Inoue, "Queueing analysis of GPU-based inference
    servers with dynamic batching", 2021). Where a smaller batch is served at a clearly higher rate, as at a step in the
    service time, it is preferred. Waiting as late as a deadline allows is taken from Chen et al., "Symphony", 2023.
    """

    class Options(api.Options):
        latency_target: float | None = Field(
            None, gt=0, allow_inf_nan=False, description="seconds from submit to result for 95 of 100; default: none"
        )

    options: Options

    def __init__(self, setup: api.Setup | None = None, /, **options: object) -> None:
        super().__init__(setup, **options)
        self._timing = CutTiming()
        self._service = self._timing.service
        self._feasible = True
        self._admits = False  # to slots, for as long as each row takes: a batch's time says nothing of its size
        self._single = 0  # rows of the smallest batch of a single request, 0 before one was seen
        self._singles = 0  # batches of a single request that were seen
        self._cuts = 0
        self._probed = 0  # batches that were cut to a single request to learn from them
        self._known_fit = ((-1, 0), 1)

    @property
    def latency_target(self) -> float | None:
        return self.options.latency_target

    def cut_at(self, queue: QueueView) -> float:
        self._admits = queue.limits.slots is not None
        if queue.rows >= self._allowed(queue):
            return queue.waiting[0].arrived
        return self._timing.due(queue, self._target())

    def select(self, queue: QueueView) -> list[Request]:
        return oldest_first(queue, self._size(queue), self._timing.share(queue))

    def reason(self, queue: QueueView) -> Reason:
        if self._size(queue) < min(queue.rows, self._timing.room(queue)):
            return Reason.CAP
        return self._timing.reason(queue, self._target())

    def account(self, batch: Sequence[Request], now: float) -> None:
        if self._probes():
            self._probed += 1
            self._cuts = 0
        self._cuts += 1

    def observe(self, batch: BatchRecord) -> None:
        self._timing.observe(batch)
        if batch.requests == 1:
            self._singles += 1
            self._single = min(self._single or batch.rows, batch.rows)
        if (target_s := self.options.latency_target) is not None and not self._admits:
            self._judge(target_s)

    def _judge(self, target_s: float) -> None:
        """Tell once when not even single requests keep the target, and aim for throughput as long as they do not."""
        if self._singles < PROBES or self._service.batches < SURE:
            return
        late = self._service.late(self._single)
        if self._feasible and late > target_s:
            self._feasible = False
            if not self.notices:
                smallest = f"a batch of {self._single} {'row' if self._single == 1 else 'rows'}, the smallest there is"
                self.notices = (
                    f"latency_target={1e3 * target_s:.3g}ms cannot be kept: {smallest}, takes "
                    f"{1e3 * self._service.seconds(self._single):.3g} ms, and one in twenty more than "
                    f"{1e3 * late:.3g} ms. Batches are cut for throughput now. "
                    f"Give {1e3 * 1.5 * late:.3g}ms or more, or a faster model or machine.",
                )
        elif not self._feasible and late < AGAIN * target_s:
            self._feasible = True

    def _target(self) -> float:
        """Seconds from submit to result that are to be kept; inf when there is nothing to keep."""
        target = self.options.latency_target
        return math.inf if target is None or not self._feasible else target

    def _size(self, queue: QueueView) -> int:
        """The rows of the next batch at most: what is allowed, or fewer that are served faster, or that may be."""
        if queue.limits.slots is not None:
            return self._timing.room(queue)
        if self._probes():
            return 1
        rows = min(queue.rows, self._allowed(queue))
        if not queue.live and self._cuts % EXPLORE == EXPLORE - 1 and (unknown := self._unknown(queue, rows)):
            return unknown  # of clients that march in step, the half left behind would never catch up
        return self._service.better_below(rows)

    def _unknown(self, queue: QueueView, rows: int) -> int:
        """A smaller size that is worth a look; 0 when there is none, or blocks do not add up to it: they never will."""
        edge = self._service.unknown_below(rows)
        if not edge or self._service.knows(sum(request.rows for request in oldest_first(queue, edge))):
            return 0
        return edge

    def _allowed(self, queue: QueueView) -> int:
        """The rows of the largest batch that the target allows."""
        room, target = self._timing.room(queue), self._target()
        if target == math.inf or queue.limits.slots is not None:
            return room
        seen = min(room, GROWTH * max(self._service.largest, 1))
        fits = self._fits(target, seen)
        too_slow = queue.limits.in_flight * self._service.rate(fits) < ROOM * queue.arrival_rate
        missed = queue.now - queue.waiting[0].arrived > target  # `arrival_rate` is of this group, and others may come
        if fits < seen and (too_slow or missed):
            return seen
        return fits

    def _fits(self, target_s: float, most: int) -> int:
        """The rows, 1 at least, whose own service time keeps the target; looked up anew after every few batches."""
        key = (self._service.batches // EVERY, most)
        if self._known_fit[0] != key:
            self._known_fit = (key, max(1, self._service.rows_within(target_s, most)))
        return self._known_fit[1]

    def _probes(self) -> bool:
        """Whether the next batch is a single request, since whether any keep the target is not known otherwise."""
        return (
            self._target() < math.inf
            and not self._admits
            and self._service.batches >= EVERY <= self._cuts
            and max(self._singles, self._probed) < PROBES
            and self._service.late(self._service.smallest) > self._target()
        )
