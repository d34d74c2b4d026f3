"""Metrics as plain values: named families of samples, before they become the text of an exposition."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal, TypeAlias

from gpuinfer.stats import FLOOR, SUB_BUCKETS

Labels: TypeAlias = Mapping[str, str]
Kind: TypeAlias = Literal["counter", "gauge", "histogram", "summary"]

DURATIONS = (
    *(0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05),
    *(0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 300.0),
)
"""Upper bounds in seconds of the buckets of durations: from a small network's forward to the longest timeout."""
SIZES = tuple(float(1 << power) for power in range(13))
"""Upper bounds in rows of the buckets of batch sizes: 1 to 4,096."""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A histogram's values: how many were at most each bound (cumulative, the last is infinity), and their sum."""

    buckets: tuple[tuple[float, int], ...]
    total: float

    @property
    def count(self) -> int:
        return self.buckets[-1][1]


Value: TypeAlias = float | Distribution


@dataclass(frozen=True, slots=True)
class Family:
    """The samples of one metric, each with the same names of labels. A counter's name is given without `_total`."""

    name: str
    help: str
    kind: Kind
    samples: Sequence[tuple[Labels, Value]]


def one(name: str, help: str, kind: Kind, value: Value) -> Family:
    """A family of one sample without labels."""
    return Family(name, help, kind, [({}, value)])


def durations(wire: Mapping[str, Any]) -> Distribution:
    """A `stats.Histogram` in its wire form, in the coarser buckets of DURATIONS.

    One of its own buckets that a bound cuts in two counts where its middle is: an edge is off by 0.6 % at most.
    """
    counted = {FLOOR * 2 ** ((int(bucket) + 0.5) / SUB_BUCKETS): times for bucket, times in wire["counts"].items()}
    return distribution(counted, DURATIONS, wire["total"])


def sizes(counted: Mapping[int, int]) -> Distribution:
    """Batch sizes in rows → how many batches, in the buckets of SIZES."""
    return distribution(counted, SIZES, float(sum(size * times for size, times in counted.items())))


def distribution(
    counted: Mapping[float, int] | Mapping[int, int], bounds: Sequence[float], total: float
) -> Distribution:
    """Values → how often each occurred, as what is at most each of the ascending bounds, and at most infinity."""
    counts = [0] * (len(bounds) + 1)
    for value, times in counted.items():
        counts[bisect_left(bounds, value)] += times
    return Distribution(tuple(zip((*bounds, float("inf")), accumulate(counts), strict=True)), total)
