"""How long batches of each size have taken, without a belief about sizes that were not seen."""

from __future__ import annotations

import math
from bisect import bisect_left

from gpuinfer.strategies.service_time import size_of

NEAR = 16  # what a size takes is averaged over about so many batches
FORGOTTEN = 1024  # batches after which a size that was not seen again may take another time

Point = tuple[float, float]


class Curve:
    """The service time by straight lines between the sizes that were seen.

    Below the smallest of them a row is taken to cost what it costs there: the most that a smaller batch could save, so
    that whoever could use a shorter one tries it. Never falling: what a larger batch does a smaller one can do.
    """

    __slots__ = ("_batches", "_points", "_sizes")

    def __init__(self) -> None:
        self._batches = 0
        self._sizes: dict[int, list[float]] = {}  # size → [batches remembered, mean rows, mean seconds, last batch]
        self._points: list[Point] | None = None  # (rows, seconds), both rising; None: to be made anew

    def learn(self, rows: int, seconds: float) -> None:
        """A batch of so many rows took so long."""
        self._batches += 1
        size = self._sizes.setdefault(size_of(rows), [0, 0.0, 0.0, 0])
        size[0] = min(size[0] + 1, NEAR)
        size[1] += (rows - size[1]) / size[0]
        size[2] += (seconds - size[2]) / size[0]
        size[3] = self._batches
        self._points = None

    def seconds(self, rows: float) -> float:
        """0 before anything was seen."""
        points = self._points if self._points is not None else self._make_points()
        place = bisect_left(points, (rows, math.inf))
        if place == len(points):
            low, low_s = points[-1]
            return low_s * rows / low if low else 0.0
        (low, low_s), (high, high_s) = points[place - 1], points[place]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)

    def _make_points(self) -> list[Point]:
        oldest = self._batches - FORGOTTEN
        self._sizes = {number: size for number, size in self._sizes.items() if size[3] > oldest}
        points: list[Point] = []
        least = math.inf
        for _, rows, seconds, _ in sorted(self._sizes.values(), key=lambda size: -size[1]):
            least = min(least, seconds)
            points.append((rows, least))
        self._points = [(0.0, 0.0), *reversed(points)]
        return self._points
