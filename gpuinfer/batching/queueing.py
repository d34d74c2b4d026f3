"""The waiting requests: one line for each group, oldest first, with their deadlines and their clients.

Nothing here reads a clock, sleeps or knows a future, so that the engine and a simulator can share it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import overload

from gpuinfer.api import Limits, Priority, QueueView, Request
from gpuinfer.batching.clients import Clients

RATE_WINDOW_S = 0.25  # the arrival rate forgets with this time constant
LINES_KEPT = 64  # empty lines are forgotten, with their arrival rates, once there are more lines than this
SLACK = 64  # entries that may be out of date before a list is swept

by_arrival = attrgetter("arrived")


class Waiting(Sequence[Request]):
    """A line's requests as a strategy sees them: read-only, and not copied at every question."""

    __slots__ = ("_requests",)

    def __init__(self, requests: list[Request]) -> None:
        self._requests = requests

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @overload
    def __getitem__(self, index: int) -> Request: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Request]: ...
    def __getitem__(self, index: int | slice) -> Request | Sequence[Request]:
        return self._requests[index]


class Line:
    """The waiting requests of one group, oldest first, and the rate at which their rows arrive."""

    __slots__ = ("_arrived", "_class_rows", "_looked", "_rate", "_requests", "_waiting", "members", "rows")

    def __init__(self) -> None:
        self.members: set[Request] = set()
        self.rows = 0
        self._class_rows = [0] * len(Priority)
        self._requests: list[Request] = []  # in order; those no longer in `members` are swept out later, all at once
        self._waiting = Waiting(self._requests)
        self._arrived = 0  # rows since the rate was last brought up to date
        self._looked = -math.inf
        self._rate = 0.0

    def add(self, request: Request) -> None:
        self._requests.append(request)
        self.members.add(request)
        self.rows += request.rows
        self._class_rows[request.priority] += request.rows
        self._arrived += request.rows

    def remove(self, requests: tuple[Request, ...]) -> None:
        self.members.difference_update(requests)
        for request in requests:
            self.rows -= request.rows
            self._class_rows[request.priority] -= request.rows
        if tuple(self._requests[: len(requests)]) == requests:  # the oldest first: the usual cut
            del self._requests[: len(requests)]
        elif len(requests) == 1:  # turned away, withdrawn or expired, perhaps one after the other out of thousands
            del self._requests[self._place_of(requests[0])]
        elif len(self._requests) > 2 * len(self.members) + SLACK:
            self._sweep()

    def view(self, now: float, limits: Limits, clients: Clients, deadline: float) -> QueueView:
        if len(self._requests) != len(self.members):
            self._sweep()
        return QueueView(
            self._waiting,
            self.rows,
            now,
            limits,
            len(clients),
            clients.thinking_at(now),
            self._rate_at(now),
            clients.think_s,
            clients.outstanding,
            deadline,
            self._class_rows,
        )

    def _place_of(self, request: Request) -> int:
        return self._requests.index(request, bisect_left(self._requests, request.arrived, key=by_arrival))

    def _sweep(self) -> None:
        self._requests[:] = [request for request in self._requests if request in self.members]

    def _rate_at(self, now: float) -> float:
        """Rows per second: each arrival counts with a weight that decays exponentially with its age."""
        self._rate = self._rate * math.exp((self._looked - now) / RATE_WINDOW_S) + self._arrived / RATE_WINDOW_S
        self._arrived, self._looked = 0, now
        return self._rate


class Queue:
    """All waiting requests, by group."""

    def __init__(self) -> None:
        self.rows = 0
        self.clients = Clients()
        self._lines: dict[Hashable, Line] = {}
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; entries of requests that left are skipped
        self._numbers = itertools.count()
        self._dated = 0  # requests with a deadline that still wait

    def __contains__(self, request: Request) -> bool:
        line = self._lines.get(request.group)
        return line is not None and request in line.members

    def views(self, now: float, limits: Limits) -> list[tuple[Line, QueueView]]:
        """The lines in which requests wait, and how a strategy sees them now."""
        deadline = self.next_deadline() if self._deadlines else math.inf
        return [(line, line.view(now, limits, self.clients, deadline)) for line in self._lines.values() if line.members]

    def view(self, group: Hashable, now: float, limits: Limits) -> QueueView | None:
        """How a strategy sees the line of this group; None when nobody waits in it."""
        line = self._lines.get(group)
        if line is None or not line.members:
            return None
        return line.view(now, limits, self.clients, self.next_deadline())

    def add(self, request: Request) -> None:
        """Queue a request. It counts as outstanding until `clients.answered`, which whoever settles it calls."""
        line = self._lines.get(request.group)
        if line is None:
            line = self._new_line(request.group)
        self.clients.asked(request.client, request.arrived)
        line.add(request)
        self.rows += request.rows
        if request.deadline < math.inf:
            self._add_deadline(request)

    def remove(self, requests: tuple[Request, ...]) -> None:
        """Take waiting requests of one group out: cut, cancelled or failed."""
        line = self._lines[requests[0].group]
        before = line.rows
        line.remove(requests)
        self.rows -= before - line.rows
        if self._dated:
            self._dated -= sum(request.deadline < math.inf for request in requests)

    def expire(self, now: float) -> list[Request]:
        """Take out the waiting requests whose deadlines have come."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now:
            request = heapq.heappop(self._deadlines)[2]
            if request in self:
                self.remove((request,))
                expired.append(request)
        return expired

    def next_deadline(self) -> float:
        """The earliest deadline of those who wait; inf when nobody has one."""
        while self._deadlines and self._deadlines[0][2] not in self:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def _new_line(self, group: Hashable) -> Line:
        if len(self._lines) >= LINES_KEPT:
            self._lines = {name: line for name, line in self._lines.items() if line.members}
        line = self._lines[group] = Line()
        return line

    def _add_deadline(self, request: Request) -> None:
        heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), request))
        self._dated += 1
        if len(self._deadlines) > 2 * self._dated + SLACK:
            self._deadlines = [entry for entry in self._deadlines if entry[2] in self]
            heapq.heapify(self._deadlines)
