"""Requests that wait for room at a replica: by class, within a class by deadline, then by arrival.

It reads no clock and does no I/O, so that the router and the simulator have the same.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import Generic, NamedTuple, TypeVar

from gpuinfer.api import Priority

T = TypeVar("T")


class QueueKey(NamedTuple):
    """The place of a request: the lower, the sooner it is sent. No two are equal."""

    fresh: bool  # False: a replica has had it before, and did not answer it
    priority: int
    deadline: float  # seconds on the caller's clock; inf: none
    number: int  # in the order of arrival


@dataclass(slots=True)
class QueueTicket:
    """The wait of one request, from its first on. Times are in seconds on the caller's clock."""

    key: QueueKey
    deadline: float = math.inf
    queued: bool = False  # it waits now
    since: float = 0.0  # when it last came into the queue
    stranded_at: float = 0.0  # since when nothing is there that could take it; 0: something is


class RequestQueue(Generic[T]):
    """At most `limit` requests that no replica has had. Those that come back from one are always let in, at the front.

    All takes a few microseconds: an insertion moves pointers, 8 bytes for each request behind it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.keys: list[QueueKey] = []  # sorted; read-only for others
        self._items: dict[QueueKey, T] = {}
        self._numbers = count()

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[T]:
        """All of them, the first to be sent first, as they are now."""
        return iter([self._items[key] for key in self.keys])

    def place(self, priority: int = Priority.NORMAL, deadline: float = math.inf) -> QueueKey:
        """Where a request that arrives now belongs."""
        return QueueKey(True, priority, deadline, next(self._numbers))

    def push(self, item: T, key: QueueKey) -> T | None:
        """Put a request in its place. Returns the one that finds no room: the last of those that no replica has had,
        which may be this one; None: there was room.
        """
        turned_away: T | None = None
        if key.fresh and len(self.keys) >= self._limit:
            last = self.keys[-1]
            if key > last:
                return item
            if last.fresh:
                turned_away = self.remove(last)
        insort(self.keys, key)
        self._items[key] = item
        return turned_away

    def at(self, place: int) -> T:
        """The request at this place; 0: the next to be sent. Only when there is one."""
        return self._items[self.keys[place]]

    def remove(self, key: QueueKey) -> T:
        """Take one out: it is sent, or its client is gone."""
        at = bisect_left(self.keys, key)
        del self.keys[at]
        return self._items.pop(key)


def back_in_front(key: QueueKey) -> QueueKey:
    """The place of a request that a replica has had: before all that none has had."""
    return key._replace(fresh=False)
