"""How much company of lower classes a request of a higher class can bear in its batch.

A batch is not interrupted: whoever comes just after a cut waits for a full batch. That much is promised, and no more:
`p99 under load ≤ p99 alone + τ(full batch)`. So rows of lower classes that fill up its own batch may make that one
longer only as far as it has not waited already.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from gpuinfer.api import Priority, Request
from gpuinfer.strategies.curve import Curve

MEMORY_S = 2.0  # rates forget with this time constant
KEPT = 0.90  # of a full batch's time is planned with; the rest is for what cannot be foreseen
FREE = 0.03  # of a full batch's time is not worth a shorter batch, as where more rows take no longer
RARE = 0.01  # what happens to fewer than these counts for no 99th percentile
TRIES = 32


class Company:
    """Learns what batches cost and how fast the classes come; says how long a batch may get."""

    __slots__ = ("_asked", "_curve", "_rates", "_seen")

    def __init__(self) -> None:
        self._curve = Curve()
        self._rates = [0.0] * len(Priority)  # rows per second that were cut; older batches count exponentially less
        self._asked = [0.0] * len(Priority)  # requests per second, likewise
        self._seen: float | None = None

    def account(self, rows: Sequence[int], requests: Sequence[int], now: float) -> None:
        """So many of each class were cut."""
        fade = 1.0 if self._seen is None else math.exp(min(0.0, self._seen - now) / MEMORY_S)
        self._rates = [rate * fade + new / MEMORY_S for rate, new in zip(self._rates, rows, strict=True)]
        self._asked = [rate * fade + new / MEMORY_S for rate, new in zip(self._asked, requests, strict=True)]
        self._seen = now

    def observe(self, rows: int, seconds: float) -> None:
        """A batch of so many rows took so long."""
        self._curve.learn(rows, seconds)

    def bearable_rows(self, oldest: Request, now: float, own: int, full: int, lanes: int, spread: float) -> int:
        """Up to how many rows a batch may have so that its `oldest` request of the highest class keeps its bound.

        `own` are the rows of that class in it. All but few batches take at most (1 + `spread`) times what they usually
        do. At least `own`, at most `full`.
        """
        seconds, whole = self._curve.seconds, self._curve.seconds(full)
        left = (KEPT * whole + self._alone_s(oldest, full, lanes) - (now - oldest.arrived)) / (1 + spread)
        left = max(left, seconds(own) + FREE * whole)
        if own >= full or whole <= left:
            return full
        return own + bisect_right(range(own + 1, full + 1), left, key=seconds)

    def _alone_s(self, request: Request, full: int, lanes: int) -> float:
        """Nearly the longest that it would take if only its class and higher ones were there; inf: without a bound.

        While a batch of n runs, rate·τ(n) rows come; where that is n again it settles. Then all but one in a hundred
        come no earlier than shortly after a cut: they wait for what is left of a batch of n, and then for their own.
        At a low rate most find a lane free.
        """
        rate, asked = (sum(rates[: request.priority + 1]) / lanes for rates in (self._rates, self._asked))
        rows = min(request.rows, math.ceil(rate / asked)) if asked else request.rows
        for _ in range(TRIES):
            own = self._curve.seconds(rows)
            if rate * own <= rows:
                busy = rate * own / rows
                return own + (own * max(0.0, 1 - RARE / busy) if busy else 0.0)
            rows = math.ceil(rate * own)
            if rows >= full:
                break
        return math.inf
