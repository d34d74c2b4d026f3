"""The requests of a load one by one, until enough have come: what the event loop draws from."""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Hashable
from typing import Protocol

from gpuinfer.load.arrivals import Arrivals, Closed, Offer


class Feed(Protocol):
    """`next_at` is when the next request arrives, inf when there is none; `taken` how many have been."""

    next_at: float
    taken: int

    def take(self) -> Offer:
        """The next request. Only when there is one."""
        ...


class OpenFeed:
    """At most `most` requests, none after `until` seconds."""

    __slots__ = ("_asks", "_most", "_next", "_until", "next_at", "taken")

    def __init__(self, arrivals: Arrivals, dice: random.Random, most: float, until: float) -> None:
        self._asks, self._most, self._until = arrivals.asks(dice), most, until
        self._next: Offer | None = None
        self.taken, self.next_at = 0, math.inf
        self._look()

    def take(self) -> Offer:
        ask = self._next
        assert ask is not None
        self.taken += 1
        self._look()
        return ask

    def _look(self) -> None:
        self._next = next(self._asks, None) if self.taken < self._most else None
        self.next_at = math.inf if self._next is None or self._next.at > self._until else self._next.at


class ClosedFeed:
    """The same of clients that ask again once they are answered; `clients` are those that ask at all."""

    __slots__ = ("_dice", "_draw", "_due", "_left", "_load", "_numbers", "_until", "clients", "next_at", "taken")

    def __init__(self, load: Closed, dice: random.Random, most: float, until: float) -> None:
        self._load, self._dice, self._until, self._left = load, dice, until, most
        self._draw = load.mix.draw(dice)
        self._due: list[tuple[float, int, Hashable]] = []  # a heap: when, a number for ties, the client
        self._numbers = itertools.count()
        self.taken, self.next_at = 0, math.inf
        self.clients = [ask.client for ask in load.asks(dice) if self._plan(ask.client, ask.at)]

    def take(self) -> Offer:
        at, _, client = heapq.heappop(self._due)
        self.taken += 1
        self.next_at = self._due[0][0] if self._due else math.inf
        ask = self._draw(at)
        return Offer(at, ask.rows, ask.priority, ask.timeout, client)

    def answered(self, client: Hashable, now: float, least_s: float = 0.0) -> bool:
        """The client has its answer, and asks again unless enough has been asked: then False, and it leaves.

        It thinks for at least `least_s` seconds.
        """
        return self._plan(client, now + max(least_s, self._load.think_s(self._dice)))

    def wants_more(self, now: float) -> bool:
        """Whether a client that were answered now would ask again."""
        return self._left >= 1 and now <= self._until

    def _plan(self, client: Hashable, at: float) -> bool:
        if self._left < 1 or at > self._until:
            return False
        self._left -= 1
        heapq.heappush(self._due, (at, next(self._numbers), client))
        self.next_at = self._due[0][0]
        return True
