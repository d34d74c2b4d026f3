"""What each class of requests is owed, what each client of a class is owed, and whom a full queue turns away.

Credits are rows, so that shares hold over time although no block is split: deficit counters as in M. Shreedhar and
G. Varghese, "Efficient fair queueing using deficit round robin", 1995; that a class may also run into debt, and pays it
back later, is their surplus variant (H. Adiseshu, G. Parulkar, G. Varghese, "A reliable and scalable striping
protocol", 1996). Lists hold one entry for each class, highest first. Users write shares as `60,30,10`,
`high=60,low=20`, or a table.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from operator import attrgetter
from typing import Any

from gpuinfer.api import Priority, QueueView, Request

GROUPS_KEPT = 64  # with more groups, the group that was served longest ago is forgotten with its credits


def hand_on(rows: Sequence[float], most: Sequence[float]) -> list[float]:
    """What exceeds a class's `most` goes to the next lower class that can use it, then to the next higher one."""
    result = list(rows)
    for number, limit in enumerate(most):
        surplus = result[number] - limit
        if surplus <= 0:
            continue
        result[number] = limit
        for other in (*range(number + 1, len(result)), *range(number - 1, -1, -1)):
            taken = min(surplus, most[other] - result[other])
            if taken > 0:
                result[other] += taken
                surplus -= taken
    return result


class Credits:
    """How many rows each class is owed (or owes, below 0), separately for each group of requests.

    Credits and debts of a group add up to nothing. Nobody saves credit while it has nothing waiting: it then flows on.
    A debt stays, and is paid from what its class does not use of its share.
    """

    def __init__(self, shares: Sequence[float]) -> None:
        """`shares` are parts of 1. What they leave is for the highest class that waits."""
        self._shares = list(shares)
        self._of: dict[Hashable, list[float]] = {}

    def of(self, group: Hashable) -> Sequence[float]:
        return self._of.get(group) or [0.0] * len(self._shares)

    def due(self, group: Hashable, rows: float, waiting: Sequence[int]) -> list[float]:
        """How many rows of a batch of so many are for each class, when no block were indivisible.

        Its share and its credit, but no more than it has `waiting`. They add up to `rows`, if as many wait.
        """
        entitled = [credit + share * rows for credit, share in zip(self.of(group), self._shares, strict=True)]
        first = next((number for number, some in enumerate(waiting) if some), 0)
        entitled[first] += rows * (1 - sum(self._shares))
        return hand_on(entitled, waiting)

    def settle(self, group: Hashable, served: Sequence[int], waiting: Sequence[int], debt: float) -> None:
        """A batch of these rows was cut; `waiting` says what waited before. No class comes to owe more than `debt`.

        A class that would owe more, because its small blocks fit where no others do, has had what no other could use.
        """
        due = self.due(group, sum(served), waiting)
        self._of.pop(group, None)
        if tuple(served) != tuple(waiting):
            credits = [rows - got for rows, got in zip(due, served, strict=True)]
            self._of[group] = _bounded(credits, debt)
        if len(self._of) > GROUPS_KEPT:
            del self._of[next(iter(self._of))]


def _bounded(credits: list[float], debt: float) -> list[float]:
    forgiven = sum(max(0.0, -debt - credit) for credit in credits)
    if not forgiven:
        return credits
    owed = sum(credit for credit in credits if credit > 0)
    return [credit * (1 - forgiven / owed) if credit > 0 else max(credit, -debt) for credit in credits]


CLASSES = [priority.name.lower() for priority in Priority]
FORM = f"Give {len(CLASSES)} percentages, for {', '.join(CLASSES)}: 50,30,20; or some by name: high=60."


def read_shares(given: Any, default: Sequence[float]) -> tuple[float, ...]:
    """Percent for each class, highest first. Raises `ValueError`, with the cure, for what cannot be.

    Classes that are not named share what is left in the proportion of their defaults.
    """
    parts = [part.strip() for part in given.split(",") if part.strip()] if isinstance(given, str) else given
    if not isinstance(parts, Mapping | Sequence):
        raise ValueError(f"{given!r} are no shares. {FORM}")
    named = dict(parts) if isinstance(parts, Mapping) else None
    if named is None and parts and all(isinstance(part, str) and _separator(part) for part in parts):
        pairs = [part.split(_separator(part), 1) for part in parts]
        named = {name.strip(): value for name, value in pairs}
        if len(named) != len(pairs):
            raise ValueError(f"a class is named twice. {FORM}")
    if named is None:
        if len(parts) != len(CLASSES):
            raise ValueError(f"these are {len(parts)} shares. {FORM}")
        named = dict(zip(CLASSES, parts, strict=True))
    shares = {str(name): _number(value) for name, value in named.items()}
    for name in shares:
        if name not in CLASSES:
            near = get_close_matches(name, CLASSES, n=1, cutoff=0.5)
            hint = f" Did you mean '{near[0]}'?" if near else ""
            raise ValueError(f"no class named '{name}'.{hint} Classes: {', '.join(CLASSES)}.")
    usual = {name: part for name, part in zip(CLASSES, default, strict=True) if name not in shares}
    left = 100 - sum(shares.values())
    if usual and left <= 0 < min(shares.values()):
        raise ValueError(f"the shares add up to {100 - left:g} %, which leaves nothing for the others. {FORM}")
    shares |= {name: left * part / sum(usual.values()) for name, part in usual.items()}
    for name in CLASSES:
        if not 0 < shares[name] < math.inf:
            raise ValueError(f"a share of {shares[name]:g} % for {name} cannot be. Give each class more than 0.")
    if sum(shares.values()) > 100 + 1e-9:
        raise ValueError(f"the shares add up to {sum(shares.values()):g} %. Give at most 100 in all.")
    return tuple(shares[name] for name in CLASSES)


def _separator(part: str) -> str:
    return next((sign for sign in "=:" if sign in part), "")


def _number(value: Any) -> float:
    text = value.strip().removesuffix("%") if isinstance(value, str) else value
    if isinstance(text, bool):
        raise ValueError(f"{value!r} is no share. {FORM}")
    try:
        return float(text)
    except (TypeError, ValueError):
        raise ValueError(f"{value!r} is no share. {FORM}") from None


CLIENTS_KEPT = 4096  # with more, those are forgotten that are least ahead

by_deadline = attrgetter("deadline")


class FairClients:
    """Start-time fair queueing, in rows (P. Goyal, H. Vin, H. Cheng, "Start-time fair queueing", 1996).

    A request starts, in virtual time, when its client's previous one ends, and no earlier than now; it ends so many
    rows later. The earliest start goes first: among clients that always have requests waiting, none gets ahead of
    another by more than one of its own blocks and one of the other's. Requests without a client are one client.

    Virtual time is the latest start that was served.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[Hashable, float] = {}  # of the last request of each client; who is not there is not ahead

    def order(self, requests: Sequence[Request], dated: bool) -> Iterator[Request]:
        """The requests, given oldest first, in the order in which to serve them.

        By start; of one client, and of those that start together, the earliest deadline first (C. Liu and J. Layland,
        "Scheduling algorithms for multiprogramming in a hard-real-time environment", 1973), then the oldest. Without
        `dated` no request has a deadline.
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
        now, ends = self._now, self._ends
        for request in requests:
            start = ends.get(request.client, 0.0)
            if start > now:
                now = start
            ends[request.client] = now + request.rows
        self._now = now
        if len(ends) > CLIENTS_KEPT:  # those that had least are forgotten
            ahead = sorted(ends.items(), key=lambda item: item[1])
            self._ends = {client: end for client, end in ahead[CLIENTS_KEPT // 2 :] if end > now}


CHUNK = 256  # requests looked at in one go


def give_up(queue: QueueView, arriving: Request, shares: Sequence[float]) -> list[Request]:
    """The requests to turn away so that `arriving` fits; none when it has no better right to the room.

    The room of a class is its part, of 1, of all the rows that may wait. Only classes that use more than theirs give
    way, the lowest first, and of each the newest requests: to any class that stays within its own room, and else to
    higher classes only.
    """
    rooms = [share * (queue.rows + arriving.rows) for share in shares]
    within = queue.class_rows[arriving.priority] + arriving.rows <= rooms[arriving.priority]
    missing = arriving.rows
    chosen: list[Request] = []
    for number in range(len(rooms) - 1, -1, -1):
        if number == arriving.priority or (number < arriving.priority and not within):
            continue
        over = queue.class_rows[number] - rooms[number]
        if over <= 0:
            continue
        newest_first = (
            request
            for end in range(len(queue.waiting), 0, -CHUNK)
            for request in reversed(queue.waiting[max(0, end - CHUNK) : end])
        )
        for request in newest_first:
            if request.priority != number:
                continue
            chosen.append(request)
            missing -= request.rows
            over -= request.rows
            if missing <= 0:
                return chosen
            if over <= 0:
                break
    return []
