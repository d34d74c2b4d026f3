"""When to cut: as soon as there is room, unless waiting for a little company pays. Shared by the strategies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuinfer.api import BatchRecord, QueueView, Reason, Request
from gpuinfer.strategies.service_time import ServiceTime

PATIENCE = 8.0  # average times: of those that come, all but a few in ten thousand have come by then (e^-8)
TRAIN = 8  # arrivals, the last of which tell how fast they come
TIMER_S = 1e-3  # so late may a wait end: a request whose deadline has come is not served any more
LULL = 3.0  # average gaps between arrivals: a longer one says that the rate was another


class Timing:
    """When the next batch is due, and why, from what batches have cost so far.

    While all lanes are busy the queue grows, so that a lane which becomes free finds a batch. It then takes what waits:
    with one server, arrivals at random and a service time that is a line, no cap on the batch and no wait makes the
    mean latency more than about 1 % better (docs/strategies.md; a threshold on the queue is the best of all rules: Deb
    and Serfozo, "Optimal control of batch service queues", 1973). It is worth waiting for clients that come back soon,
    and for arrivals that come much faster than batches do.
    """

    def __init__(self, max_rows: int | None = None) -> None:
        """`max_rows` bounds a batch below what the backend can take."""
        self.service = ServiceTime()
        self._max_rows = max_rows
        self._freed = -math.inf  # when a lane last became free

    def due(self, queue: QueueView, target_s: float = math.inf) -> float:
        """When to cut: a time of the queue's clock. Every request is to be answered `target_s` after its arrival."""
        oldest = queue.waiting[0].arrived
        patience = self._patience(queue)
        if not patience:
            return oldest
        since = max(self._freed, queue.waiting[-1].arrived) if queue.live else queue.waiting[-1].arrived
        return max(oldest, min(since + patience, self.must_start(queue, target_s)))

    def must_start(self, queue: QueueView, target_s: float = math.inf) -> float:
        """When a batch of one row more than wait would have to start for the earliest deadline to be kept, all but once
        in twenty; inf when there is none.
        """
        deadline = min(queue.deadline, queue.waiting[0].arrived + target_s)
        return deadline - self.service.late(queue.rows + 1) - TIMER_S if deadline < math.inf else math.inf

    def reason(self, queue: QueueView, target_s: float = math.inf) -> Reason:
        """Why the batch is cut, now that it is due."""
        room = self.room(queue)
        if queue.rows >= room:
            return Reason.FULL if room == queue.limits.max_rows else Reason.CAP
        if queue.limits.slots is not None:
            return Reason.FREE
        if queue.all_clients_wait:
            return Reason.CLIENTS
        if len(queue.waiting) >= self.share(queue):
            return Reason.CAP
        if not self._patience(queue):
            return Reason.FREE
        return Reason.DEADLINE if queue.now >= self.must_start(queue, target_s) else Reason.GAIN

    def observe(self, batch: BatchRecord) -> None:
        self._freed = batch.started + batch.seconds
        self.service.learn(batch.rows, batch.seconds)

    def room(self, queue: QueueView) -> int:
        """The rows of a batch for which nothing needs to wait."""
        most = queue.limits.max_rows
        return min(most, self._max_rows or most, queue.limits.enough_rows or most)

    def share(self, queue: QueueView) -> float:
        """The requests for one lane when all lanes share alike what the live clients ask; inf when none are known.

        Without it, whoever comes back together goes together for ever, while other lanes have next to nothing to do.
        """
        if not queue.live or queue.limits.slots is not None:
            return math.inf
        return max(1, math.ceil((queue.outstanding + queue.thinking) / queue.limits.in_flight))

    def _patience(self, queue: QueueView) -> float:
        """How many seconds a free lane may wait for the next arrival, from the last one on; 0: it is not worth waiting.

        Clients that all come back within half the fixed cost of a batch are waited for, each of them up to that cost:
        an extra batch costs its fixed cost, a wait its own length, and waiting up to that cost is never worse than
        twice the best in hindsight (the ski-rental rule: Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy
        caching", 1988). The last of k exponential think times ends after about ln k + 1 of them.

        Others are waited for while they come so fast that waiting saves more than it costs: see `_pays`.
        """
        if queue.limits.slots is not None:  # a slot that is free costs nothing to fill
            return 0.0
        if queue.rows >= self.room(queue) or queue.all_clients_wait or len(queue.waiting) >= self.share(queue):
            return 0.0
        fixed = self.service.fixed
        if not queue.live:
            return min(fixed, LULL / queue.arrival_rate) if self._pays(queue.rows, queue.arrival_rate) else 0.0
        if not queue.thinking or queue.think_s == math.inf:
            return 0.0
        if queue.think_s * (1 + math.log(queue.thinking)) < fixed / 2:
            return min(fixed, PATIENCE * queue.think_s)
        if self._pays(len(queue.waiting), queue.thinking / queue.think_s):
            return fixed
        gap = recent_gap(queue.waiting)
        return min(fixed, PATIENCE * gap) if gap and self._pays(len(queue.waiting), 1 / gap) else 0.0

    def _pays(self, waiting: int, rate: float) -> bool:
        """Whether waiting for one more arrival saves more than it costs those who wait, one gap between arrivals each.

        Whoever comes next saves about half of what an extra batch would cost: solving the queue's Markov chain for the
        threshold of least mean latency gives half of the arrivals within a batch's fixed cost (docs/strategies.md).
        """
        return rate > 0 and (waiting + 0.5) / rate < self.service.fixed / 2


def recent_gap(waiting: Sequence[Request]) -> float:
    """Mean seconds between the last few arrivals: clients that were answered together come back in a train, one after
    the other as the cores get to them, and not independently of one another. 0 when that says nothing.
    """
    cars = min(TRAIN, len(waiting))
    return (waiting[-1].arrived - waiting[-cars].arrived) / (cars - 1) if cars > 2 else 0.0
