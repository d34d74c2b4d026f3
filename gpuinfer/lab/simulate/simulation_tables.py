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
from gpuinfer.lab.presenter import Note, Page, Plot, Table
from gpuinfer.lab.simulate.outcome import LEAST_SERVED, SimulationOutcome, Solution
from gpuinfer.report.plotting import COLOURS
from gpuinfer.stats import ERRORS, FLOOR, SUB_BUCKETS, mean_size, percentile, summarise
from gpuinfer.units import number, short, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SCHEMA = "gpuinfer.simulation/1"
STEP = 0.01  # between two points of a distribution


def simulation_document(
    command: str, seed: int, runs: Sequence[dict[str, Any]], solution: Solution | None
) -> dict[str, Any]:
    """`runs` are made by `run_figures`."""
    solved = solution and {
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
    return {
        "schema": SCHEMA,
        "gpuinfer": __version__,
        "command": command,
        "seed": seed,
        "runs": list(runs),
        "solve": solved,
    }


def run_figures(
    settings: Mapping[str, str], strategy: str, outcome: SimulationOutcome, target_s: float | None
) -> dict[str, Any]:
    """One simulation; `settings` are those in which it differs from the others. Batches as in the report of a run:
    sizes in doublings, seconds by rows; null where no batch ran.
    """
    snapshot, batches = outcome.snapshot, outcome.snapshot.batches
    p95, count, sizes = outcome.latency_s.get("p95", math.inf), sum(batches.values()), Counter[int]()
    for rows, times in batches.items():
        sizes[1 << max(0, rows - 1).bit_length()] += times
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
        "batches": {
            "count": count,
            "rows_mean": mean_size(batches) if count else None,
            "rows_p50": percentile(batches, 0.5) if count else None,
            "rows_max": max(batches) if count else None,
            "sizes": {str(size): times for size, times in sorted(sizes.items())},
            "seconds": {str(rows): spent[1] / spent[0] for rows, spent in sorted(snapshot.batch_s.items()) if spent[0]},
            "reasons": {reason.value: snapshot.reasons.get(reason.value, 0) for reason in Reason},
        },
        "latency_s": outcome.latency_s,
        "latency_cdf": cdf(snapshot.latency),
        "queue_wait_s": outcome.queue_wait_s,
        "router_wait_s": outcome.router_wait_s,
        "classes": {
            name: {
                **summarise(seen["latency"]),
                "requests": seen["requests"],
                "rows": seen["rows"],
                "errors": {error: seen["errors"].get(error, 0) for error in ERRORS},
                "queue_wait_s": summarise(seen["queue_wait"]),
            }
            for name, seen in snapshot.classes.items()
        },
        "errors": {name: snapshot.errors.get(name, 0) for name in ERRORS},
        "target_s": target_s,
        "met": None if target_s is None else p95 <= target_s and outcome.served_share >= LEAST_SERVED,
        "notices": list(outcome.notices),
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


LATENCY = ("latency", "mean", "p50", "p95", "p99", "max")
FIGURES = ("rows/s", "mean", "p95", "p99", "batch", "busy")

Run = Mapping[str, Any]


def simulation_page(
    title: str, document: Mapping[str, Any], varied: Sequence[str] = (), remarks: Sequence[Note] = ()
) -> Page:
    """What people are shown of one simulation; or, where settings are `varied`, a line for each. `remarks` end it."""
    runs = document["runs"]
    solution, plots = document["solve"], {"simulation": Plot(title, lambda: simulation_figure(runs))}
    if varied:
        table, notes = (
            _sweep(runs, varied),
            [*_sweep_notes(runs)] if solution is None else [("answer", solution["answer"])],
        )
    else:
        (run,) = runs
        of_classes = run["classes"].items() if len(run["classes"]) > 1 else ()
        seen = [("all", run["latency_s"]), *of_classes, ("in the queue", run["queue_wait_s"])]
        if run["router_wait_s"]:
            seen.append(("in the router", run["router_wait_s"]))
        table, notes = Table(LATENCY, [[name, *_times(times, LATENCY[1:])] for name, times in seen]), [*_run_notes(run)]
    verdict = dict(notes).get("answer") or dict(notes).get("verdict", "")
    return Page(title, verdict, document["command"], table, notes=[*notes, *remarks], plots=plots if runs else {})


def _run_notes(run: Run) -> Iterator[Note]:
    """Name and text of what else there is to say of one run."""
    yield "throughput", f"{_rate(run)} of {_rows_per_s(run['offered']['rows_per_s'])} rows/s offered"
    batches = run["batches"]
    if batches["count"]:
        mean, most = number(batches["rows_mean"]), whole(batches["rows_max"])
        yield "batches", f"{whole(batches['count'])} of {mean} rows on average, {most} at most"
        why = {reason: times / batches["count"] for reason, times in batches["reasons"].items() if times}
        shares = sorted(why.items(), key=lambda item: -item[1])
        yield "cut because", ", ".join(f"{reason} {_percent(share)}" for reason, share in shares)
    capacity = _rows_per_s(run["capacity_rows_per_s"])
    yield "busy", f"{_percent(run['utilisation'])} of the time; capacity {capacity} rows/s"
    lost = {kind: count for kind, count in run["errors"].items() if count}
    if lost:
        yield "lost", ", ".join(f"{whole(count)} {kind}" for kind, count in lost.items())
    if run["met"] is not None:
        verdict = "met" if run["met"] else "missed"
        if verdict == "missed" and run["latency_s"] and run["latency_s"]["p95"] <= run["target_s"]:
            verdict = f"met by what is answered, but {_percent(1 - run['served_share'])} is lost"
        yield "verdict", f"the target of {short(run['target_s'])} for p95 is {verdict}"
    for notice in run["notices"]:
        yield "notice", notice


def _sweep(runs: Sequence[Run], varied: Sequence[str]) -> Table:
    """What was varied, and the figures."""
    lossy, rows = any(run["served_share"] < 1 for run in runs), []
    for run in runs:
        first, *more = run["settings"].values()
        rows.append(
            [
                ("✓ " if run["met"] else "✗ " if run["met"] is not None else "") + first,
                *more,
                _rate(run),
                *_times(run["latency_s"], ("mean", "p95", "p99")),
                number(run["batches"]["rows_mean"] or 0.0),
                _percent(run["utilisation"]),
                *([_percent(1 - run["served_share"])] if lossy else []),
            ]
        )
    return Table([*(key.replace("_", " ") for key in varied), *FIGURES, *(["lost"] if lossy else [])], rows)


def _sweep_notes(runs: Sequence[Run]) -> Iterator[Note]:
    """The notes of several runs, each notice once."""
    targets = {run["target_s"] for run in runs} - {None}
    if len(targets) == 1:
        yield "target", f"p95 of {short(targets.pop())}: ✓ met, ✗ missed"
    for notice in dict.fromkeys(notice for run in runs for notice in run["notices"]):
        yield "notice", notice


def settings_label(settings: Mapping[str, str]) -> str:
    """Such as `max_wait 1ms, strategy dynamic`."""
    return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in settings.items())


def _rate(run: Run) -> str:
    return _rows_per_s(run["throughput"]["rows_per_s"])


def _rows_per_s(rate: float) -> str:
    return whole(rate) if rate >= 100 else number(rate)


def _times(times: Mapping[str, float], parts: Sequence[str]) -> list[str]:
    return [short(times[part]) if part in times else "–" for part in parts]


def _percent(share: float) -> str:
    return f"{share:.0%}" if share >= 0.1 or share == 0 else f"{share:.1%}" if share >= 0.001 else "< 0.1%"


WIDTH, HEIGHT = 8.0, 3.2  # inches: the plot, one panel
QUANTILES = {"p50": ":", "p95": "-", "p99": "--"}  # and how each line is drawn
MOST_LINES = len(COLOURS)


def simulation_figure(runs: Sequence[Run]) -> Figure:
    """The runs of a `gpuinfer.simulation/1`: of one its distributions, of several the figures over what was varied."""
    from matplotlib.figure import Figure

    alone = len(runs) == 1
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
    return figure


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

    def rank(key: str) -> tuple[bool, int]:
        values = {run["settings"][key] for run in runs}
        return all(_number(value) is not None for value in values), len(values)

    across = max(list(runs[0]["settings"]), key=rank)
    names = list(dict.fromkeys(run["settings"][across] for run in runs))
    values = [_number(name) for name in names]
    scaled = None not in values
    places = {
        name: place if value is None or not scaled else value
        for place, (name, value) in enumerate(zip(names, values, strict=True))
    }
    groups: dict[str, list[Run]] = {}
    for run in runs:
        others = {key: value for key, value in run["settings"].items() if key != across}
        groups.setdefault(settings_label(others), []).append(run)
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
