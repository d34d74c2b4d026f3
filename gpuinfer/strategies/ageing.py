"""Who has waited for so long that others must not go first: the lines of requests that a batch is filled from."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from operator import attrgetter

from gpuinfer.api import Priority, QueueView, Request
from gpuinfer.strategies.shares import FairClients
from gpuinfer.strategies.timing import ClassLine

CLASSES = len(Priority)
by_arrival = attrgetter("arrived")


def class_lines(queue: QueueView, ageing: float, clients: Sequence[FairClients]) -> list[ClassLine]:
    """A line for each class. In it those that have waited for `ageing` seconds go first, the oldest before all."""
    aged, fresh = (_by_class(zone) for zone in _zones(queue, ageing, 1))
    dated = queue.deadline < float("inf")
    return [ClassLine(*each, dated) for each in zip(aged, fresh, clients, strict=True)]


def strict_lines(queue: QueueView, ageing: float, clients: Sequence[FairClients]) -> list[ClassLine]:
    """A line for each class, and before them all one of the overdue, the oldest first.

    For each `ageing` seconds of waiting a request counts as one class higher: above the highest it is overdue. So none
    that came later goes before an overdue one.
    """
    levels: list[list[Request]] = [[] for _ in range(CLASSES + 1)]
    for number, zone in enumerate(_zones(queue, ageing, CLASSES)):
        steps = CLASSES - number
        for priority, requests in enumerate(_by_class(zone)):
            levels[max(0, priority + 1 - steps)] += requests
    dated = queue.deadline < float("inf")
    for level in levels:
        level.sort(key=by_arrival)
    overdue, *others = levels
    lines = [ClassLine((), level, each, dated) for level, each in zip(others, clients, strict=True)]
    return [ClassLine(overdue, (), clients[0], dated), *lines]


def by_level(batch: Sequence[Request], now: float, ageing: float | None) -> list[list[Request]]:
    """The requests of a batch by the class that each counts as; without `ageing` that is its own."""
    if ageing is None:
        return _by_class(batch)
    levels: list[list[Request]] = [[] for _ in range(CLASSES)]
    for request in batch:
        levels[max(0, request.priority - int((now - request.arrived) / ageing))].append(request)
    return levels


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
