"""The waiting requests, and the clients that may bring more of them.

`Queue` has one line for each group, oldest first, and their deadlines; `Clients` knows how many of the live clients
think, and for how long they usually do, at a cost that does not grow with their number. Neither reads a clock.
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from operator import attrgetter
from typing import overload

from gpuinfer.api import Limits, Priority, QueueView, Request

MEMORY = 16  # the average think time forgets over this many samples
OUTLIER = 4.0  # a sample counts as no more than this many times the average, so that a pause does not spoil it
JITTER_S = 20e-6  # … and this much more, so that an average of nothing can grow again
DORMANT = 20.0  # a client that has thought for this many times the average is waited for no longer,
DORMANT_S = 0.020  # unless that is less than this

RATE_WINDOW_S = 0.25  # the arrival rate forgets with this time constant
LINES_KEPT = 64  # empty lines are forgotten, with their arrival rates, once there are more lines than this
SLACK = 64  # entries that may be out of date before a list is swept

by_arrival = attrgetter("arrived")


class Clients:
    """Live clients, and which of them think: those that neither wait nor are being served.

    A client that thinks for unusually long is dormant: it does not count as thinking until its next request. While no
    think time is known, none is unusual.
    """

    def __init__(self) -> None:
        self.outstanding = 0  # requests that are not settled, of all clients and of none
        self.think_s = math.inf  # from an answer to the same client's next request; inf: not known
        self._live: set[Hashable] = set()
        self._of: dict[Hashable, int] = {}  # each client's outstanding requests
        self._answered: dict[Hashable, float] = {}  # when each that neither waits nor is being served had its answer
        self._thinking: OrderedDict[Hashable, float] = OrderedDict()  # since when; the longest first
        self._samples = 0

    def __len__(self) -> int:
        return len(self._live)

    def join(self, client: Hashable, now: float | None = None) -> None:
        """Count this client as live: it may ask from `now` on. Without a time it is dormant until it asks."""
        if client in self._live:
            return
        self._live.add(client)
        if now is not None and client not in self._of:
            self._thinking[client] = now

    def leave(self, client: Hashable) -> None:
        """Wait no longer for this client. Its outstanding requests still have to be answered."""
        self._live.discard(client)
        self._thinking.pop(client, None)
        self._answered.pop(client, None)

    def asked(self, client: Hashable, now: float) -> None:
        """One more outstanding request; `client` is None for a request that names no client."""
        if client is None:
            self.outstanding += 1
            return
        count = self._of[client] = self._of.get(client, 0) + 1  # raises for one that cannot be hashed: nothing is done
        self.outstanding += 1
        if count == 1 and client in self._live:
            self._thinking.pop(client, None)
            answered = self._answered.pop(client, None)
            if answered is not None:
                self._learn(max(0.0, now - answered))

    def answered(self, client: Hashable, now: float) -> None:
        """One outstanding request less: answered, failed or withdrawn."""
        self.outstanding -= 1
        if client is None:
            return
        count = self._of.pop(client) - 1
        if count:
            self._of[client] = count
        elif client in self._live:
            self._thinking[client] = self._answered[client] = now

    def thinking_at(self, now: float) -> int:
        """How many clients may well ask soon. `now` never goes back by much."""
        while self._thinking and self.next_dormant() <= now:
            self._thinking.popitem(last=False)
        return len(self._thinking)

    def next_dormant(self) -> float:
        """When the first of those that think will have thought for unusually long; inf when there is none."""
        if not self._thinking:
            return math.inf
        return next(iter(self._thinking.values())) + max(DORMANT * self.think_s, DORMANT_S)

    def _learn(self, seconds: float) -> None:
        """A moving average: plain over the first samples, then with exponentially decaying weights."""
        if not self._samples:
            self.think_s = seconds
        self._samples = min(self._samples + 1, MEMORY)
        seconds = min(seconds, OUTLIER * self.think_s + JITTER_S)
        self.think_s += (seconds - self.think_s) / self._samples


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


class GroupQueue:
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
        elif len(requests) == 1:  # turned away, withdrawn or expired, perhaps one by one out of thousands
            first = bisect_left(self._requests, requests[0].arrived, key=by_arrival)
            del self._requests[self._requests.index(requests[0], first)]
        elif len(self._requests) > 2 * len(self.members) + SLACK:
            self._sweep()

    def view(self, now: float, limits: Limits, clients: Clients, deadline: float) -> QueueView:
        if len(self._requests) != len(self.members):
            self._sweep()
        # rows per second: each arrival counts with a weight that decays exponentially with its age
        self._rate = self._rate * math.exp((self._looked - now) / RATE_WINDOW_S) + self._arrived / RATE_WINDOW_S
        self._arrived, self._looked = 0, now
        return QueueView(
            self._waiting,
            self.rows,
            now,
            limits,
            len(clients),
            clients.thinking_at(now),
            self._rate,
            clients.think_s,
            clients.outstanding,
            deadline,
            self._class_rows,
        )

    def _sweep(self) -> None:
        self._requests[:] = [request for request in self._requests if request in self.members]


class Queue:
    """All waiting requests, by group."""

    def __init__(self) -> None:
        self.rows = 0
        self.clients = Clients()
        self._lines: dict[Hashable, GroupQueue] = {}
        self._deadlines: list[tuple[float, int, Request]] = []  # a heap; entries of requests that left are skipped
        self._numbers = itertools.count()
        self._dated = 0  # requests with a deadline that still wait

    def __contains__(self, request: Request) -> bool:
        line = self._lines.get(request.group)
        return line is not None and request in line.members

    def views(self, now: float, limits: Limits) -> list[tuple[GroupQueue, QueueView]]:
        """The lines in which requests wait, and how a strategy sees them now."""
        deadline = self.next_deadline() if self._deadlines else math.inf
        return [(line, line.view(now, limits, self.clients, deadline)) for line in self._lines.values() if line.members]

    def view(self, group: Hashable, now: float, limits: Limits) -> QueueView | None:
        """How a strategy sees the line of this group; None when it is empty."""
        line = self._lines.get(group)
        if line is None or not line.members:
            return None
        return line.view(now, limits, self.clients, self.next_deadline())

    def add(self, request: Request) -> None:
        """Queue a request. It counts as outstanding until `clients.answered`, which is called when it is settled."""
        line = self._lines.get(request.group)
        if line is None:
            if len(self._lines) >= LINES_KEPT:
                self._lines = {name: line for name, line in self._lines.items() if line.members}
            line = self._lines[request.group] = GroupQueue()
        self.clients.asked(request.client, request.arrived)
        line.add(request)
        self.rows += request.rows
        if request.deadline < math.inf:
            heapq.heappush(self._deadlines, (request.deadline, next(self._numbers), request))
            self._dated += 1
            if len(self._deadlines) > 2 * self._dated + SLACK:
                self._deadlines = [entry for entry in self._deadlines if entry[2] in self]
                heapq.heapify(self._deadlines)

    def remove(self, requests: tuple[Request, ...]) -> None:
        """Take waiting requests of one group out: cut, cancelled or failed."""
        line = self._lines[requests[0].group]
        before = line.rows
        line.remove(requests)
        self.rows -= before - line.rows
        if self._dated:
            self._dated -= sum(request.deadline < math.inf for request in requests)

    @property
    def widest(self) -> int:
        """Rows of the widest request that waits; 0 where none does."""
        return max((request.rows for line in self._lines.values() for request in line.members), default=0)

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
        """The earliest deadline of those that wait; inf when none has one."""
        while self._deadlines and self._deadlines[0][2] not in self:
            heapq.heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf
