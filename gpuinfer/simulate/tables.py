"""The figures of simulations as words: a table, and what stands below it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpuinfer.units import number, short, whole

LATENCY = ("latency", "mean", "p50", "p95", "p99", "max")
FIGURES = ("rows/s", "mean", "p95", "p99", "batch", "busy")

Run = Mapping[str, Any]


def latencies(run: Run) -> Iterator[list[str]]:
    """One run: arrival to answer of all requests, that of each class where there are several, and arrival to batch."""
    yield _times("all", run["latency_s"])
    if len(run["classes"]) > 1:
        for name, seen in run["classes"].items():
            yield _times(name, seen)
    yield _times("in the queue", run["queue_wait_s"])


def facts(run: Run) -> Iterator[tuple[str, str]]:
    """Name and text of what else there is to say of one run."""
    yield "throughput", f"{_rate(run)} of {_rows_per_s(run['offered']['rows_per_s'])} rows/s offered"
    batches = run["batches"]
    if batches["count"]:
        mean, most = number(batches["rows_mean"]), whole(batches["rows_max"])
        yield "batches", f"{whole(batches['count'])} of {mean} rows on average, {most} at most"
        why = {reason: times / batches["count"] for reason, times in batches["reasons"].items() if times}
        shares = sorted(why.items(), key=lambda item: -item[1])
        yield "cut because", ", ".join(f"{reason} {_percent(share)}" for reason, share in shares)
    yield (
        "busy",
        f"{_percent(run['utilisation'])} of the time; capacity {_rows_per_s(run['capacity_rows_per_s'])} rows/s",
    )
    lost = {kind: count for kind, count in run["errors"].items() if count}
    if lost:
        yield "lost", ", ".join(f"{whole(count)} {kind}" for kind, count in lost.items())
    if run["met"] is not None:
        yield "verdict", f"the target of {short(run['target_s'])} for p95 is {_verdict(run)}"
    for notice in run["notices"]:
        yield "notice", notice


def columns(runs: Sequence[Run]) -> list[str]:
    """What was varied, and the figures."""
    return [*(key.replace("_", " ") for key in runs[0]["settings"]), *FIGURES, *(["lost"] if _any_lost(runs) else [])]


def rows(runs: Sequence[Run]) -> Iterator[list[str]]:
    """One for each of several runs, under `columns`."""
    for run in runs:
        latency = run["latency_s"]
        first, *more = run["settings"].values()
        yield [
            ("✓ " if run["met"] else "✗ " if run["met"] is not None else "") + first,
            *more,
            _rate(run),
            *(short(latency[part]) if latency else "–" for part in ("mean", "p95", "p99")),
            number(run["batches"]["rows_mean"] or 0.0),
            _percent(run["utilisation"]),
            *([_percent(1 - run["served_share"])] if _any_lost(runs) else []),
        ]


def remarks(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """What is to be said about several runs: each notice once."""
    targets = {run["target_s"] for run in runs} - {None}
    if len(targets) == 1:
        target = targets.pop()
        yield "target", f"p95 of {short(target)}: ✓ met, ✗ missed"
    for notice in dict.fromkeys(notice for run in runs for notice in run["notices"]):
        yield "notice", notice


def name_of(run: Run) -> str:
    """Such as `max_wait 1ms, strategy dynamic`."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in run["settings"].items())


def _verdict(run: Run) -> str:
    """A target that only the few who are answered meet is missed."""
    if run["met"]:
        return "met"
    within = run["latency_s"] and run["latency_s"]["p95"] <= run["target_s"]
    return f"met by what is answered, but {_percent(1 - run['served_share'])} is lost" if within else "missed"


def _any_lost(runs: Sequence[Run]) -> bool:
    return any(run["served_share"] < 1 for run in runs)


def _rate(run: Run) -> str:
    return _rows_per_s(run["throughput"]["rows_per_s"])


def _rows_per_s(rate: float) -> str:
    return whole(rate) if rate >= 100 else number(rate)


def _times(name: str, times: Mapping[str, float]) -> list[str]:
    return [name, *(short(times[part]) if part in times else "–" for part in LATENCY[1:])]


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}" if share >= 0.001 else "< 0.1%"
