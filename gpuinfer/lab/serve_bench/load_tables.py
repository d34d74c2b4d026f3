"""The part of the document that servers under load have: its figures, its tables and its plots."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from gpuinfer.lab.bench.bench_plots import draw_throughput
from gpuinfer.lab.bench.comparison import interval_text
from gpuinfer.lab.bench.measurement import interval, ratio
from gpuinfer.lab.presenter import Page, Table, plot
from gpuinfer.lab.serve_bench.load_summary import BUSY
from gpuinfer.report.plotting import COLOURS
from gpuinfer.units import number, short, whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]

TIMES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "itl_s": "ITL", "e2e_s": "end to end"}
AT = ("p50", "p99")  # in the table of all; the one of latencies has more
ALL_AT = ("mean", "p50", "p90", "p95", "p99", "max")
ABREAST = 4  # ways beside one another on a terminal
LONG_ERRORS = 3  # kinds that are named in a note


def load_section(
    load: Mapping[str, Any], runs: Sequence[Mapping[str, Any]], names: Sequence[str], replicas: Mapping[str, int]
) -> dict[str, Any]:
    """`document["serve"]`: the load, each way's figures (medians over its runs), all runs', and how it scales.

    `runs` and `names`: the figures of each run and whose it is; `replicas`: of each way.
    """
    ways = []
    for name in dict.fromkeys(names):
        own = [run for run, whose in zip(runs, names, strict=True) if whose == name]
        ways.append({"name": name, "replicas": replicas.get(name, 1), **medians(own)})
    return {"load": dict(load), "ways": ways, "runs": list(runs), "scaling": []}


def medians(found: Sequence[Any]) -> Any:
    """Medians of figures, of errors and routes the sums; what is no figure is that of the first."""
    first = next((one for one in found if one is not None), None)
    if isinstance(first, bool):
        return any(found)
    if isinstance(first, int | float):
        return median(one for one in found if one is not None)
    if isinstance(first, list):
        return [median(values) for values in zip(*[one for one in found if one], strict=False)]
    if not isinstance(first, Mapping):
        return first
    keys = dict.fromkeys(key for one in found if one for key in one)
    return {
        key: summed([one.get(key) for one in found if one]) if key in ("errors", "routes") else medians(values)
        for key in keys
        if (values := [one[key] for one in found if one and key in one])
    }


def summed(found: Sequence[Any]) -> Any:
    total: dict[str, Any] = {}
    for one in found:
        for key, value in (one or {}).items():
            total[key] = summed([total.get(key), value]) if isinstance(value, Mapping) else total.get(key, 0) + value
    return total


def scaling(document: Document) -> list[dict[str, Any]]:
    """Of ways that differ in their replicas alone: how many times as fast as the first, and that for each replica."""
    rows = document["comparison"]
    if len(rows) < 2 or any(set(row["settings"]) != {"replicas"} for row in rows):
        return []
    metric = rows[0]["metric"]
    if metric.endswith("_s") and not metric.endswith("_per_s"):  # a time
        return []
    replicas = {way["name"]: way["replicas"] for way in document["serve"]["ways"]}
    first, found = rows[0], []
    for row in rows:
        speedup = ratio(row["rates"], first["rates"]) if len(row["rates"]) == len(first["rates"]) else interval([1.0])
        more = replicas[row["name"]] / replicas[first["name"]]
        found.append(
            {
                "replicas": replicas[row["name"]],
                "median": row["median"],
                "speedup": speedup.median,
                "speedup_ci95": speedup.ends,
                "efficiency": speedup.median / more,
            }
        )
    return found


def replicas_below(document: Document, least: float) -> list[str]:
    """Where replicas are not at least so efficient."""
    found = document["serve"]["scaling"]
    return [f"replicas={one['replicas']} ({one['efficiency']:.3f})" for one in found if one["efficiency"] < least]


def load_verdict(document: Document) -> str | None:
    """Of one way alone, or of numbers of replicas; None: that of any comparison."""
    if scaled := document["serve"]["scaling"]:
        last = scaled[-1]
        return (
            f"{whole(last['replicas'])} replicas do {last['speedup']:.2f}×{interval_text(last['speedup_ci95'])} what "
            f"{whole(scaled[0]['replicas'])} {'does' if scaled[0]['replicas'] == 1 else 'do'}: "
            f"{last['efficiency']:.0%} of what that would be at best."
        )
    if len(document["serve"]["ways"]) != 1:
        return None
    way = document["serve"]["ways"][0]
    parts = [f"{number(way['requests_per_s'])} requests/s"]
    if way["output_tokens_per_s"]:
        parts.append(f"{number(way['output_tokens_per_s'])} output tokens/s")
    if way["ttft_s"]:
        parts.append(f"first token after {short(way['ttft_s']['p50'])} (p99 {short(way['ttft_s']['p99'])})")
    parts.append(f"an answer within {short(way['e2e_s']['p50'])} (p99 {short(way['e2e_s']['p99'])})")
    return f"{', '.join(parts)}."


def load_page(title: str, document: Document) -> Page:
    """A row for each way that was measured; on a terminal a column for each way, where the ways are few."""
    table = _table(document)
    runs = max((len(row["rates"]) for row in document["comparison"]), default=0)
    load = document["serve"]["load"]
    count = (
        f"median of {runs} runs in turn, ratios pair by pair"
        if runs > 1
        else "one run, which tells nothing of the noise"
    )
    # On a terminal without intervals, which the page has; turned where the ways are few.
    rows = [[re.sub(r" \(.*\)", "", cell) for cell in row] for row in table.rows]
    if len(rows) <= ABREAST:
        turned = [[name, *(row[at] for row in rows)] for at, name in enumerate(table.columns) if at and rows]
        brief = Table(["", *(row[0] for row in table.rows)], turned)
    else:
        kept = [at for at, name in enumerate(table.columns) if not name.startswith("TPOT")]
        brief = Table([table.columns[at] for at in kept], [[row[at] for at in kept] for row in rows])
    plots = {}
    if (bars := len(table.rows)) > 1:
        plots["throughput"] = plot("The runs", bars, lambda axes: draw_throughput(axes, document))
    if document["serve"]["scaling"]:
        plots["scaling"] = plot("How it scales with replicas", 8, lambda axes: draw_scaling(axes, document))
    if any(way["curves"].get("ttft_s") for way in document["serve"]["ways"]):
        plots["ttft"] = plot("Time to the first token", 7, lambda axes: draw_percentiles(axes, document, "ttft_s"))
    plots["e2e"] = plot("Latency from end to end", 7, lambda axes: draw_percentiles(axes, document, "e2e_s"))
    return Page(
        title,
        document["verdict"],
        document["command"],
        table,
        f"{load['said']}; {count}" if runs else "nothing was measured",
        brief=brief,
        notes=list(_notes(document)),
        more=list(_more(document)),
        plots=plots,
    )


def _table(document: Document) -> Table:
    """With what there is of these columns: a load of requests alone has no tokens."""
    efficiencies = {one["replicas"]: one["efficiency"] for one in document["serve"]["scaling"]}
    ways = {way["name"]: way for way in document["serve"]["ways"]}
    found = ["", "requests/s"]
    if any(way["output_tokens_per_s"] for way in ways.values()):
        found.append("tokens/s")
    elif any(way["rows_per_s"] > way["requests_per_s"] * 1.01 for way in ways.values()):
        found.append("rows/s")
    if any(way["goodput_per_s"] is not None for way in ways.values()):
        found += ["goodput/s", "in time"]
    for name, title in TIMES.items():
        if name != "itl_s" and any(way[name] for way in ways.values()):
            found += [f"{title} {at}" for at in AT]
    found += ["failed"] if any(way["errors"] for way in ways.values()) else []
    found += ["× first"] if len(ways) > 1 else []
    found += ["efficiency"] if efficiencies else []
    rows = []
    for row in document["comparison"]:
        way = ways[row["name"]]
        tie = " tie" if row["standing"] == "tie" and row["ratio_ci95"] else ""
        first = row["standing"] == "first" or row["ratio_to_first"] is None
        cells = {
            "": ("★ " if row["name"] == document["winner"] and len(ways) > 1 else "") + row["name"],
            "requests/s": number(way["requests_per_s"]),
            "tokens/s": number(way["output_tokens_per_s"]),
            "rows/s": number(way["rows_per_s"]),
            "goodput/s": "" if way["goodput_per_s"] is None else number(way["goodput_per_s"]),
            "in time": "" if way["goodput_share"] is None else f"{way['goodput_share']:.1%}",
            "failed": whole(sum(way["errors"].values())),
            "× first": "" if first else f"{row['ratio_to_first']:.2f}{interval_text(row['ratio_ci95'])}{tie}",
            "efficiency": f"{efficiencies.get(way['replicas'], 1.0):.1%}",
        }
        for name, title in TIMES.items():
            cells |= {f"{title} {at}": short(way[name][at]) if way[name] else "" for at in AT}
        rows.append([cells[column] for column in found])
    return Table(found, rows)


def _notes(document: Document) -> Iterator[tuple[str, str]]:
    """The notes below the table."""
    for way in document["serve"]["ways"]:
        if failed := sum(way["errors"].values()):
            kinds = sorted(way["errors"].items(), key=lambda one: -one[1])
            said = ", ".join(f"{kind} ({whole(times)})" for kind, times in kinds[:LONG_ERRORS])
            yield "failed requests", f"{way['name']}: {whole(failed)}: {said}. They have no part in the latencies."
    saturated = [way for way in document["serve"]["ways"] if way["sender"]["saturated"]]
    busy = [way for way in saturated if way["sender"]["cpu_share"] > BUSY]
    if busy:
        yield (
            "the sender",
            f"saturated: {_late(busy)}. These figures are as much its own as the server's. Ask for less, or spread the "
            "load over several senders.",
        )
    if held := [way for way in saturated if way not in busy]:
        yield (
            "the sender",
            f"held up, though it had most of a core to spare: {_late(held)}. Something else was busy on this machine, "
            "which is in these latencies. Stop it, or send from another machine.",
        )
    if any(way["tokens_by_events"] for way in document["serve"]["ways"]):
        yield "tokens", "the server tells of no usage: each event of a stream is counted as one token"


def _late(ways: Sequence[Mapping[str, Any]]) -> str:
    """How late it was to what was due, at p99, and how much of a core it used."""
    each = [(way["name"], way["sender"]["send_lag_s"].get("p99", 0.0), way["sender"]["cpu_share"]) for way in ways]
    return ", ".join(f"{name} sent {short(late)} late (p99) with {share:.0%} of a core" for name, late, share in each)


def _more(document: Document) -> Iterator[Table]:
    """Tables for a page."""
    ways = document["serve"]["ways"]
    latencies = [
        [f"{way['name']}, {title}", *(short(way[name][at]) for at in ALL_AT)]
        for way in ways
        for name, title in TIMES.items()
        if way[name]
    ]
    yield Table(["", *ALL_AT], latencies, "Latencies")
    routed = []  # how evenly its replicas were asked, and by which reasons
    for way in ways:
        if way["routes"]:
            each, whys = [sum(one.values()) for one in way["routes"].values()], Counter[str]()
            for one in way["routes"].values():
                whys.update(one)
            said = ", ".join(f"{why} {whole(times)}" for why, times in whys.most_common())
            routed.append([way["name"], whole(len(each)), whole(min(each)), whole(max(each)), said])
    if routed:
        yield Table(["", "replicas", "fewest of one", "most of one", "why"], routed, "Who answered")
    senders = [
        [
            way["name"],
            f"{way['sender']['cpu_share']:.0%}",
            *(short(way["sender"]["send_lag_s"].get(at, 0.0)) for at in ("p50", "p99", "max")),
            short(way["sender"]["loop_lag_s"].get("p99", 0.0)),
        ]
        for way in ways
    ]
    heads = ["", "of a core", "sent late, p50", "p99", "max", "its event loop late, p99"]
    yield Table(heads, senders, "The sender itself")


def draw_percentiles(axes: Axes, document: Document, name: str) -> None:
    """Latency over percentile, a line for each way: how bad the worst are, which a median hides."""
    from matplotlib.ticker import LogLocator

    for place, way in enumerate(document["serve"]["ways"]):
        curve = way["curves"][name]
        if curve:
            at = [100 * step / (len(curve) - 1) for step in range(len(curve))]
            axes.plot(at, curve, color=COLOURS[place % len(COLOURS)], label=way["name"], linewidth=1.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.set_xlim(0, 100)
    axes.set_xlabel("percentile of the requests")
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)


def draw_scaling(axes: Axes, document: Document) -> None:
    """Speed over replicas, and the first one's speed times their number. Both axes in doublings."""
    found = document["serve"]["scaling"]
    replicas = [one["replicas"] for one in found]
    ideal = [found[0]["median"] * one / replicas[0] for one in replicas]
    axes.plot(replicas, ideal, "--", color="#999999", label="the first, times the replicas")
    axes.plot(replicas, [one["median"] for one in found], "o-", color=COLOURS[0], label="measured")
    for one in found:
        axes.annotate(
            f"{one['efficiency']:.0%}", (one["replicas"], one["median"]), (4, -12), textcoords="offset points"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(replicas, [str(one) for one in replicas])
    axes.set_xlabel("replicas")
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.legend(loc="upper left", frameon=False, fontsize=8)
