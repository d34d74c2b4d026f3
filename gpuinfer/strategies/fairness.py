"""Fair queueing between the clients of one class."""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
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
        of_client: defaultdict[Hashable, list[Request]] = defaultdict(list)
        for request in requests:
            of_client[request.client].append(request)
        if dated:
            for line in of_client.values():
                line.sort(key=by_deadline)
        if len(of_client) == 1:
            yield from next(iter(of_client.values()))
            return
        yield from self._merge(of_client, dated)

    def _merge(self, of_client: dict[Hashable, list[Request]], dated: bool) -> Iterator[Request]:
        """Those that are not ahead start now, and so before all others: they need no heap."""
        now, ends = self._now, self._ends
        behind: Iterable[list[Request]] = (line for client, line in of_client.items() if ends.get(client, 0.0) <= now)
        if dated:
            behind = sorted(behind, key=lambda line: line[0].deadline)
        numbers = itertools.count()
        heap: list[tuple[float, float, float, int, list[Request], int]] = []

        def push(line: list[Request], place: int, start: float) -> None:
            request = line[place]
            heapq.heappush(heap, (start, request.deadline, request.arrived, next(numbers), line, place))

        for line in behind:
            yield line[0]
            if len(line) > 1:
                push(line, 1, now + line[0].rows)
        for client, line in of_client.items():
            if (start := ends.get(client, 0.0)) > now:
                push(line, 0, start)
        while heap:
            start, *_, line, place = heapq.heappop(heap)
            yield line[place]
            if place + 1 < len(line):
                push(line, place + 1, start + line[place].rows)

    def served(self, request: Request) -> None:
        """This request was cut. Called in the order of the batch."""
        start = max(self._now, self._ends.get(request.client, 0.0))
        self._now = start
        self._ends[request.client] = start + request.rows
        if len(self._ends) > CLIENTS_KEPT:
            self._forget()

    def _forget(self) -> None:
        ahead = sorted(self._ends.items(), key=lambda item: item[1])
        self._ends = {client: end for client, end in ahead[CLIENTS_KEPT // 2 :] if end > self._now}
