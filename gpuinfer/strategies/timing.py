"""When to cut: as soon as there is room, unless waiting for a little company pays; and a batch while it is filled.

How much company of lower classes a request of a higher class can bear in its batch is bounded too. A batch is not
interrupted: a request that arrives just after a cut waits for a full batch. That much is promised, and no more:
`p99 under load ≤ p99 alone + τ(full batch)`. So rows of lower classes that fill up a batch may make it longer only as
far as its oldest request has not waited already.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from gpuinfer.api import BatchRecord, Priority, QueueView, Reason, Request
from gpuinfer.strategies.service_time import ServiceTime, SizeCurve
from gpuinfer.strategies.shares import FairClients

PATIENCE = 8.0  # average times: of those that come, all but a few in ten thousand have come by then (e^-8)
TRAIN = 8  # arrivals, the last of which tell how fast they come
TIMER_S = 1e-3  # so late may a wait end: a request whose deadline has come is not served any more
LULL = 3.0  # average gaps between arrivals: a longer one says that the rate was another


class CutTiming:
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

        Without it, clients that come back together go together for ever, while other lanes have next to nothing to do.
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
        # Mean seconds between the last few arrivals: clients that were answered together come back in a train, one
        # after the other as the cores get to them, and not independently of one another. 0 when that says nothing.
        cars = min(TRAIN, len(queue.waiting))
        gap = (queue.waiting[-1].arrived - queue.waiting[-cars].arrived) / (cars - 1) if cars > 2 else 0.0
        return min(fixed, PATIENCE * gap) if gap and self._pays(len(queue.waiting), 1 / gap) else 0.0

    def _pays(self, waiting: int, rate: float) -> bool:
        """Whether waiting for one more arrival saves more than it costs those who wait, one gap between arrivals each.

        The next arrival saves about half of what an extra batch would cost: solving the queue's Markov chain for the
        threshold of least mean latency gives half of the arrivals within a batch's fixed cost (docs/strategies.md).
        """
        return rate > 0 and (waiting + 0.5) / rate < self.service.fixed / 2


SLIGHTLY = 1e-6  # rows: no more than what rounding does to a share


class ClassLine:
    """The requests of one class in the order in which they are served: the aged ones, oldest first, then the others."""

    __slots__ = ("_aged", "_fresh", "head", "order", "taken")

    def __init__(self, aged: Sequence[Request], fresh: Sequence[Request], clients: FairClients, dated: bool) -> None:
        """Both are given oldest first."""
        self.taken = 0  # rows
        self._aged, self._fresh = aged, fresh
        self.order: Iterator[Request] = itertools.chain(aged, clients.order(fresh, dated) if fresh else ())
        self.head = next(self.order, None)  # the next request; the others are still in `order`

    @property
    def head_rows(self) -> int:
        return self.head.rows if self.head is not None else 0

    @property
    def oldest(self) -> Request:
        return self._aged[0] if self._aged else self._fresh[0]

    def count(self) -> int:
        return sum(request.rows for request in itertools.chain(self._aged, self._fresh))


class Filling:
    """Rows up to `room`, requests up to `most`. A request that does not fit holds up its own line only."""

    __slots__ = ("chosen", "left", "room", "rows")

    def __init__(self, room: int, most: float = math.inf) -> None:
        self.room = room
        self.rows = 0
        self.chosen: list[Request] = []
        self.left = most

    def take_width(self, lines: Sequence[ClassLine], most: int) -> None:
        """Have room for the next request of each line, up to `most` rows. A block may well be wider than the batches
        that are large enough: those behind it would wait until no other request comes.
        """
        self.room = max(self.room, min(most, max(line.head_rows for line in lines)))

    def fill(self, line: ClassLine, rows: float, limit: int) -> None:
        """Take from a line, up to `rows` of it in all, while the batch stays within `limit`."""
        room, taken = min(limit - self.rows, rows + SLIGHTLY - line.taken), 0
        head, order, left = line.head, line.order, self.left
        while head is not None and taken + head.rows <= room and left >= 1:
            self.chosen.append(head)
            taken += head.rows
            left -= 1
            head = next(order, None)
        line.head, self.left = head, left
        line.taken += taken
        self.rows += taken

    def top_up(self, lines: Sequence[ClassLine], due: Sequence[float], limit: int, *, stop: bool) -> None:
        """Use what is left, though no class is due all of a block: the class that is due most takes its next one.

        With `stop` the class that is due most ends it when its block does not fit: what comes free is for that class.
        """
        while self.left >= 1:
            fits = [
                n for n, line in enumerate(lines) if line.head_rows and (stop or line.head_rows + self.rows <= limit)
            ]
            if not fits:
                return
            first = lines[max(fits, key=lambda number: due[number] - lines[number].taken)]
            if first.head_rows + self.rows > limit:
                return
            self.fill(first, first.taken + first.head_rows, limit)


MEMORY_S = 2.0  # rates forget with this time constant
KEPT = 0.90  # of a full batch's time is planned with; the rest is for what cannot be foreseen
FREE = 0.03  # of a full batch's time is not worth a shorter batch, as where more rows take no longer
RARE = 0.01  # what happens to fewer than these counts for no 99th percentile
TRIES = 32


class CompanyBound:
    """Learns what batches cost and how fast the classes come; says how long a batch may get."""

    def __init__(self) -> None:
        self._curve = SizeCurve()
        self._rates = [0.0] * len(Priority)  # rows per second that were cut; older batches count exponentially less
        self._requests_rate = [0.0] * len(Priority)  # requests per second, likewise
        self._seen: float | None = None

    def account(self, rows: Sequence[int], requests: Sequence[int], now: float) -> None:
        fade = 1.0 if self._seen is None else math.exp(min(0.0, self._seen - now) / MEMORY_S)
        self._rates = [rate * fade + new / MEMORY_S for rate, new in zip(self._rates, rows, strict=True)]
        self._requests_rate = [
            rate * fade + new / MEMORY_S for rate, new in zip(self._requests_rate, requests, strict=True)
        ]
        self._seen = now

    def observe(self, rows: int, seconds: float) -> None:
        self._curve.learn(rows, seconds)

    def bearable_rows(self, oldest: Request, now: float, own: int, full: int, lanes: int, spread: float) -> int:
        """Up to how many rows a batch may have so that its `oldest` request of the highest class keeps its bound.

        `own` are the rows of that class in it. All but few batches take at most (1 + `spread`) times what they usually
        do. At least `own`, at most `full`.
        """
        seconds, whole = self._curve.seconds, self._curve.seconds(full)
        # Nearly the longest that it would take if only its class and higher ones were there; inf: without a bound.
        # While a batch of n runs, rate·τ(n) rows come; where that is n again it settles. Then all but one in a hundred
        # come no earlier than shortly after a cut: they wait for what is left of a batch of n, and then for their own.
        # At a low rate most find a lane free.
        rate, requests = (sum(rates[: oldest.priority + 1]) / lanes for rates in (self._rates, self._requests_rate))
        rows, alone_s = min(oldest.rows, math.ceil(rate / requests)) if requests else oldest.rows, math.inf
        for _ in range(TRIES):
            took = seconds(rows)
            if rate * took <= rows:
                busy = rate * took / rows
                alone_s = took + (took * max(0.0, 1 - RARE / busy) if busy else 0.0)
                break
            rows = math.ceil(rate * took)
            if rows >= full:
                break
        left = (KEPT * whole + alone_s - (now - oldest.arrived)) / (1 + spread)
        left = max(left, seconds(own) + FREE * whole)
        if own >= full or whole <= left:
            return full
        return own + bisect_right(range(own + 1, full + 1), left, key=seconds)
