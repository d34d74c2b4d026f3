"""A comparison in words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from gpuinfer.bench.compare import Comparison, Standing, against
from gpuinfer.bench.interval import LATENCIES, Interval, is_latency
from gpuinfer.report.report import LOST
from gpuinfer.units import number, short

ABOUT_ALL = 0.93  # of what arrives; the rest is still on its way
FEW = 0.01  # of the requests
METRICS = {"games_per_min": "games/min", **LATENCIES}


def verdict(comparison: Comparison) -> str:
    """Which variant to use, in a sentence or two, and what even so has no answer."""
    if comparison.winner is None:
        return "Nothing was measured to the end, so there is no winner."
    return " ".join([_verdict(comparison, comparison.winner), *_unanswered(comparison, comparison.winner)])


def _unanswered(comparison: Comparison, winner: Standing) -> Iterator[str]:
    """A load that is more than anybody answers, and requests that were lost."""
    if not keeps_up_with_all(winner):
        yield f"None keeps up: {offered(winner):,.0f} rows/s arrive, and {winner.served:,.0f} are answered."
    for row in comparison.rows:
        report = row.report
        lost = sum(report.get("errors", {}).get(kind, 0) for kind in LOST)
        answered = sum(found["requests"] for found in report.get("classes", {}).values())
        if lost > FEW * (lost + answered):
            yield f"{row.name}: {lost:,} of {lost + answered:,} requests have no answer."


def offered(row: Standing) -> float:
    """Rows per second that arrived in its median run, of a load from outside; else 0."""
    bounds = (row.report.get("bottleneck") or {}).get("bounds") or {}
    return float(bounds.get("arrival") or 0.0)


def keeps_up_with_all(row: Standing) -> bool:
    """Whether about all that arrives is answered, where the load comes from outside."""
    return not is_latency(row.metric) or row.served >= ABOUT_ALL * offered(row)


def _verdict(comparison: Comparison, winner: Standing) -> str:
    if len(comparison.rows) == 1:
        return f"Only {winner.name} was measured: there is nothing to compare it with."
    if sum(row.able for row in comparison.rows) == 1:
        return _alone(comparison, winner)
    if not winner.speed.known:
        fastest = f"{_fastest(comparison).name} was fastest, but one run of each tells nothing of the noise."
        return f"{fastest} Until there are more, stay with {winner.name}, the first of them."
    return _against_slower(comparison, winner) if not comparison.ties else _level(comparison, winner)


def _fastest(comparison: Comparison) -> Standing:
    return max((row for row in comparison.rows if row.able), key=lambda row: row.score)


def _alone(comparison: Comparison, winner: Standing) -> str:
    if any(not row.keeps_up for row in comparison.rows):
        more = "it alone keeps up with the load" if keeps_up_with_all(winner) else "it answers most of the load"
        return f"{winner.name} wins: {more}."
    return f"{winner.name} is the only one that answered, and as the model does."


def _against_slower(comparison: Comparison, winner: Standing) -> str:
    others = sorted((row for row in comparison.rows if row is not winner), key=lambda row: -row.score)
    return f"{winner.name} wins: {_apart(winner, next(row for row in others if row.able))}."


def _level(comparison: Comparison, winner: Standing) -> str:
    """Not told apart: that is not the same as equal, so the interval is said."""
    names = ", ".join(row.name for row in comparison.ties)
    nearest = max(comparison.ties, key=lambda row: row.score)
    apart = _apart(nearest, winner, named=True)
    slower = [row for row in comparison.rows if row.right and row.keeps_up and row not in (winner, *comparison.ties)]
    rest = f" Slower: {', '.join(row.name for row in slower)}." if slower else ""
    return (
        f"A tie: the noise allows no choice between {winner.name} and {names} ({apart}). "
        f"Use {winner.name}, the first of them.{rest}"
    )


def _apart(row: Standing, other: Standing, named: bool = False) -> str:
    """By how much the row is better than the other, as the ratio of their metric reads."""
    found = ratio(against(row, other))
    if is_latency(row.metric):
        return f"the {unit(row.metric)} of {other.name} is {found} that of {row.name}"
    return f"{row.name} is {found} {other.name}" if named else f"{found} {other.name}"


def ratio(found: Interval) -> str:
    """Such as `1.32× (1.25 to 1.41)`."""
    return f"{found.median:.2f}×{between(found.ends)}"


def between(ends: Sequence[float] | None) -> str:
    return f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""


def value(metric: str, amount: float) -> str:
    """Such as `22.4 k`, or `3.4 ms` of a latency."""
    return short(amount) if is_latency(metric) else number(amount)


def span(metric: str, low: float, high: float) -> str:
    """Such as `19.2 to 22.4 k`."""
    first, second = value(metric, low), value(metric, high)
    unit = second.partition(" ")[2]
    return f"{first.removesuffix(f' {unit}') if unit else first} to {second}"


def speed(metric: str, amount: float) -> str:
    """Such as `22.4 k evaluations/s`."""
    return f"{value(metric, amount)} {unit(metric)}"


def unit(metric: str) -> str:
    return METRICS.get(metric, metric.replace("_per_", "/").replace("_", " "))
