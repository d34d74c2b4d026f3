"""Each request of a simulation, for what counters cannot tell: how long it took until a target was met again, say."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuinfer.api import Reason, Request


class Watch:
    """A recorder that keeps what happened: `simulate(…, recorder=lambda: watch)`; replicas may share one.

    `settled_at` holds (arrival, end, outcome, request) in the order of the ends, `batches` (time, rows, reason) in that
    of the cuts. Times are seconds since the beginning.
    """

    def __init__(self) -> None:
        self.settled_at: list[tuple[float, float, str, Request]] = []
        self.batches: list[tuple[float, int, Reason]] = []

    def arrived(self, request: Request) -> None:
        """Nothing to keep: each request ends."""

    def cut(self, requests: Sequence[Request], rows: int, reason: Reason, now: float) -> int:
        self.batches.append((now, rows, reason))
        return len(self.batches)

    def ran(self, batch: int, seconds: float, now: float) -> None:
        """Nothing to keep."""

    def settled(self, request: Request, outcome: str, now: float) -> None:
        self.settled_at.append((request.arrived, now, outcome, request))

    def latency(self, share: float, since: float = 0.0, until: float = math.inf) -> float:
        """The latency that this share of the requests did not exceed which arrived from `since` to before `until`.

        inf where too many were never answered, NaN when none arrived.
        """
        took = sorted(
            end - arrival if outcome == "ok" else math.inf
            for arrival, end, outcome, _ in self.settled_at
            if since <= arrival < until
        )
        return took[max(0, math.ceil(share * len(took)) - 1)] if took else math.nan
