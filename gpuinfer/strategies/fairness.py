"""Fair queueing between the clients of one class."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from gpuinfer.api import Request

CLIENTS_KEPT = 4096  # with more, those are forgotten that are least ahead

by_deadline = attrgetter("deadline")


class FairClients:
    """Start-time fair queueing, in rows (P. Goyal, H. Vin, H. Cheng, "Start-time fair queueing", 1996).

    A request starts, in virtual time, when its client's previous one ends, and no earlier than now; it ends so many
    rows later. The earliest start goes first: among clients that always have requests waiting, none gets ahead of
    another by more than one of its own blocks and one of the other's. Requests without a client are one client.

    Virtual time is the latest start that was served.
    """

    __slots__ = ("_ends", "_now")

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}  # of the last request of each client; who is not there is not ahead

    def order(self, requests: Sequence[Request], dated: bool) -> Iterator[Request]:
        """The requests, given oldest first, in the order in which to serve them.

        By start; of one client, and of those that start together, the earliest deadline first (C. Liu and J. Layland,
        "Scheduling algorithms for multiprogramming in a hard-real-time environment", 1973), then the oldest. Without
        `dated` nobody has a deadline.
        """
        heads: dict[Hashable, Request] = {}
        lines: defaultdict[Hashable, list[Request]] = defaultdict(list)
        for request in requests:
            client = request.client
            if heads.setdefault(client, request) is not request:
                lines[client].append(request)
        if len(heads) > 1:
            if dated:
                for client, line in lines.items():
                    line.insert(0, heads[client])
                    line.sort(key=by_deadline)
                    heads[client] = line.pop(0)
            return self._merge(heads, lines, dated)
        return iter(sorted(requests, key=by_deadline) if dated else requests)

    def _merge(
        self, heads: Mapping[Hashable, Request], lines: Mapping[Hashable, list[Request]], dated: bool
    ) -> Iterator[Request]:
        """Those that are not ahead start now, and so before all others: they need no heap."""
        now, ends = self._now, self._ends
        behind: Iterable[tuple[Hashable, Request]] = heads.items()
        if ends:
            behind = (item for item in behind if ends.get(item[0], 0.0) <= now)
        if dated:
            behind = sorted(behind, key=lambda item: item[1].deadline)
        numbers = itertools.count()
        heap: list[tuple[float, float, float, int, Request, Iterator[Request]]] = []

        def push(request: Request | None, others: Iterator[Request], start: float) -> None:
            if request is not None:
                heapq.heappush(heap, (start, request.deadline, request.arrived, next(numbers), request, others))

        for client, request in behind:
            yield request
            if client in lines:
                others = iter(lines[client])
                push(next(others, None), others, now + request.rows)
        for client, request in heads.items():
            if (start := ends.get(client, 0.0)) > now:
                push(request, iter(lines.get(client, ())), start)
        while heap:
            start, _, _, _, request, others = heapq.heappop(heap)
            yield request
            push(next(others, None), others, start + request.rows)

    def served(self, requests: Iterable[Request]) -> None:
        """These were cut, in this order."""
        now, ends = self._now, self._ends
        for request in requests:
            start = ends.get(request.client, 0.0)
            if start > now:
                now = start
            ends[request.client] = now + request.rows
        self._now = now
        if len(ends) > CLIENTS_KEPT:
            self._forget()

    def _forget(self) -> None:
        ahead = sorted(self._ends.items(), key=lambda item: item[1])
        self._ends = {client: end for client, end in ahead[CLIENTS_KEPT // 2 :] if end > self._now}
