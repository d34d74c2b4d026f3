"""Classes of requests: which of those that wait go first, which share the batch, and which are turned away."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Literal

from pydantic import Field, field_validator

from gpuinfer import api
from gpuinfer.api import BatchRecord, Priority, QueueView, Reason, Request, Strategy
from gpuinfer.strategies.company import Company
from gpuinfer.strategies.fairness import FairClients
from gpuinfer.strategies.filling import Filling, Line
from gpuinfer.strategies.rooms import give_up
from gpuinfer.strategies.share_text import read_shares
from gpuinfer.strategies.shares import Credits
from gpuinfer.strategies.timing import Timing

by_arrival = attrgetter("arrived")
CLASSES = len(Priority)

BURST = 2.0  # full batches that the highest class may borrow beyond its share


class ByPriority(Strategy):
    """Classes with shares of the rows, fair between the clients of each.

    **Shares.** While a class has enough waiting, it gets its share of the rows: from when it began to wait, at most one
    full batch less, and over any stretch in between at most two. What a class does not use goes to the next lower one
    that waits, then to the next higher. In mode `strict` the highest class goes first instead, and lower ones get what
    it leaves.

    **Order inside a class.** Whoever has waited for `ageing` seconds goes first, the oldest of them before all others;
    then clients take turns by rows, and of one client the earliest deadline goes first (see `FairClients`).

    **Bound on the wait.** With shares, once a request has waited for `ageing` seconds, none of its class that came
    later is served before it: it waits at most until those that came before it are, at the share of its class. In mode
    `strict` a request counts as one class higher for each `ageing` seconds of waiting; after one, two or three times
    that (high, normal, low) nobody of any class that came later is served before it.

    **Company.** While the higher class keeps within its share, its 99th percentile is at most one full batch's time
    above what it would be alone (see `company`), however much of the lower ones waits.
    """

    class Options(api.Options):
        shares: tuple[float, float, float] = Field(
            (50.0, 30.0, 20.0),
            description="percent of the rows for high,normal,low while all of them wait; or high=60,low=20",
        )
        mode: Literal["shares", "strict"] = Field("shares", description="strict: the highest class goes first, always")
        ageing: float = Field(
            5.0, gt=0, allow_inf_nan=False, description="seconds of waiting after which nobody newer goes first"
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
        self._timing = Timing()
        self._company = Company()
        self._credits = Credits(self._shares)
        self._clients = [FairClients() for _ in range(CLASSES)]
        self._waited: list[int] = [0] * CLASSES  # rows of each class, as the last `select` saw them

    def cut_at(self, queue: QueueView) -> float:
        return self._timing.due(queue)

    def reason(self, queue: QueueView) -> Reason:
        return self._timing.reason(queue)

    def observe(self, batch: BatchRecord) -> None:
        self._timing.observe(batch)
        self._company.observe(batch.rows, batch.seconds)

    def select(self, queue: QueueView) -> Sequence[Request]:
        self._waited = list(queue.class_rows)  # for `account`, which is shown the batch alone
        room = self._timing.room(queue)
        batch = Filling(room, self._timing.share(queue))
        if self._strict:
            self._fill_strictly(batch, queue)
        else:
            self._fill_by_shares(batch, queue)
        return batch.chosen or [queue.waiting[0]]  # the oldest fits always, though perhaps no batch of a usual size

    def account(self, batch: Sequence[Request], now: float) -> None:
        served, requests = [0] * CLASSES, [0] * CLASSES
        for request in batch:
            served[request.priority] += request.rows
            requests[request.priority] += 1
        for level, those in enumerate(self._levels(batch, now)):
            self._clients[level].served(those)
        self._company.account(served, requests, now)
        if batch and not self._strict:
            waited = [max(pair) for pair in zip(self._waited, served, strict=True)]
            self._credits.settle(batch[0].group, served, waited)

    def shed(self, queue: QueueView, arriving: Request) -> Sequence[Request]:
        return give_up(queue, arriving, self._shares)

    def retry_after(self, queue: QueueView, request: Request) -> float | None:
        """When those of its class that wait, in mode `strict` those of higher ones too, are served at its share."""
        service, full = self._timing.service, self._timing.room(queue)
        if not service.known:
            return None
        first, share = (0, 1.0) if self._strict else (request.priority, self._shares[request.priority])
        rows = sum(queue.class_rows[first : request.priority + 1]) + request.rows
        return rows / share * service.seconds(full) / (full * queue.limits.in_flight)

    # Which

    def _fill_by_shares(self, batch: Filling, queue: QueueView) -> None:
        """Owed classes first, then the highest, each with what it may have; then all, with what a batch is for them."""
        waiting, credits = self._waited, self._credits.of(group := queue.waiting[0].group)
        lines = self._lines(queue)
        top = next(number for number in range(CLASSES) if waiting[number])
        quanta = [share * batch.room for share in self._shares]
        own = min(waiting[top], quanta[top] + BURST * batch.room + credits[top])
        most = [BURST * quantum / (1 - self._shares[top]) for quantum in quanta]  # to lend, of the others
        owed = [
            number for number in range(CLASSES) if number != top and waiting[number] and credits[number] > most[number]
        ]
        limit = min(batch.room, queue.rows)
        if own >= waiting[top]:
            needed = math.ceil(waiting[top] + sum(max(quanta[number], lines[number].head_rows) for number in owed))
            limit = self._bearable(queue, lines[top], waiting[top], needed, limit)
        due = self._credits.due(group, limit, waiting)
        for number in sorted(owed, key=lambda number: most[number] - credits[number]):
            batch.fill(lines[number], max(quanta[number], lines[number].head_rows), batch.room)
        batch.fill(lines[top], own, batch.room)
        ahead = [rows - line.taken for rows, line in zip(due, lines, strict=True)]
        for number in sorted(range(CLASSES), key=lambda number: -ahead[number]):
            batch.fill(lines[number], due[number], limit)
        batch.top_up(lines, due, limit, stop=queue.limits.slots is not None)
        if not batch.chosen:
            batch.top_up(lines, due, batch.room, stop=False)

    def _fill_strictly(self, batch: Filling, queue: QueueView) -> None:
        lines = [line for line in self._lines(queue) if line.head_rows]
        limit = min(batch.room, queue.rows)
        top = lines[0]
        rows = top.count()
        if rows < limit:
            limit = self._bearable(queue, top, rows, rows, limit)
        for line in lines:
            batch.fill(line, math.inf, batch.room if line is top else limit)
            if line.head_rows and queue.limits.slots is not None:  # slots that come free are for it
                break

    def _bearable(self, queue: QueueView, line: Line, own: int, needed: int, most: int) -> int:
        """Up to how many rows the batch may have for the sake of the highest class in it: at least `needed`."""
        if own >= most or queue.limits.slots is not None:
            return most
        full, lanes = self._timing.room(queue), queue.limits.in_flight
        rows = self._company.bearable_rows(line.oldest, queue.now, own, full, lanes, self._timing.service.spread)
        return min(most, max(needed, rows))

    # In which order

    def _lines(self, queue: QueueView) -> list[Line]:
        """The requests of each level, highest first. With shares the levels are the classes."""
        waiting = queue.waiting[:]
        dated = queue.deadline < math.inf
        steps = CLASSES if self._strict else 1
        zones = list(self._zones(waiting, queue.now, steps))  # the oldest first
        overdue, *others = zones
        if not self._strict:
            aged, fresh = _by_class(overdue), _by_class(*others)
            return [Line(*each, dated) for each in zip(aged, fresh, self._clients, strict=True)]
        levels: list[list[Request]] = [[] for _ in range(CLASSES + 1)]
        for number, zone in enumerate(zones):
            for priority, requests in enumerate(_by_class(zone)):
                levels[max(0, priority + 1 - (steps - number))] += requests
        first, *rest = levels
        for level in rest:
            level.sort(key=by_arrival)
        first.sort(key=by_arrival)
        return [
            Line(first, [], self._clients[0], dated),
            *(Line([], level, clients, dated) for level, clients in zip(rest, self._clients, strict=True)),
        ]

    def _zones(self, waiting: Sequence[Request], now: float, steps: int) -> Iterator[Sequence[Request]]:
        """Those that have waited for `steps` times the ageing, for one less, …, for none."""
        begin = 0
        for step in range(steps, 0, -1):
            end = bisect.bisect_right(waiting, now - step * self._ageing, lo=begin, key=by_arrival)
            yield waiting[begin:end]
            begin = end
        yield waiting[begin:]

    def _levels(self, batch: Sequence[Request], now: float) -> list[list[Request]]:
        """The requests of a batch by the class that each counted as, in order."""
        if not self._strict:
            return _by_class(batch)
        levels: list[list[Request]] = [[] for _ in range(CLASSES)]
        for request in batch:
            levels[max(0, request.priority - int((now - request.arrived) / self._ageing))].append(request)
        return levels


def _by_class(requests: Sequence[Request]) -> list[list[Request]]:
    classes: list[list[Request]] = [[] for _ in range(CLASSES)]
    for request in requests:
        classes[request.priority].append(request)
    return classes
