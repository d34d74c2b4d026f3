"""What came of a simulation: its counters, each request where a recorder kept them, and the smallest number of replicas
that meets a latency target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from gpuinfer.api import Reason, Request
from gpuinfer.stats import Histogram, Snapshot, mean_size, summarise
from gpuinfer.units import number, short, whole


@dataclass(frozen=True)
class SimulationOutcome:
    """All that was counted after the warm-up. Rates are of the time until the last arrival, so that the end, when
    nothing comes any more, does not dilute them; latencies are of all requests.
    """

    snapshot: Snapshot  # of all replicas
    replicas: Sequence[Snapshot]
    seconds: float  # of simulated time that was counted, until the last arrival
    offered_requests: int
    offered_rows_per_s: float
    served_rows_per_s: float
    served_requests_per_s: float
    utilisation: float  # share of the time that the lanes spent on batches
    capacity_rows_per_s: float  # of all replicas, at the best batch size
    router_wait: Mapping[str, Any] = field(default_factory=lambda: Histogram().to_wire())
    """Of requests that were sent to replicas with a bound: how long they had waited in the router."""
    notices: Sequence[str] = ()  # what is to be said about it, once each

    @cached_property
    def latency_s(self) -> dict[str, float]:
        """`{mean, p50, p95, p99, max}` from arrival to answer; empty when nothing was answered."""
        return summarise(self.snapshot.latency)

    @cached_property
    def queue_wait_s(self) -> dict[str, float]:
        """The same from arrival to batch."""
        return summarise(self.snapshot.queue_wait)

    @cached_property
    def router_wait_s(self) -> dict[str, float]:
        """The same in the router, where requests at a replica are bounded; else empty."""
        return summarise(self.router_wait)

    @property
    def served_share(self) -> float:
        """Of the requests that were settled, those that were answered; 1 when there were none."""
        lost = sum(self.snapshot.errors.values())
        return self.snapshot.requests / (self.snapshot.requests + lost) if lost else 1.0

    @property
    def mean_batch_rows(self) -> float:
        """0 when no batch ran."""
        return mean_size(self.snapshot.batches)

    @property
    def max_batch_rows(self) -> int:
        return max(self.snapshot.batches, default=0)


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


LEAST_SERVED = 0.99  # of what is offered
MOST = 1024  # replicas that are tried
GAIN = 0.99  # twice the replicas that leave more than this share of latency and losses help no more


@dataclass(frozen=True, slots=True)
class ReplicaTrial:
    """One number of replicas, and what came of it."""

    replicas: int
    outcome: SimulationOutcome
    met: bool

    @property
    def p95(self) -> float:
        return self.outcome.latency_s.get("p95", math.inf)


@dataclass(frozen=True, slots=True)
class Solution:
    """`replicas` is None when no number of them meets the target; `answer` says it in a sentence."""

    target_s: float
    replicas: int | None
    tried: Sequence[ReplicaTrial]  # by replicas
    answer: str


def solve(
    run: Callable[[int], SimulationOutcome], target_s: float, *, alone_s: float, offered: float | None, capacity: float
) -> Solution:
    """Double the replicas until the target is met, then bisect.

    `run` simulates so many replicas. Those that could not serve what is `offered` (rows per second; None: that depends
    on the answers) are not tried: each has this `capacity`. `alone_s` is what the smallest batch takes.
    """
    if alone_s > target_s:
        why = f"one request alone takes {short(alone_s)}, more than the target of {short(target_s)}"
        return Solution(target_s, None, [], f"No number of replicas can: {why}. Raise the target, or use a faster one.")
    tried: dict[int, ReplicaTrial] = {}

    def meets(replicas: int) -> bool:
        outcome = run(replicas)
        p95 = outcome.latency_s.get("p95", math.inf)
        tried[replicas] = ReplicaTrial(replicas, outcome, p95 <= target_s and outcome.served_share >= LEAST_SERVED)
        return tried[replicas].met

    below = 0 if offered is None else max(0, math.ceil(offered * LEAST_SERVED / capacity) - 1)
    enough = below + 1
    if enough > MOST:
        why = f"{whole(offered or 0)} rows/s are offered, and each serves {number(capacity)}"
        return Solution(target_s, None, [], f"Over {MOST:,} replicas would be needed: {why}. Use faster ones.")
    while not meets(enough):
        few, many = tried.get(below), tried[enough]
        in_vain = 2 * enough > MOST
        if few is not None:  # whether twice the replicas have brought quicker answers, or more of them
            quicker = many.p95 > target_s and many.p95 < GAIN * few.p95
            in_vain |= not quicker and GAIN * many.outcome.served_share <= few.outcome.served_share
        if in_vain:
            return Solution(target_s, None, [tried[count] for count in sorted(tried)], _defeat(many, target_s))
        below, enough = enough, 2 * enough
    while enough - below > 1:
        middle = (below + enough) // 2
        if meets(middle):
            enough = middle
        else:
            below = middle
    answer = _victory(tried, enough, target_s, offered, capacity)
    return Solution(target_s, enough, [tried[count] for count in sorted(tried)], answer)


def _defeat(last: ReplicaTrial, target_s: float) -> str:
    p95 = f"p95 is {short(last.p95)}" if last.p95 < math.inf else "nothing is answered"
    if last.outcome.served_share < LEAST_SERVED:
        p95 += f" and {last.outcome.served_share:.1%} is served"
    cure = "Raise the target, or let requests wait less for company."
    if last.p95 <= target_s:
        cure = "Look at what is lost, and why: more replicas do not mend it."
    return f"No number of replicas was found: with {last.replicas} {p95}, where {short(target_s)} is the target. {cure}"


def _victory(
    tried: dict[int, ReplicaTrial], enough: int, target_s: float, offered: float | None, capacity: float
) -> str:
    trial = tried[enough]
    rate = whole(trial.outcome.served_rows_per_s)
    word = f"{enough} replica serves" if enough == 1 else f"{enough} replicas serve"
    text = f"{word} {rate} rows/s with p95 {short(trial.p95)}, within the target of {short(target_s)}"
    if enough == 1:
        return f"{text}."
    fewer = enough - 1
    fewer_word = "1 does" if fewer == 1 else f"{fewer} do"
    if fewer in tried:
        lacking = tried[fewer]
        why = f"p95 {short(lacking.p95)}" if lacking.p95 > target_s else f"{lacking.outcome.served_share:.1%} served"
        return f"{text}; {fewer_word} not ({why})."
    return f"{text}; {fewer_word} not (offered {whole(offered or 0)} > capacity {whole(fewer * capacity)} rows/s)."
