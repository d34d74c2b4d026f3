"""Classes of requests: which of the waiting ones go first, which share a batch, and which are turned away.

**Shares.** Over any stretch in which a class has at least three full batches waiting, it gets its share of the rows
less at most four full batches, as far as blocks fit together: rows that only a small block can use go to it. What
a class does not use goes to the next lower one that waits, then to the next higher. In mode `strict` the highest
class goes first instead, and lower ones get what it leaves.

**Order inside a class.** Requests that have waited for `ageing` seconds go first, the oldest of them before all others;
then clients take turns by rows, and of one client the earliest deadline goes first (see `FairClients`).

**Bound on the wait.** With shares, once a request has waited for `ageing` seconds, none of its class that came
later is served before it: it waits at most until those that came before it are, at the share of its class. In mode
`strict` a request counts as one class higher for each `ageing` seconds of waiting; after one, two or three times
that (high, normal, low) it is kept out of a batch only by those of any class that came before it.

**Company.** However much of the lower classes waits, the higher one's 99th percentile stays within one full batch's
time of what it would be alone (see `CompanyBound`), while it keeps within its share and its blocks are small.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Literal, NamedTuple

from pydantic import Field, field_validator

from gpuinfer import api
from gpuinfer.api import BatchRecord, Priority, QueueView, Reason, Request, Strategy
from gpuinfer.strategies.shares import Credits, FairClients, give_up, read_shares
from gpuinfer.strategies.timing import ClassLine, CompanyBound, CutTiming, Filling

CLASSES = len(Priority)
by_arrival = attrgetter("arrived")


def lines_of(queue: QueueView, ageing: float, clients: Sequence[FairClients], strict: bool) -> list[ClassLine]:
    """A line for each class. In it those that have waited for `ageing` seconds go first, the oldest before all.

    `strict`: for each `ageing` seconds of waiting a request counts as one class higher instead. Above the highest it is
    overdue: before all lines there is one of those, the oldest first. So none that came later goes before an overdue
    one.
    """
    dated = queue.deadline < math.inf
    if not strict:
        aged, fresh = (_by_class(zone) for zone in _zones(queue, ageing, 1))
        return [ClassLine(*each, dated) for each in zip(aged, fresh, clients, strict=True)]
    levels: list[list[Request]] = [[] for _ in range(CLASSES + 1)]
    for number, zone in enumerate(_zones(queue, ageing, CLASSES)):
        steps = CLASSES - number
        for priority, requests in enumerate(_by_class(zone)):
            levels[max(0, priority + 1 - steps)] += requests
    for level in levels:
        level.sort(key=by_arrival)
    overdue, *others = levels
    lines = [ClassLine((), level, each, dated) for level, each in zip(others, clients, strict=True)]
    return [ClassLine(overdue, (), clients[0], dated), *lines]


def _zones(queue: QueueView, ageing: float, steps: int) -> Iterator[Sequence[Request]]:
    """Those that have waited for `steps` times the ageing, for one less, …, for none."""
    waiting = queue.waiting[:]
    begin = 0
    for step in range(steps, 0, -1):
        end = bisect.bisect_right(waiting, queue.now - step * ageing, lo=begin, key=by_arrival)
        yield waiting[begin:end]
        begin = end
    yield waiting[begin:]


def _by_class(requests: Sequence[Request]) -> list[list[Request]]:
    classes: list[list[Request]] = [[] for _ in range(CLASSES)]
    for request in requests:
        classes[request.priority].append(request)
    return classes


BURST = 2.0  # full batches that the highest class may borrow beyond its share: a burst of it need not wait for batches
DEBT = 3.0  # full batches that any class may come to owe, as when it has small blocks that fit where no others do


class ByPriority(Strategy):
    """Classes with shares of the rows, fair between the clients of each; overload sheds the lowest class first."""

    class Options(api.Options):
        shares: tuple[float, float, float] = Field(
            (50.0, 30.0, 20.0),
            description="percent of the rows for high,normal,low while all of them wait; or high=60,low=20",
        )
        mode: Literal["shares", "strict"] = Field("shares", description="strict: the highest class goes first, always")
        ageing: float = Field(
            5.0, gt=0, allow_inf_nan=False, description="seconds of waiting after which no newer request goes first"
        )

        @field_validator("shares", mode="before")
        @classmethod
        def _read_shares(cls, given: Any) -> tuple[float, ...]:
            return read_shares(given, cls.model_fields["shares"].default)

    def __init__(self, setup: api.Setup | None = None, /, **options: object) -> None:
        super().__init__(setup, **options)
        self._strict = self.options.mode == "strict"
        self._ageing = float(self.options.ageing)
        self._shares = [percent / 100 for percent in self.options.shares]
        self._timing = CutTiming()
        self._company = CompanyBound()
        self._credits = Credits(self._shares)
        self._clients = [FairClients() for _ in range(CLASSES)]
        self._plan: BatchPlan | None = None

    def cut_at(self, queue: QueueView) -> float:
        return self._timing.due(queue)

    def reason(self, queue: QueueView) -> Reason:
        reason = self._timing.reason(queue)
        return Reason.CAP if reason is Reason.FULL and self._planned(queue).capped else reason

    def select(self, queue: QueueView) -> Sequence[Request]:
        return self._planned(queue).batch

    def account(self, batch: Sequence[Request], now: float) -> None:
        served, requests = [0] * CLASSES, [0] * CLASSES
        for request in batch:
            served[request.priority] += request.rows
            requests[request.priority] += 1
        levels: list[list[Request]] = [[] for _ in range(CLASSES)]
        for request in batch:
            risen = int((now - request.arrived) / self._ageing) if self._strict else 0
            levels[max(0, request.priority - risen)].append(request)
        for clients, those in zip(self._clients, levels, strict=True):
            clients.served(those)
        self._company.account(served, requests, now)
        if batch and not self._strict:
            waited, full = (self._plan.waited, self._plan.full) if self._plan else (served, sum(served))
            waited = [max(pair) for pair in zip(waited, served, strict=True)]
            self._credits.settle(batch[0].group, served, waited, DEBT * full)
        self._plan = None

    def observe(self, batch: BatchRecord) -> None:
        self._timing.observe(batch)
        self._company.observe(batch.rows, batch.seconds)
        self._plan = None

    def shed(self, queue: QueueView, arriving: Request) -> Sequence[Request]:
        return give_up(queue, arriving, self._shares)

    def retry_after(self, queue: QueueView, request: Request) -> float | None:
        """When those of its class that wait, in mode `strict` those of higher ones too, are served at its share."""
        service, full = self._timing.service, self._timing.room(queue)
        if not service.known:
            return None
        first, share = (0, 1.0) if self._strict else (request.priority, self._shares[request.priority])
        rows = sum(queue.class_rows[first : request.priority + 1]) + request.rows
        at_once = queue.limits.slots or full * queue.limits.in_flight
        return rows / share * service.seconds(full) / at_once

    def _planned(self, queue: QueueView) -> BatchPlan:
        """The next batch. `reason` and `select` ask for the same one, and `account` must know who else waited."""
        if self._plan is None or self._plan.queue is not queue:
            batch = Filling(self._timing.room(queue), self._timing.share(queue))
            if queue.rows <= batch.room and len(queue.waiting) <= batch.left and queue.rows in queue.class_rows:
                batch.chosen, limit = list(queue.waiting), queue.rows  # all of one class: there is nothing to choose
            else:
                limit = self._fill_strictly(batch, queue) if self._strict else self._fill_by_shares(batch, queue)
            chosen = batch.chosen or [queue.waiting[0]]  # it fits always, though perhaps in no batch of a usual size
            capped = limit < min(batch.room, queue.rows)
            self._plan = BatchPlan(queue, chosen, capped, list(queue.class_rows), _full(queue, batch))
        return self._plan

    def _fill_by_shares(self, batch: Filling, queue: QueueView) -> int:
        """First classes that have lent as much as they must, then the highest with all that it may have; then each with
        what such a batch is for it. Returns the rows that the batch was meant to have.
        """
        waiting, credits = queue.class_rows, self._credits.of(group := queue.waiting[0].group)
        lines = lines_of(queue, self._ageing, self._clients, strict=False)
        top = next(number for number in range(CLASSES) if lines[number].head)
        batch.take_width(lines, queue.limits.max_rows)
        full = _full(queue, batch)
        quanta = [share * full for share in self._shares]
        own = min(waiting[top], quanta[top] + BURST * full + credits[top])
        most = [BURST * quantum / (1 - self._shares[top]) for quantum in quanta]  # to lend, of the others
        owed = [n for n in range(CLASSES) if n != top and lines[n].head and credits[n] > most[n]]
        limit = min(batch.room, queue.rows)
        if own >= waiting[top]:
            needed = waiting[top] + sum(max(quanta[number], lines[number].head_rows) for number in owed)
            limit = self._bearable(queue, batch, lines[top], waiting[top], math.ceil(needed))
        due = self._credits.due(group, limit, waiting)
        for number in sorted(owed, key=lambda number: most[number] - credits[number]):
            batch.fill(lines[number], max(quanta[number], lines[number].head_rows), batch.room)
        batch.fill(lines[top], own, batch.room)
        for number in sorted(range(CLASSES), key=lambda number: lines[number].taken - due[number]):
            batch.fill(lines[number], due[number], limit)
        batch.top_up(lines, due, limit, stop=queue.limits.slots is not None)
        if not batch.chosen:
            batch.top_up(lines, due, batch.room, stop=False)
        return limit

    def _fill_strictly(self, batch: Filling, queue: QueueView) -> int:
        """Returns the rows that the batch was meant to have."""
        lines = [line for line in lines_of(queue, self._ageing, self._clients, strict=True) if line.head]
        batch.take_width(lines, queue.limits.max_rows)
        limit, top = min(batch.room, queue.rows), lines[0]
        rows = top.count()
        if rows < limit:
            limit = self._bearable(queue, batch, top, rows, rows)
        for line in lines:
            batch.fill(line, math.inf, batch.room if line is top else limit)
            if line.head and queue.limits.slots is not None:  # slots that come free are for it
                break
        return limit

    def _bearable(self, queue: QueueView, batch: Filling, line: ClassLine, own: int, needed: int) -> int:
        """Up to how many rows the batch may have for the sake of the highest class in it: at least `needed`."""
        most = min(batch.room, queue.rows)
        if own >= most or queue.limits.slots is not None:
            return most
        full, lanes = _full(queue, batch), queue.limits.in_flight
        rows = self._company.bearable_rows(line.oldest, queue.now, own, full, lanes, self._timing.service.spread)
        return min(most, max(needed, rows))


class BatchPlan(NamedTuple):
    """A batch that was chosen, and what it was chosen from."""

    queue: QueueView
    batch: Sequence[Request]
    capped: bool  # it is kept short for the sake of the highest class in it
    waited: Sequence[int]  # rows of each class
    full: int  # rows of a full batch


def _full(queue: QueueView, batch: Filling) -> int:
    """The rows of a full batch; where rows are admitted to slots, of all of them."""
    return queue.limits.slots or batch.room


def oldest_first(queue: QueueView, room: int, most: float = math.inf) -> list[Request]:
    """The oldest requests, `most` at most, as long as their rows fit into `room`; one that is wider goes alone."""
    chosen: list[Request] = []
    rows = 0
    for request in queue.waiting:
        rows += request.rows
        if chosen and (rows > room or len(chosen) >= most):
            break
        chosen.append(request)
    return chosen
