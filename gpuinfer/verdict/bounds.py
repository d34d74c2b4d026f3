"""The most rows per second that each part of a run allows, by the operational laws.

Utilisation law: U = X D, so that a part which was busy a share U of the time allows X / U at most. Little's law and
the interactive response time law: with N requests outstanding, each of which takes ΣD seconds of service and thinks
for Z, X ≤ N / (ΣD + Z). They assume nothing but that what was counted flows: Denning and Buzen, "The Operational
Analysis of Queueing Network Models" (1978); Lazowska, Zahorjan, Graham and Sevcik, "Quantitative System
Performance" (1984), chapters 3 and 5.
"""

from __future__ import annotations

import math

from gpuinfer.evidence import Evidence, busy_s
from gpuinfer.verdict.curve import Curve

BINDS = 0.85  # a bound binds when the run reached this share of it
ROOMY = 1.1  # times what fits into the lanes: less outstanding than that is what keeps batches small
CAPPED = 0.2  # of the batches cut because no more rows fit: there is a cap, and it is felt


def bounds(run: Evidence, curve: Curve | None) -> dict[str, float]:
    """Rows per second at most, by what limits them: those that are known.

    What the lanes allow depends on the batches that they get: of the best size ("forward"), of the largest that a cap
    lets through, of all rows that may be outstanding. That they were busy says little: one batch, however small, is cut
    as soon as a lane is free.
    """
    found = {
        "roofline": run.roofline.rows_per_s if run.roofline else 0.0,
        "forward": _served(run, curve, math.inf),
        "cap": _served(run, curve, cap(run)) if math.isfinite(cap(run)) else 0.0,
        "outstanding": _served(run, curve, outstanding(run) / max(1, len(run.forwards))),
        "search": _by_use(run, run.busy(run.work)),
        "cores": _by_use(run, run.cores_busy / run.cores_left if run.on_cpu else 0.0),
        "arrival": run.facts.get("offered_rows_per_s", 0.0),
        "concurrency": concurrency(run, waiting_s=0.0),
        "timer": concurrency(run, waiting_s=run.queue_wait_s) if run.cut_by("waited") >= 0.5 else 0.0,
    }
    return {name: bound for name, bound in found.items() if bound > 0 and math.isfinite(bound)}


def _served(run: Evidence, curve: Curve | None, rows: float) -> float:
    """By all forward lanes, with batches of so many rows or of fewer where that is better."""
    if curve is None:
        return _by_use(run, run.busy(run.forwards))
    return len(run.forwards) * curve.rate(min(rows, curve.best())) if rows > 0 else 0.0


def cap(run: Evidence) -> float:
    """The most rows that a batch may have, as far as it shows; inf where batches are cut for other reasons.

    Where all that is outstanding would not fill the lanes with larger ones, their share of it is no cap.
    """
    most = max(run.batch_s, default=math.inf)
    felt = run.cut_by("full", "cap") >= CAPPED and outstanding(run) > ROOMY * most * len(run.forwards)
    return most if felt else math.inf


def outstanding(run: Evidence) -> float:
    """Rows that may be under way at once; by Little's law (N = X R) those that were, when the workload does not say."""
    told = run.facts.get("rows_outstanding")
    if told is None and run.blocks_outstanding is not None:
        told = run.blocks_outstanding * run.block_rows
    return told or run.rows_per_s * run.latency_s


def _by_use(run: Evidence, utilisation: float) -> float:
    return run.rows_per_s / utilisation if utilisation > 0 else 0.0


def concurrency(run: Evidence, waiting_s: float) -> float:
    """N / (ΣD + Z) in rows per second, for requests that wait so long in the queue; 0 when N is not known."""
    blocks, cycle = run.blocks_outstanding, search_s(run) + served_s(run) + waiting_s
    return blocks * run.block_rows / cycle if blocks and cycle > 0 else 0.0


def search_s(run: Evidence) -> float:
    """Seconds of work for each request, in the lanes that make them; where there are none, all that clients think."""
    if run.work or not run.requests:
        return busy_s(run.work) / run.requests if run.requests else 0.0
    return think_s(run)


def think_s(run: Evidence) -> float:
    """From an answer to the same client's next request, by the interactive response time law: Z = N / X - R."""
    blocks = run.blocks_outstanding
    return max(0.0, blocks * run.wall_s / run.requests - run.latency_s) if blocks and run.requests else 0.0


def served_s(run: Evidence) -> float:
    """Seconds that the batch of a request takes: of a row's batch, since larger ones serve more requests."""
    rows = math.fsum(rows * count for rows, (count, _) in run.batch_s.items())
    if not rows:
        return max(0.0, run.latency_s - run.queue_wait_s)
    return math.fsum(rows * seconds for rows, (_, seconds) in run.batch_s.items()) / rows
