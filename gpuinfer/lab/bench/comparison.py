"""Which variant won, by how much, how sure that is, and why: from the runs of a series, as figures and in words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median, median_low
from typing import Any

from gpuinfer.lab.bench.measurement import KEEPS_UP, LATENCIES, Interval, Variant, goodness, interval, is_latency, ratio
from gpuinfer.lab.bench.series import Measured, SeriesOutcome
from gpuinfer.report.report import LOST
from gpuinfer.units import number, short


@dataclass(frozen=True)
class Standing:
    """One variant among the others. Ratios are of goodness, pair by pair: over 1 is faster, whatever the metric."""

    variant: Variant
    metric: str
    speed: Interval  # of the metric's values
    to_first: Interval
    rates: Mapping[int, float]  # the values, by repeat
    report: dict[str, Any]  # of its median run
    right: bool = True  # its answers are the model's
    served: float = 0.0  # rows per second that were answered
    served_by: Mapping[int, float] = field(default_factory=dict)  # the same, by repeat
    keeps_up: bool = True  # with the load, if that comes from outside

    @property
    def name(self) -> str:
        return self.variant.name

    @property
    def score(self) -> float:
        """More is better; 0 where nothing was measured."""
        return goodness(self.metric, self.speed.median)

    @property
    def able(self) -> bool:
        """Whether it may win."""
        return self.right and self.keeps_up and self.score > 0

    @property
    def standing(self) -> str:
        """Beside the first: faster, slower, or a tie, where the noise allows both."""
        if self.to_first.holds(1.0):
            return "tie"
        return "faster" if self.to_first.median > 1 else "slower"


@dataclass(frozen=True)
class Comparison:
    """The rows in the order in which the variants were named, and the one to use."""

    rows: list[Standing]
    winner: Standing | None
    ties: list[Standing]  # those that may be as fast as the winner
    why: str
    odd: Mapping[str, str] = field(default_factory=dict)  # variants that count something else, with what


def compare_variants(outcome: SeriesOutcome) -> Comparison:
    """Variants with wrong answers, or behind the load, have a row and cannot win. All rows are of one metric."""
    runs = in_one_metric(outcome.runs)
    rows = _judged([row for variant in outcome.left() if (row := _row(variant, outcome, runs)) is not None])
    odd = {one.variant: one.metric for one in outcome.runs if not any(one.variant == run.variant for run in runs)}
    able = [row for row in rows if row.able]
    if not able:
        return Comparison(rows, None, [], "", odd)
    fastest = max(able, key=lambda row: row.score)
    level = [row for row in able if row is fastest or against(row, fastest).holds(1.0)]
    winner = level[0]  # where nothing tells them apart, what was named first: mostly what the user has already
    ties = [row for row in level if row is not winner]
    others = sorted((row for row in able if row is not winner), key=lambda row: row.score, reverse=True)
    return Comparison(rows, winner, ties, " ".join(_held_back(row) for row in [winner, *others[:1]]), odd)


def against(row: Standing, other: Standing) -> Interval:
    """How many times as good the row is as the other, in the repeats that both have."""
    return _ratio(row.metric, row.rates, other.rates)


def _ratio(metric: str, ours: Mapping[int, float], theirs: Mapping[int, float]) -> Interval:
    both = sorted(ours.keys() & theirs.keys())
    return ratio([goodness(metric, ours[one]) for one in both], [goodness(metric, theirs[one]) for one in both])


def _judged(rows: Sequence[Standing]) -> list[Standing]:
    """The rows, each knowing whether it keeps up with the load, where that is what they share."""
    best = max((row for row in rows if row.right), key=lambda row: row.served, default=None)
    return [replace(row, keeps_up=best is None or not is_latency(row.metric) or _keeps_up(row, best)) for row in rows]


def _keeps_up(row: Standing, best: Standing) -> bool:
    """Whether a variant may answer as much as the best, pair by pair: a short run ends before the last answers come."""
    both = sorted(row.served_by.keys() & best.served_by.keys())
    found = ratio([row.served_by[one] for one in both], [best.served_by[one] for one in both])
    return not (found.median if found.high is None else found.high) < KEEPS_UP


def in_one_metric(runs: Sequence[Measured]) -> list[Measured]:
    """The runs, if they are all of one metric; else their means in the one that most have, without the rest."""
    metrics = dict.fromkeys(one.metric for one in runs)
    if len(metrics) < 2:
        return list(runs)
    metric = max(metrics, key=lambda name: sum(bool(one.report["throughput"].get(name)) for one in runs))
    means = [(one, one.report["throughput"].get(metric)) for one in runs]
    return [replace(one, metric=metric, rate=mean) for one, mean in means if mean]


def _row(variant: Variant, outcome: SeriesOutcome, measured: Sequence[Measured]) -> Standing | None:
    runs = runs_of(variant, measured)
    if not runs:
        return None
    first = _first(outcome, measured)
    rates = {one.repeat: one.rate for one in runs}
    speed = interval(list(rates.values()))
    to_first = _ratio(runs[0].metric, rates, first)
    found = outcome.parity.get(variant.name)
    report = next(one.report for one in runs if one.rate == median_low(rates.values()))
    right, served = found is None or found.holds, {one.repeat: one.served for one in runs}
    return Standing(variant, runs[0].metric, speed, to_first, rates, report, right, median(served.values()), served)


def _first(outcome: SeriesOutcome, measured: Sequence[Measured]) -> dict[int, float]:
    """The rates of the first variant that ran at all, by repeat."""
    for variant in outcome.left():
        if runs := runs_of(variant, measured):
            return {one.repeat: one.rate for one in runs}
    return {}


def runs_of(variant: Variant, runs: Sequence[Measured]) -> list[Measured]:
    return [one for one in runs if one.variant == variant.name]


def _held_back(row: Standing) -> str:
    found = row.report["bottleneck"]
    return f"{row.name}: {found['class']}. {found['why']}"


def batch_ratio(row: Standing, first: Standing) -> float | None:
    """How many times as many rows its mean batch has as that of the first; None where one of them forms none."""
    ours, theirs = (one.report["batches"]["rows_mean"] for one in (row, first))
    return ours / theirs if ours and theirs else None


ABOUT_ALL = 0.93  # of what arrives; the rest is still on its way
NOISE_UNKNOWN = "one run of each tells nothing of the noise"
FEW = 0.01  # of the requests
METRICS = {"games_per_min": "games/min", **LATENCIES}


def comparison_verdict(comparison: Comparison) -> str:
    """Which variant to use, in a sentence or two, and what even so has no answer."""
    if comparison.winner is None:
        return "Nothing was measured to the end, so there is no winner."
    return " ".join([_verdict(comparison, comparison.winner), *_unanswered(comparison, comparison.winner)])


def _unanswered(comparison: Comparison, winner: Standing) -> Iterator[str]:
    """A load that is more than any variant answers, and requests that were lost."""
    if not keeps_up_with_all(winner):
        yield f"None keeps up: {offered_rate(winner):,.0f} rows/s arrive, and {winner.served:,.0f} are answered."
    for row in comparison.rows:
        report = row.report
        lost = sum(report.get("errors", {}).get(kind, 0) for kind in LOST)
        answered = sum(found["requests"] for found in report.get("classes", {}).values())
        if lost > FEW * (lost + answered):
            yield f"{row.name}: {lost:,} of {lost + answered:,} requests have no answer."


def offered_rate(row: Standing) -> float:
    """Rows per second that arrived in its median run, of a load from outside; else 0."""
    bounds = (row.report.get("bottleneck") or {}).get("bounds") or {}
    return float(bounds.get("arrival") or 0.0)


def keeps_up_with_all(row: Standing) -> bool:
    """Whether about all that arrives is answered, where the load comes from outside."""
    return not is_latency(row.metric) or row.served >= ABOUT_ALL * offered_rate(row)


def _verdict(comparison: Comparison, winner: Standing) -> str:
    able = sorted((row for row in comparison.rows if row.able), key=lambda row: -row.score)
    if len(comparison.rows) == 1:
        return f"Only {winner.name} was measured: there is nothing to compare it with."
    if len(able) == 1:
        if all(row.keeps_up for row in comparison.rows):
            return f"{winner.name} is the only one that answered, and as the model does."
        more = "it alone keeps up with the load" if keeps_up_with_all(winner) else "it answers most of the load"
        return f"{winner.name} wins: {more}."
    if not winner.speed.known:
        fastest = f"{able[0].name} was fastest, but {NOISE_UNKNOWN}."
        return f"{fastest} Until there are more, stay with {winner.name}, the first of them."
    if comparison.ties:
        names = ", ".join(row.name for row in comparison.ties)
        nearest = max(comparison.ties, key=lambda row: row.score)
        apart = _apart(nearest, winner, named=True)
        slower = [
            row for row in comparison.rows if row.right and row.keeps_up and row not in (winner, *comparison.ties)
        ]
        rest = f" Slower: {', '.join(row.name for row in slower)}." if slower else ""
        return (
            f"A tie: the noise allows no choice between {winner.name} and {names} ({apart}). "
            f"Use {winner.name}, the first of them.{rest}"
        )
    return f"{winner.name} wins: {_apart(winner, next(row for row in able if row is not winner))}."


def _apart(row: Standing, other: Standing, named: bool = False) -> str:
    """By how much the row is better than the other, as the ratio of their metric reads."""
    found = ratio_text(against(row, other))
    if is_latency(row.metric):
        return f"the {metric_unit(row.metric)} of {other.name} is {found} that of {row.name}"
    return f"{row.name} is {found} {other.name}" if named else f"{found} {other.name}"


def ratio_text(found: Interval) -> str:
    """Such as `1.32× (1.25 to 1.41)`."""
    return f"{found.median:.2f}×{interval_text(found.ends)}"


def interval_text(ends: Sequence[float] | None) -> str:
    return f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""


def value_text(metric: str, amount: float) -> str:
    """Such as `22.4 k`, or `3.4 ms` of a latency."""
    return short(amount) if is_latency(metric) else number(amount)


def span(metric: str, low: float, high: float) -> str:
    """Such as `19.2 to 22.4 k`."""
    first, second = value_text(metric, low), value_text(metric, high)
    unit = second.partition(" ")[2]
    return f"{first.removesuffix(f' {unit}') if unit else first} to {second}"


def speed(metric: str, amount: float) -> str:
    """Such as `22.4 k evaluations/s`."""
    return f"{value_text(metric, amount)} {metric_unit(metric)}"


def metric_unit(metric: str) -> str:
    return METRICS.get(metric, metric.replace("_per_", "/").replace("_", " "))
