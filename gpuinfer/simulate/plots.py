"""The plots of simulations. Drawn without a screen, with matplotlib, which is imported when it is needed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuinfer.config.options import natural
from gpuinfer.report.plotting import COLOURS, image
from gpuinfer.units import number, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WIDTH, HEIGHT = 8.0, 3.2  # inches: the plot, one panel
QUANTILES = {"p50": ":", "p95": "-", "p99": "--"}  # and how each line is drawn
MOST_LINES = len(COLOURS)

Run = Mapping[str, Any]


def draw(document: Mapping[str, Any], kind: str) -> bytes:
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
