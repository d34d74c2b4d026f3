"""How long a batch takes by its size: what the run itself has shown, and what the bare model does at its best."""

from __future__ import annotations

import bisect
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gpuinfer.evidence import Evidence, busy_s

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
