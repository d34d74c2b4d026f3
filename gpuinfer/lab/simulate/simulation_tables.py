"""The figures of simulations: the document `gpuinfer.simulation/1` in plain values, its tables and remarks, and its
plots. Matplotlib is imported when a plot is drawn.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuinfer import __version__
from gpuinfer.api import Reason
from gpuinfer.config.options import natural
from gpuinfer.lab.simulate.outcome import LEAST_SERVED, SimulationOutcome, Solution
from gpuinfer.report.plotting import COLOURS, image
from gpuinfer.stats import ERRORS, FLOOR, SUB_BUCKETS, Snapshot, mean_size, percentile, summarise
from gpuinfer.units import number, short, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCHEMA = "gpuinfer.simulation/1"
STEP = 0.01  # between two points of a distribution


def simulation_document(
    command: str, seed: int, runs: Sequence[dict[str, Any]], solution: Solution | None
) -> dict[str, Any]:
    """`runs` are made by `run`."""
    return {
        "schema": SCHEMA,
        "gpuinfer": __version__,
        "command": command,
        "seed": seed,
        "runs": list(runs),
        "solve": None if solution is None else _solve(solution),
    }


def run_figures(
    settings: Mapping[str, str], strategy: str, outcome: SimulationOutcome, target_s: float | None
) -> dict[str, Any]:
    """One simulation; `settings` are those in which it differs from the others."""
    snapshot = outcome.snapshot
    p95 = outcome.latency_s.get("p95", math.inf)
    return {
        "settings": dict(settings),
        "strategy": strategy,
        "replicas": len(outcome.replicas),
        "simulated_s": outcome.seconds,
        "offered": {"requests": outcome.offered_requests, "rows_per_s": outcome.offered_rows_per_s},
        "throughput": {"rows_per_s": outcome.served_rows_per_s, "requests_per_s": outcome.served_requests_per_s},
        "served_share": outcome.served_share,
        "capacity_rows_per_s": outcome.capacity_rows_per_s,
        "utilisation": outcome.utilisation,
        "batches": batch_figures(snapshot),
        "latency_s": outcome.latency_s,
        "latency_cdf": cdf(snapshot.latency),
        "queue_wait_s": outcome.queue_wait_s,
        "classes": {name: _of_class(count) for name, count in snapshot.classes.items()},
        "errors": {name: snapshot.errors.get(name, 0) for name in ERRORS},
        "target_s": target_s,
        "met": None if target_s is None else p95 <= target_s and outcome.served_share >= LEAST_SERVED,
        "notices": list(outcome.notices),
    }


def batch_figures(snapshot: Snapshot) -> dict[str, Any]:
    """As in the report of a run: sizes in doublings, seconds by rows; null where no batch ran."""
    count, sizes = sum(snapshot.batches.values()), Counter[int]()
    for rows, times in snapshot.batches.items():
        sizes[1 << max(0, rows - 1).bit_length()] += times
    return {
        "count": count,
        "rows_mean": mean_size(snapshot.batches) if count else None,
        "rows_p50": percentile(snapshot.batches, 0.5) if count else None,
        "rows_max": max(snapshot.batches) if count else None,
        "sizes": {str(size): times for size, times in sorted(sizes.items())},
        "seconds": {str(rows): spent[1] / spent[0] for rows, spent in sorted(snapshot.batch_s.items()) if spent[0]},
        "reasons": {reason.value: snapshot.reasons.get(reason.value, 0) for reason in Reason},
    }


def cdf(histogram: Mapping[str, Any]) -> list[tuple[float, float]]:
    """(seconds, share of the requests that took no longer), at most about a hundred points."""
    counts, points, seen = histogram["counts"], [], 0
    total, last = sum(counts.values()), 0.0
    for bucket in sorted(counts):
        seen += counts[bucket]
        if seen / total >= last + STEP or seen == total:
            last = seen / total
            points.append((min(FLOOR * 2 ** ((bucket + 1) / SUB_BUCKETS), histogram["max"]), last))
    return points


def _of_class(count: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **summarise(count["latency"]),
        "requests": count["requests"],
        "rows": count["rows"],
        "errors": {name: count["errors"].get(name, 0) for name in ERRORS},
        "queue_wait_s": summarise(count["queue_wait"]),
    }


def _solve(solution: Solution) -> dict[str, Any]:
    return {
        "target_s": solution.target_s,
        "least_served": LEAST_SERVED,
        "replicas": solution.replicas,
        "answer": solution.answer,
        "tried": [
            {
                "replicas": trial.replicas,
                "p95_s": trial.p95 if trial.p95 < math.inf else None,
                "served_share": trial.outcome.served_share,
                "met": trial.met,
            }
            for trial in solution.tried
        ],
    }


LATENCY = ("latency", "mean", "p50", "p95", "p99", "max")
FIGURES = ("rows/s", "mean", "p95", "p99", "batch", "busy")

Run = Mapping[str, Any]


def latency_rows(run: Run) -> Iterator[list[str]]:
    """One run: arrival to answer of all requests, that of each class where there are several, and arrival to batch."""
    yield _times("all", run["latency_s"])
    if len(run["classes"]) > 1:
        for name, seen in run["classes"].items():
            yield _times(name, seen)
    yield _times("in the queue", run["queue_wait_s"])


def run_notes(run: Run) -> Iterator[tuple[str, str]]:
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


def sweep_columns(runs: Sequence[Run]) -> list[str]:
    """What was varied, and the figures."""
    return [*(key.replace("_", " ") for key in runs[0]["settings"]), *FIGURES, *(["lost"] if _any_lost(runs) else [])]


def sweep_rows(runs: Sequence[Run]) -> Iterator[list[str]]:
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


def sweep_notes(runs: Sequence[Run]) -> Iterator[tuple[str, str]]:
    """The notes of several runs, each notice once."""
    targets = {run["target_s"] for run in runs} - {None}
    if len(targets) == 1:
        target = targets.pop()
        yield "target", f"p95 of {short(target)}: ✓ met, ✗ missed"
    for notice in dict.fromkeys(notice for run in runs for notice in run["notices"]):
        yield "notice", notice


def sweep_name(run: Run) -> str:
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


WIDTH, HEIGHT = 8.0, 3.2  # inches: the plot, one panel
QUANTILES = {"p50": ":", "p95": "-", "p99": "--"}  # and how each line is drawn
MOST_LINES = len(COLOURS)


def draw_simulation(document: Mapping[str, Any], kind: str) -> bytes:
    """A `gpuinfer.simulation/1` as `png` or `svg`, the same bytes for the same document."""
    from matplotlib.figure import Figure

    runs, alone = document["runs"], len(document["runs"]) == 1
    panels = 3 if alone else 2
    figure = Figure(figsize=(WIDTH, HEIGHT * panels * (0.8 if alone else 1.0)), layout="constrained")
    axes = figure.subplots(panels)
    for each in axes:
        each.spines[["top", "right"]].set_visible(False)
    if alone:
        _distribution(axes[0], runs[0])
        _shares(axes[1], {f"≤ {size}": times for size, times in runs[0]["batches"]["sizes"].items()}, "rows in a batch")
        reasons = {reason: times for reason, times in runs[0]["batches"]["reasons"].items() if times}
        _shares(axes[2], reasons, "why batches were cut")
    else:
        _over(axes[0], axes[1], runs)
    return image(figure, kind)


def _distribution(axes: Axes, run: Run) -> None:
    """The share of the requests that were answered within a time."""
    points = run["latency_cdf"]
    if points:
        axes.plot([seconds for seconds, _ in points], [share for _, share in points], color=COLOURS[0])
    for name in QUANTILES if points else ():
        at = run["latency_s"][name]
        axes.axvline(at, color=COLOURS[1], linewidth=1, linestyle=QUANTILES[name], label=f"{name} {short(at)}")
    _mark_target(axes, [run], upright=True)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel("latency, from arrival to answer")
    axes.set_ylabel("of the requests")
    axes.xaxis.set_major_formatter(lambda value, _: short(round(value, 9)))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="center right", facecolor="white", edgecolor="white", framealpha=1, fontsize=8)


def _shares(axes: Axes, counts: Mapping[str, int], label: str) -> None:
    total = sum(counts.values()) or 1
    axes.bar(range(len(counts)), [times / total for times in counts.values()], 0.7, color=COLOURS[0], alpha=0.8)
    axes.set_xticks(range(len(counts)), list(counts), fontsize=8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_xlabel(label)
    axes.set_ylabel("of the batches")


def _over(above: Axes, below: Axes, runs: Sequence[Run]) -> None:
    """Latency, and rows per second, over what was swept: the key of the most values that are numbers across."""
    from matplotlib.ticker import LogLocator

    across = _across(runs)
    names = list(dict.fromkeys(run["settings"][across] for run in runs))
    values = [_number(name) for name in names]
    scaled = None not in values
    places = {
        name: place if value is None or not scaled else value
        for place, (name, value) in enumerate(zip(names, values, strict=True))
    }
    groups: dict[str, list[Run]] = {}
    for run in runs:
        others = [f"{key.replace('_', ' ')} {value}" for key, value in run["settings"].items() if key != across]
        groups.setdefault(", ".join(others), []).append(run)
    for place, (label, group) in enumerate(list(groups.items())[:MOST_LINES]):
        ordered = sorted(group, key=lambda run: places[run["settings"][across]])
        at = [places[run["settings"][across]] for run in ordered]
        for name in QUANTILES if len(groups) == 1 else ("p95",):
            heights = [run["latency_s"].get(name, float("nan")) for run in ordered]
            said = name if len(groups) == 1 else label
            above.plot(at, heights, f"o{QUANTILES[name]}", color=COLOURS[place], markersize=4, label=said)
        rates = [run["throughput"]["rows_per_s"] for run in ordered]
        below.plot(at, rates, "o-", color=COLOURS[place], markersize=4, label=label)
    _mark_target(above, runs)
    answered = any(run["latency_s"] for run in runs)  # else there is nothing to scale
    _label_across(above, below, across, places, scaled, wide=answered)
    above.set_ylabel("latency" if len(groups) == 1 else "latency, p95")
    if answered:
        above.set_yscale("log")
        above.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    above.yaxis.set_major_formatter(lambda value, _: short(value))
    above.yaxis.set_minor_formatter(lambda value, _: "")
    above.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, frameon=False, fontsize=8)
    below.set_ylabel("rows per second")
    below.set_ylim(0, 1.1 * max(run["throughput"]["rows_per_s"] for run in runs) or 1)
    below.yaxis.set_major_formatter(lambda value, _: number(value))


def _across(runs: Sequence[Run]) -> str:
    def rank(key: str) -> tuple[bool, int]:
        values = {run["settings"][key] for run in runs}
        return all(_number(value) is not None for value in values), len(values)

    keys: list[str] = list(runs[0]["settings"])
    return max(keys, key=rank)


def _number(text: str) -> float | None:
    """A number or a time as people write it; None for any other setting."""
    try:
        return float(natural(text, float))
    except ValueError:
        return None


def _label_across(
    above: Axes, below: Axes, across: str, places: Mapping[str, float], scaled: bool, *, wide: bool
) -> None:
    """Ticks where the values are; in a logarithmic scale where they are `wide` apart."""
    for axes in (above, below):
        if not scaled or len(places) <= 12:
            axes.set_xticks(list(places.values()), list(places), fontsize=8)
        positive = [place for place in places.values() if place > 0]
        if wide and scaled and len(positive) == len(places) and max(positive) >= 20 * min(positive):
            axes.set_xscale("log")
            axes.set_xticks(list(places.values()), list(places), fontsize=8)
            axes.xaxis.set_minor_formatter(lambda value, _: "")
    below.set_xlabel(across.replace("_", " "))


def _mark_target(axes: Axes, runs: Sequence[Run], *, upright: bool = False) -> None:
    for target in {run["target_s"] for run in runs} - {None}:
        draw_line = axes.axvline if upright else axes.axhline
        draw_line(target, color="#999999", linewidth=1, label=f"target {short(target)}")
