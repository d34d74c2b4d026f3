"""Which variant won, by how much, how sure that is, and why: from the runs of a series."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median_low
from typing import Any

from gpuinfer.bench.interval import Interval, interval, ratio
from gpuinfer.bench.series import Measured, Outcome
from gpuinfer.bench.variant import Variant


@dataclass(frozen=True)
class Row:
    """One variant among the others. Ratios are of speeds, pair by pair: over 1 is faster."""

    variant: Variant
    metric: str
    speed: Interval
    to_first: Interval
    rates: Mapping[int, float]  # by repeat
    report: dict[str, Any]  # of its median run
    right: bool = True  # its answers are the model's

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def standing(self) -> str:
        """Beside the first: faster, slower, or a tie, where the noise allows both."""
        if self.to_first.holds(1.0):
            return "tie"
        return "faster" if self.to_first.median > 1 else "slower"


@dataclass(frozen=True)
class Comparison:
    """The rows in the order in which the variants were named, and the one to use."""

    rows: list[Row]
    winner: Row | None
    ties: list[Row]  # those that may be as fast as the winner
    why: str
    odd: Mapping[str, str] = field(default_factory=dict)  # variants that count something else, with what


def compare(outcome: Outcome) -> Comparison:
    """Variants with wrong answers have a row and cannot win. All rows are of one metric."""
    runs = in_one_metric(outcome.runs)
    rows = [row for variant in outcome.left() if (row := _row(variant, outcome, runs)) is not None]
    odd = {one.variant: one.metric for one in outcome.runs if not any(one.variant == run.variant for run in runs)}
    able = [row for row in rows if row.right and row.speed.median > 0]
    if not able:
        return Comparison(rows, None, [], "", odd)
    fastest = max(able, key=lambda row: row.speed.median)
    level = [row for row in able if row is fastest or against(row, fastest).holds(1.0)]
    winner = level[0]  # where nothing tells them apart, what was named first: mostly what the user has already
    ties = [row for row in level if row is not winner]
    return Comparison(rows, winner, ties, _why(winner, able), odd)


def against(row: Row, other: Row) -> Interval:
    """The row's speed over the other's, in the repeats that both have."""
    both = sorted(row.rates.keys() & other.rates.keys())
    return ratio([row.rates[one] for one in both], [other.rates[one] for one in both])


def in_one_metric(runs: Sequence[Measured]) -> list[Measured]:
    """The runs, if they are all of one metric; else their means in the one that most have, without the rest."""
    metrics = dict.fromkeys(one.metric for one in runs)
    if len(metrics) < 2:
        return list(runs)
    metric = max(metrics, key=lambda name: sum(bool(one.report["throughput"].get(name)) for one in runs))
    means = [(one, one.report["throughput"].get(metric)) for one in runs]
    return [replace(one, metric=metric, rate=mean) for one, mean in means if mean]


def _row(variant: Variant, outcome: Outcome, measured: Sequence[Measured]) -> Row | None:
    runs = runs_of(variant, measured)
    if not runs:
        return None
    first = _first(outcome, measured)
    rates = {one.repeat: one.rate for one in runs}
    speed = interval(list(rates.values()))
    both = sorted(rates.keys() & first.keys())
    to_first = ratio([rates[one] for one in both], [first[one] for one in both])
    found = outcome.parity.get(variant.name)
    report = next(one.report for one in runs if one.rate == median_low(rates.values()))
    return Row(variant, runs[0].metric, speed, to_first, rates, report, found is None or found.holds)


def _first(outcome: Outcome, measured: Sequence[Measured]) -> dict[int, float]:
    """The rates of the first variant that ran at all, by repeat."""
    for variant in outcome.left():
        if runs := runs_of(variant, measured):
            return {one.repeat: one.rate for one in runs}
    return {}


def runs_of(variant: Variant, runs: Sequence[Measured]) -> list[Measured]:
    return [one for one in runs if one.variant == variant.name]


def _why(winner: Row, able: Sequence[Row]) -> str:
    """What held the winner back, and what the best of the rest, in the words of their own reports."""
    others = sorted((row for row in able if row is not winner), key=lambda row: row.speed.median, reverse=True)
    return " ".join(_held_back(row) for row in [winner, *others[:1]])


def _held_back(row: Row) -> str:
    found = row.report["bottleneck"]
    return f"{row.name}: {found['class']}. {found['why']}"
