"""The most rows per second that each part of a run allows, by the operational laws.

Utilisation law: U = X D, so that a part which was busy a share U of the time allows X / U at most. Little's law and
the interactive response time law: with N requests outstanding, each of which takes ΣD seconds of service and thinks
for Z, X ≤ N / (ΣD + Z). They assume nothing but that what was counted flows: Denning and Buzen, "The Operational
Analysis of Queueing Network Models" (1978); Lazowska, Zahorjan, Graham and Sevcik, "Quantitative System
Performance" (1984), chapters 3 and 5.

How long a batch takes by its size: what the run itself has shown, and what the bare model does at its best.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuinfer.report.evidence import Evidence, busy_s

CLASSES_PER_DOUBLING = 4  # sizes this close are one point
ALIKE = 0.97  # of the best rate: as good
ENOUGH = 0.9  # of the best rate: what is left is hardly worth as many rows again
HALVINGS = 30
RARE = 0.02  # of the batches: a size seen less often says little
NEAR = 1.25  # a size measured within this factor of the roofline's speaks for itself


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (rows, seconds), both rising: straight lines between them, no better rate beyond the last.

    Below the first the line of the first two goes on, down to a fixed cost that even an empty batch would have.
    """

    points: Sequence[tuple[float, float]]

    def seconds(self, rows: float) -> float:
        first, last = self.points[0], self.points[-1]
        if rows >= last[0] or first is last:
            return rows * last[1] / last[0]
        index = max(1, bisect.bisect_left(self.points, (rows, math.inf)))
        (low, low_s), (high, high_s) = self.points[index - 1 : index + 1]
        return max(0.0, low_s + (rows - low) * (high_s - low_s) / (high - low))

    def best(self) -> float:
        """The smallest size known that no other beats by much."""
        most = max(self.rate(rows) for rows, _ in self.points)
        return next(rows for rows, _ in self.points if self.rate(rows) >= ALIKE * most)

    def enough(self) -> float:
        """The smallest size that is nearly as good as the best, also between the sizes that are known."""
        low, high = 0.0, self.best()
        wanted = ENOUGH * self.rate(high)
        for _ in range(HALVINGS):
            middle = (low + high) / 2
            low, high = (low, middle) if self.rate(middle) >= wanted else (middle, high)
        return high

    def rate(self, rows: float) -> float:
        """Rows per second of one lane that serves batches of so many rows, one after the other."""
        return rows / max(self.seconds(rows), 1e-12)


def curve_of(run: Evidence) -> Curve | None:
    """None when no batch was timed. A lane's own work around each batch (replies) counts as part of it."""
    measured = _classes(run.batch_s)
    if not measured:
        return None
    spent = math.fsum(seconds for _, seconds in run.batch_s.values())
    around = max(1.0, busy_s(run.forwards) / spent) if spent else 1.0
    points = [(rows, seconds * around) for rows, seconds in measured]
    best = run.roofline
    if best is not None and not any(1 / NEAR < rows / best.at_rows < NEAR for rows, _ in points):
        alone = len(run.forwards) * best.at_rows / best.rows_per_s
        points.append((best.at_rows, alone * run.stretched))
    return Curve(_rising(sorted(points)))


def _classes(batch_s: Mapping[int, Sequence[float]]) -> list[tuple[float, float]]:
    """(mean rows, mean seconds) of the batches of about one size, for each size that is not rare."""
    total = math.fsum(count for count, _ in batch_s.values())
    classes: dict[int, list[float]] = {}
    for rows, (count, seconds) in batch_s.items():
        sums = classes.setdefault(round(CLASSES_PER_DOUBLING * math.log2(max(rows, 1))), [0.0, 0.0, 0.0])
        for index, value in enumerate((count, count * rows, seconds)):
            sums[index] += value
    return [(rows / count, seconds / count) for count, rows, seconds in classes.values() if count >= RARE * total]


def _rising(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A larger batch takes no less time: where noise says otherwise the earlier point holds."""
    risen: list[tuple[float, float]] = []
    for rows, seconds in points:
        risen.append((rows, max(seconds, risen[-1][1]) if risen else seconds))
    return risen


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
