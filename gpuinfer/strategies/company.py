"""How much company of lower classes a request of a higher class can bear in its batch.

A batch is not interrupted: whoever comes just after a cut waits for a full batch. That much is promised, and no more:
`p99 under load ≤ p99 alone + τ(full batch)`. So rows of lower classes that fill up its own batch may make that one
longer only as far as it has not waited already.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from gpuinfer.api import Priority, Request

MEMORY_S = 2.0  # rates forget with this time constant
KEPT = 0.95  # of a full batch's time is planned with; the rest is for what cannot be foreseen
RARE = 0.01  # what happens to fewer than these counts for no 99th percentile


class Service(Protocol):
    """What is known of the time of a batch: τ(n) ≈ per_row · n + fixed."""

    @property
    def known(self) -> bool: ...
    @property
    def fixed(self) -> float: ...
    @property
    def per_row(self) -> float: ...
    def seconds(self, rows: int) -> float: ...


class Rates:
    """The rows per second of each class, from what was cut and when; older batches count exponentially less."""

    __slots__ = ("_rates", "_seen")

    def __init__(self) -> None:
        self._rates = [0.0] * len(Priority)
        self._seen: float | None = None

    def learn(self, batch: Iterable[Request], now: float) -> None:
        fade = 1.0 if self._seen is None else math.exp(min(0.0, self._seen - now) / MEMORY_S)
        self._rates = [rate * fade for rate in self._rates]
        for request in batch:
            self._rates[request.priority] += request.rows / MEMORY_S
        self._seen = now

    def up_to(self, priority: int) -> float:
        """Of this class and the higher ones."""
        return sum(self._rates[: priority + 1])


def alone_s(service: Service, rate: float, lanes: int, block: int, most: int) -> float:
    """Nearly the longest that a request would take if only its own class, at `rate` rows/s, were there. inf: unbounded.

    While a batch of n runs, rate·τ(n) rows come; where that is n again, at n = rate·β / (1 − rate·α), it settles. Then
    all but one in a hundred come no earlier than shortly after a cut: they wait for what is left of a batch of n, and
    then for their own. At a low rate most find the lane free. `block` is what asks at once, `most` a full batch.
    """
    rate /= lanes
    if rate * service.per_row >= 1:
        return math.inf
    rows = max(block, math.ceil(rate * service.fixed / (1 - rate * service.per_row)))
    if rows >= most:
        return math.inf
    own = service.seconds(rows)
    busy = min(1.0, rate * own / rows)
    return own + own * max(0.0, 1 - RARE / busy if busy else 0.0)


def bearable_rows(service: Service, alone_s: float, own: int, full: int, waited_s: float) -> int:
    """Up to how many rows a batch may have so that its oldest request of a higher class keeps within its bound.

    `own` are the rows of that class in it, `waited_s` is how long that request has waited already. At least `own`, at
    most `full`.
    """
    if not service.known or own >= full:
        return full
    left = KEPT * service.seconds(full) + alone_s - waited_s
    if service.seconds(full) <= left:
        return full
    return own + bisect.bisect_right(_Times(service.seconds, own + 1, full), left)


class _Times(Sequence[float]):
    """τ of each number of rows, as far as somebody asks."""

    def __init__(self, seconds: Callable[[int], float], first: int, last: int) -> None:
        self._seconds, self._rows = seconds, range(first, last + 1)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> float:  # type: ignore[override]
        return self._seconds(self._rows[place])
