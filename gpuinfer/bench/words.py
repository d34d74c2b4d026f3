"""A comparison in words."""

from __future__ import annotations

from collections.abc import Sequence

from gpuinfer.bench.compare import Comparison, Row, against
from gpuinfer.bench.interval import Interval
from gpuinfer.screen.units import number

METRICS = {"games_per_min": "games/min"}


def verdict(comparison: Comparison) -> str:
    """Which variant to use, in a sentence or two."""
    winner = comparison.winner
    if winner is None:
        return "Nothing was measured to the end, so there is no winner."
    if len(comparison.rows) == 1:
        return f"Only {winner.name} was measured: there is nothing to compare it with."
    if not winner.speed.known:
        fastest = f"{_fastest(comparison).name} was fastest, but one run of each tells nothing of the noise."
        return f"{fastest} Until there are more, stay with {winner.name}, the first of them."
    return _against_slower(comparison, winner) if not comparison.ties else _level(comparison, winner)


def _fastest(comparison: Comparison) -> Row:
    return max((row for row in comparison.rows if row.right), key=lambda row: row.speed.median)


def _against_slower(comparison: Comparison, winner: Row) -> str:
    others = sorted((row for row in comparison.rows if row is not winner), key=lambda row: -row.speed.median)
    beaten = [row for row in others if row.right and row.speed.median > 0]
    if not beaten:
        return f"{winner.name} is the only one that answered, and as the model does."
    return f"{winner.name} wins: {ratio(against(winner, beaten[0]))} {beaten[0].name}."


def _level(comparison: Comparison, winner: Row) -> str:
    """Not told apart: that is not the same as equal, so the interval is said."""
    names = ", ".join(row.name for row in comparison.ties)
    nearest = max(comparison.ties, key=lambda row: row.speed.median)
    apart = f"{nearest.name} is {ratio(against(nearest, winner))} {winner.name}"
    slower = [row for row in comparison.rows if row.right and row not in (winner, *comparison.ties)]
    rest = f" Slower: {', '.join(row.name for row in slower)}." if slower else ""
    return (
        f"A tie: the noise allows no choice between {winner.name} and {names} ({apart}). "
        f"Use {winner.name}, the first of them.{rest}"
    )


def ratio(found: Interval) -> str:
    """Such as `1.32× (1.25 to 1.41)`."""
    return f"{found.median:.2f}×{between(found.ends)}"


def between(ends: Sequence[float] | None) -> str:
    return f" ({ends[0]:.2f} to {ends[1]:.2f})" if ends else ""


def span(low: float, high: float) -> str:
    """Such as `19.2 to 22.4 k`."""
    first, second = number(low), number(high)
    unit = second.partition(" ")[2]
    return f"{first.removesuffix(f' {unit}') if unit else first} to {second}"


def speed(metric: str, value: float) -> str:
    """Such as `22.4 k evaluations/s`."""
    return f"{number(value)} {unit(metric)}"


def unit(metric: str) -> str:
    return METRICS.get(metric, metric.replace("_per_", "/").replace("_", " "))
