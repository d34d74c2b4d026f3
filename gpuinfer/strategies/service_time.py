"""How long a batch takes by its size, learnt from the batches that ran: a line with known sizes on it, and a curve
without a model for sizes that were not seen.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right

MEMORY = 48  # the line through recent batches forgets over so many
NEAR = 12  # what is known of one size alone forgets over so many
ALIKE = 0.05  # sizes that differ by less than this share of the average teach nothing about what a row costs
OUTLIER = 3.0  # deviations from what was expected, of those that are usual: more says nothing, and counts as so many
LEAST = 0.03  # is always usual
CHANGE = 6.0  # summed deviations, beyond one for each batch, that cannot be chance
FIRST = 4  # batches of a size that are all believed
LATE = 2.5  # mean absolute deviations above the mean: one batch in twenty, if they are anything like normal
FASTER = 1.05  # a size is better than another when its rate is higher by this factor
TICK_S, LONGEST_S = 1e-9, 1e6  # a time below or above counts as these: what no clock can measure, or no client awaits
REFRESH = 4  # batches between two searches for sizes that are good


class ServiceTime:
    """The service time τ(n) of a batch of n rows in seconds: a line α·n + β, and what single sizes are known to take.

    The line is a least-squares fit with exponentially decaying weights (Finch, "Incremental calculation of weighted
    mean and variance", 2009), without outliers; as long as all batches are alike it is flat, which makes β an upper
    bound. Sizes are counted in quarters of a doubling with their edges at powers of two, since that is where hardware
    makes its steps; a size that was seen counts more than the line. When everything has become slower or faster all
    that is known is scaled. Each call costs the same however much was learnt.
    """

    def __init__(self) -> None:
        self.batches = 0  # learnt from
        self.smallest = self.largest = 0  # rows of a batch that was seen
        self._seen = 0  # batches that the averages remember
        self._mean_rows = self._mean_s = self._variance = self._covariance = 0.0
        self._judged = 0  # batches that the next remembers
        self._deviation = 0.0  # mean absolute deviation from what was expected, as a share of it
        self._sizes: dict[int, list[float]] = {}  # size → [batches remembered, mean rows, mean seconds, most rows]
        self._sides = (_Side(1), _Side(-1))
        self._edges: list[int] = []  # rows up to which a size reaches, of those that are faster than all below
        self._best: list[int] = []  # … and the most rows seen of it

    @property
    def known(self) -> bool:
        return self._seen > 0

    @property
    def per_row(self) -> float:
        """α: seconds that one more row costs."""
        return max(0.0, self._covariance / (self._variance + (ALIKE * self._mean_rows) ** 2)) if self._seen else 0.0

    @property
    def fixed(self) -> float:
        """β: what a batch costs however few its rows; 0 before anything has run."""
        return max(self._mean_s - self.per_row * self._mean_rows, 0.0)

    @property
    def spread(self) -> float:
        """By which share of τ(n) all but one batch in twenty stay below τ(n)·(1 + spread)."""
        return LATE * self._deviation

    def seconds(self, rows: int) -> float:
        """τ(rows), on average; 0 before anything has run."""
        if not self._seen:
            return 0.0
        per_row = self.per_row
        line = max(self._mean_s + per_row * (rows - self._mean_rows), 0.0)
        size = self._sizes.get(size_class(rows))
        if size is None:
            return line
        count, mean_rows, mean_s, _ = size
        return line + (max(mean_s + per_row * (rows - mean_rows), 0.0) - line) * count**2 / (count**2 + 1)

    def late(self, rows: int) -> float:
        """The seconds that all but one in twenty batches of so many rows stay below."""
        return self.seconds(rows) * (1 + self.spread)

    def rate(self, rows: int) -> float:
        """Rows per second of batches of so many rows, one after the other; inf before anything has run."""
        seconds = self.seconds(rows)
        return rows / seconds if seconds else math.inf

    def rows_within(self, seconds: float, most: int) -> int:
        """The most rows, of `most`, that are served within so many seconds all but once in twenty; 0 when none are."""
        if self.late(most) <= seconds:
            return most
        fits, too_many = 0, most
        while too_many - fits > 1:
            middle = (fits + too_many) // 2
            if self.late(middle) <= seconds:
                fits = middle
            else:
                too_many = middle
        return fits

    def better_below(self, rows: int) -> int:
        """Fewer rows that are served at a clearly higher rate, as where a step lies between; else `rows`."""
        index = bisect_right(self._edges, rows - 1) - 1
        if index < 0:
            return rows
        below = self._best[index]
        return below if below < rows and self.rate(below) > FASTER * self.rate(rows) else rows

    def unknown_below(self, rows: int) -> int:
        """Fewer rows, the next power of two below, when little was seen of such batches; else 0."""
        edge = 1 << max(0, (rows - 1).bit_length() - 1)
        return edge if edge < rows and not self.knows(edge) else 0

    def knows(self, rows: int) -> bool:
        """Whether enough batches of about so many rows were seen."""
        size = self._sizes.get(size_class(rows))
        return size is not None and size[0] >= FIRST

    def learn(self, rows: int, seconds: float) -> None:
        self.batches += 1
        self.smallest = min(self.smallest or rows, rows)
        self.largest = max(self.largest, rows)
        seconds = min(max(TICK_S, seconds), LONGEST_S)
        expected, size = max(TICK_S, self.seconds(rows)), self._sizes.get(size_class(rows))
        if size is not None and size[0] >= FIRST and self._is_outlier(seconds / expected):
            return
        self._seen = min(self._seen + 1, MEMORY)
        weight = 1.0 / self._seen
        more_rows, more_s = rows - self._mean_rows, seconds - self._mean_s
        self._mean_rows += weight * more_rows
        self._mean_s += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more_rows * more_rows)
        self._covariance = (1 - weight) * (self._covariance + weight * more_rows * more_s)
        size = _learn_size(self._sizes, rows, seconds, NEAR)
        size[3] = max(size[3], rows)
        if self.batches % REFRESH:
            return
        self._edges, self._best, best = [], [], 0.0  # sizes that are served at a higher rate than all smaller ones
        for _, (count, mean_rows, mean_s, most) in sorted(self._sizes.items()):
            if count >= FIRST and mean_s and mean_rows / mean_s > best:
                best = mean_rows / mean_s
                self._edges.append(int(most))
                self._best.append(int(most))

    def _is_outlier(self, ratio: float) -> bool:
        """Whether this batch, of a size that is known, took so unusually long, or short, that nothing is to be learnt
        from it alone. (Of a size that is not known a line may well be wrong.)

        Cumulative sums of how unusual it was, to either side (Page, "Continuous inspection schemes", 1954), tell when
        everything has become slower or faster.
        """
        off = math.log(ratio)
        unusual = min(max(off / max(self._deviation, LEAST), -OUTLIER), OUTLIER)
        self._judged = min(self._judged + 1, MEMORY)
        self._deviation += (min(abs(off), 1.0) - self._deviation) / self._judged
        for side in self._sides:
            if side.changed_by(unusual, ratio):
                factor = side.factor()
                for each in self._sides:
                    each.clear()
                self._mean_s *= factor
                self._covariance *= factor
                for size in self._sizes.values():
                    size[2] *= factor
                break
        return abs(unusual) == OUTLIER


class _Side:
    """Whether batches have lately been slower, or faster, than chance can explain."""

    def __init__(self, sign: int) -> None:
        self._sign, self._sum = sign, 0.0
        self._ratios: list[float] = []

    def changed_by(self, unusual: float, ratio: float) -> bool:
        """Count one batch, so many usual deviations off; whether that is enough."""
        self._sum += self._sign * unusual - 1
        if self._sum <= 0:
            self.clear()
            return False
        self._ratios.append(ratio)
        return self._sum > CHANGE

    def factor(self) -> float:
        return sorted(self._ratios)[len(self._ratios) // 2]

    def clear(self) -> None:
        self._sum = 0.0
        self._ratios.clear()


def size_class(rows: int) -> int:
    """The number of the size that so many rows belong to: four to each doubling, all edges of powers of two among them.

    33 to 40 rows are one size, 41 to 48 the next, …, 57 to 64, 65 to 80.
    """
    below = rows - 1
    bits = below.bit_length()
    return 4 * bits + (below >> (bits - 3) if bits > 2 else below)


def _learn_size(sizes: dict[int, list[float]], rows: int, seconds: float, memory: int) -> list[float]:
    """Average a batch into what is known of its size: [batches remembered, mean rows, mean seconds, another number]."""
    size = sizes.setdefault(size_class(rows), [0, 0.0, 0.0, 0])
    size[0] = min(size[0] + 1, memory)
    size[1] += (rows - size[1]) / size[0]
    size[2] += (seconds - size[2]) / size[0]
    return size


AVERAGED = 16  # what a size takes is averaged over about so many batches
FORGOTTEN = 1024  # batches after which a size that was not seen again may take another time

Point = tuple[float, float]


class SizeCurve:
    """The service time by straight lines between the sizes that were seen.

    Below the smallest of them a row is taken to cost what it costs there: the most that a smaller batch could save, so
    that a caller that could use a shorter one tries it. Never falling: what a larger batch does a smaller one can do.
    """

    def __init__(self) -> None:
        self._batches = 0
        self._sizes: dict[int, list[float]] = {}  # size → [batches remembered, mean rows, mean seconds, last batch]
        self._points: list[Point] | None = None  # (rows, seconds), both rising; None: to be made anew

    def learn(self, rows: int, seconds: float) -> None:
        self._batches += 1
        _learn_size(self._sizes, rows, seconds, AVERAGED)[3] = self._batches
        self._points = None

    def seconds(self, rows: float) -> float:
        """0 before anything was seen."""
        points = self._points
        if points is None:
            oldest = self._batches - FORGOTTEN
            self._sizes = {number: size for number, size in self._sizes.items() if size[3] > oldest}
            points, least = [], math.inf
            for _, seen, took, _ in sorted(self._sizes.values(), key=lambda size: -size[1]):
                least = min(least, took)
                points.append((seen, least))
            self._points = points = [(0.0, 0.0), *reversed(points)]
        place = bisect_left(points, (rows, math.inf))
        if place == len(points):
            low, low_s = points[-1]
            return low_s * rows / low if low else 0.0
        (low, low_s), (high, high_s) = points[place - 1], points[place]
        return low_s + (high_s - low_s) * (rows - low) / (high - low)
