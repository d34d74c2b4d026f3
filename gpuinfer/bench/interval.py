"""How sure a handful of repeats lets one be: medians and ratios with 95 % intervals.

Speeds are positive and their noise multiplies, so all arithmetic is on logarithms. Up to five values the interval is
Student's t (Student, "The probable error of a mean", 1908) on the logarithms, which supposes that they are normally
distributed; from six on it is the distribution-free one between two order statistics (Thompson, "On confidence ranges
for the median", 1936), which fewer values cannot give: no two of five values enclose the median with 95 %.

What runs are compared by: a rate, of which more is better, or a latency, of which less is.

A load that comes from outside is answered at the same rate by whoever keeps up with it: what tells two ways of serving
it apart is how long the answers take. So such runs are compared by the 95th percentile of the latency, among those that
keep up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, median, stdev

from gpuinfer.student import quantile

DOUBT = 0.025  # on each side


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and where it may lie, with 95 %. Both ends are None when nothing is known of the noise."""

    median: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        return self.low is not None

    def holds(self, value: float) -> bool:
        """Whether the data leave this value possible. Without an interval they leave everything possible."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    @property
    def ends(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def interval(values: Sequence[float]) -> Interval:
    """The median of positive values and its 95 % interval; none for fewer than two, or where one is not positive.

    Raises `ValueError` when there are no values.
    """
    if not values:
        raise ValueError("there is no median of no values")
    middle = median(values)
    if len(values) < 2 or min(values) <= 0:
        return Interval(middle)
    return Interval(middle, *(_by_student(values) if len(values) < 6 else _by_order(values)))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Ours ÷ theirs, pair by pair: what slowed both runs of a pair cancels out."""
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if other > 0]
    return interval([one / other for one, other in pairs]) if pairs else Interval(math.nan)


def ratio_of_turns(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Ours ÷ theirs of two to four positive values each, measured in turns A B B A: the ratio of their geometric means.

    Student's t of two samples with one variance, on the logarithms. Two pairs alone would leave one degree of freedom,
    and an interval that says nothing; a drift is in the means of both alike, and in the variance, so that it widens it.
    """
    logs = [[math.log(value) for value in values] for values in (ours, theirs)]
    freedom = sum(map(len, logs)) - 2
    variance = sum(sum((value - fmean(values)) ** 2 for value in values) for values in logs) / freedom
    reach = quantile(freedom) * math.sqrt(variance * sum(1 / len(values) for values in logs))
    middle = fmean(logs[0]) - fmean(logs[1])
    return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def _by_student(values: Sequence[float]) -> tuple[float, float]:
    logs = [math.log(value) for value in values]
    reach = quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    # The median of so few lies within one standard deviation of their mean, and `reach` is more than that.
    return math.exp(fmean(logs) - reach), math.exp(fmean(logs) + reach)


def _by_order(values: Sequence[float]) -> tuple[float, float]:
    """The outermost pair of values but as many from each end as chance allows: half of them lie below the median."""
    ordered, n, below, left_out = sorted(values), len(values), 0.0, 0
    while below + math.comb(n, left_out) / 2**n <= DOUBT:
        below += math.comb(n, left_out) / 2**n
        left_out += 1
    return ordered[left_out - 1], ordered[n - left_out]


LATENCY = "latency_p95_s"
LATENCIES = {LATENCY: "p95 latency"}
KEEPS_UP = 0.99  # of the rows that the best answers: less is a load that grows behind


def is_latency(metric: str) -> bool:
    """Whether less of it is better, and it is in seconds."""
    return metric in LATENCIES


def goodness(metric: str, value: float) -> float:
    """Such that more is better, and ratios are those of the values; 0 for a value that says nothing."""
    if not is_latency(metric):
        return value
    return 1 / value if value > 0 else 0.0
