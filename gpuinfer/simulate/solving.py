"""The smallest number of replicas that meets a latency target."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gpuinfer.simulate.outcome import Outcome
from gpuinfer.units import number, short, whole

LEAST_SERVED = 0.99  # of what is offered
MOST = 1024  # replicas that are tried
GAIN = 0.99  # twice the replicas that leave more than this share of latency and losses help no more


@dataclass(frozen=True, slots=True)
class ReplicaTrial:
    """One number of replicas, and what came of it."""

    replicas: int
    outcome: Outcome
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
    run: Callable[[int], Outcome], target_s: float, *, alone_s: float, offered: float | None, capacity: float
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
        if _in_vain(tried, below, enough, target_s) or 2 * enough > MOST:
            return Solution(target_s, None, _sorted(tried), _defeat(tried[enough], target_s))
        below, enough = enough, 2 * enough
    while enough - below > 1:
        middle = (below + enough) // 2
        if meets(middle):
            enough = middle
        else:
            below = middle
    return Solution(target_s, enough, _sorted(tried), _victory(tried, enough, target_s, offered, capacity))


def _in_vain(tried: dict[int, ReplicaTrial], before: int, now: int, target_s: float) -> bool:
    """Whether twice the replicas have brought next to nothing of what is lacking: quicker answers, or more of them."""
    if before not in tried:
        return False
    few, many = tried[before], tried[now]
    quicker = many.p95 > target_s and many.p95 < GAIN * few.p95
    return not quicker and GAIN * many.outcome.served_share <= few.outcome.served_share


def _sorted(tried: dict[int, ReplicaTrial]) -> list[ReplicaTrial]:
    return [tried[replicas] for replicas in sorted(tried)]


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
