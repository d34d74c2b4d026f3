"""The plots of a comparison. Drawn without a screen, with matplotlib, which is imported when it is needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpuinfer.lab.bench.comparison import metric_unit, value_text
from gpuinfer.report.plotting import COLOURS
from gpuinfer.units import short, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]
Report = Mapping[str, Any]

STATIONS = ("search", "forward", "transfer", "encode", "reply", "record")  # each keeps its colour; others follow
IDLE = "#dddddd"


def reports_of(document: Document) -> dict[str, list[Report]]:
    """The reports of each variant, in the order of the table."""
    found: dict[str, list[Report]] = {row["name"]: [] for row in document["comparison"]}
    for sample, report in zip(document["samples"], document["runs"], strict=True):
        if sample["variant"] in found:
            found[sample["variant"]].append(report)
    return {name: reports for name, reports in found.items() if reports}


def draw_throughput(axes: Axes, document: Document) -> None:
    """Each run a dot, the median a bar, its interval a whisker."""
    rows = document["comparison"]
    for place, row in enumerate(rows):
        axes.barh(place, row["median"], color=_colour(place), alpha=0.35, height=0.6)
        if row["ci95"]:
            axes.plot(row["ci95"], [place, place], color=_colour(place), linewidth=2.5, solid_capstyle="butt")
        axes.plot(row["rates"], [place] * len(row["rates"]), "o", color=_colour(place), markersize=5)
    axes.set_xlabel(f"{metric_unit(rows[0]['metric'])}: median, runs, 95 % interval")
    axes.set_xlim(left=0)
    _name_rows(axes, [row["name"] for row in rows])
    axes.xaxis.set_major_formatter(lambda amount, _: value_text(rows[0]["metric"], amount))


def draw_batch_sizes(axes: Axes, document: Document) -> None:
    """Speed over batch size, a line for each generator, intervals as whiskers. Both axes in doublings."""
    sizes = document["grid"]["batch_sizes"]
    for place, one in enumerate(document["grid"]["generators"]):
        found = [row for row in document["comparison"] if row["settings"]["generator"] == one["name"]]
        at, speeds = [int(row["settings"]["batch_size"]) for row in found], [row["median"] for row in found]
        axes.plot(at, speeds, "o-", color=_colour(place), label=one["name"], markersize=5)
        for size, row in zip(at, found, strict=True):
            if row["ci95"]:
                axes.plot([size, size], row["ci95"], color=_colour(place), linewidth=2.5, alpha=0.5)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(sizes, [whole(size) for size in sizes])
    axes.set_xlabel("prompts at once")
    axes.set_ylabel(metric_unit(document["comparison"][0]["metric"]))
    axes.yaxis.set_major_formatter(lambda amount, _: value_text("", amount))
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)


def draw_time(axes: Axes, reports: Mapping[str, Sequence[Report]]) -> None:
    """Where the lanes' time went: shares of all lanes' time, idle last."""
    shares = {name: _shares(runs) for name, runs in reports.items()}
    seen = {station for parts in shares.values() for station, share in parts.items() if share >= 0.005}
    known = [station for station in STATIONS if station in seen]
    stations = [*known, *sorted(seen - {*known, "idle"}), "idle"]
    left = [0.0] * len(shares)
    for index, station in enumerate(stations):
        widths = [parts.get(station, 0.0) for parts in shares.values()]
        colour = IDLE if station == "idle" else _colour(index)
        axes.barh(range(len(widths)), widths, left=left, color=colour, label=station, height=0.6)
        left = [start + width for start, width in zip(left, widths, strict=True)]
    axes.set_xlim(0, 1)
    axes.set_xlabel("share of all lanes' time")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _name_rows(axes, list(shares))
    axes.legend(ncols=len(stations), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)


def draw_batches(axes: Axes, reports: Mapping[str, Sequence[Report]]) -> None:
    """How many of the batches were of which size, in doublings."""
    counts = {name: _sizes(runs) for name, runs in reports.items()}
    seen = {size for each in counts.values() for size in each}
    sizes = [1 << power for power in range(min(seen).bit_length() - 1, max(seen).bit_length())]
    width = 0.8 / len(counts)
    for place, (name, each) in enumerate(counts.items()):
        total = sum(each.values()) or 1
        at = [index + (place - (len(counts) - 1) / 2) * width for index in range(len(sizes))]
        axes.bar(at, [each[size] / total for size in sizes], width, color=_colour(place), label=name)
    axes.set_xticks(range(len(sizes)), [f"≤ {whole(size)}" for size in sizes], fontsize=8)
    axes.set_xlabel("rows in a batch")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.set_ylabel("of all batches")
    axes.legend(ncols=len(counts), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)


def draw_queue_wait(axes: Axes, reports: Mapping[str, Sequence[Report]]) -> None:
    """How long requests waited for their batch: median, 95th and 99th percentile, each the mean over the runs."""
    for place, runs in enumerate(reports.values()):
        waits = [report["queue_wait_s"] for report in runs if report["queue_wait_s"]]
        if not waits:
            continue
        ends = [sum(wait[name] for wait in waits) / len(waits) for name in ("p50", "p95", "p99")]
        axes.plot(ends, [place] * 3, color=_colour(place), linewidth=2.5)
        for end, marker in zip(ends, "o|d", strict=True):
            axes.plot([end], [place], marker, color=_colour(place), markersize=9)
    axes.set_xscale("log")
    axes.set_xlabel("wait in the queue: ● median, | 95 %, ◆ 99 %")
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.xaxis.set_minor_formatter(lambda value, _: "")
    _name_rows(axes, list(reports))


def _name_rows(axes: Axes, names: Sequence[str]) -> None:
    """First on top."""
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)


def _shares(runs: Sequence[Report]) -> dict[str, float]:
    seconds: Counter[str] = Counter()
    for report in runs:
        seconds.update(report["time_s"])
    total = sum(seconds.values()) or 1.0
    return {station: spent / total for station, spent in seconds.items()}


def _sizes(runs: Sequence[Report]) -> Counter[int]:
    counts: Counter[int] = Counter()
    for report in runs:
        counts.update({int(size): times for size, times in report["batches"]["sizes"].items()})
    return counts


def _colour(place: int) -> str:
    return COLOURS[place % len(COLOURS)]
