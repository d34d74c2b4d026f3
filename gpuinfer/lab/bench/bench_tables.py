"""A comparison as one page: its table, its notes and its plots."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from gpuinfer.lab.bench import ablation_tables, bench_plots, generators_tables
from gpuinfer.lab.bench.bench_plots import draw_throughput
from gpuinfer.lab.bench.comparison import interval_text, metric_unit, span, value_text
from gpuinfer.lab.bench.measurement import LATENCY
from gpuinfer.lab.presenter import Note, Page, Table, plot
from gpuinfer.lab.rollouts_bench import rollouts_tables
from gpuinfer.lab.serve_bench import load_tables
from gpuinfer.units import number, short, whole

WORK = ("", "median", "95 %", "× first", "rows/batch", "roofline", "held back by", "answers")
LOAD = (
    "",
    "rows/s",
    "p50",
    "p95",
    "mean",
    "×",
    "batch",
    "cut",
    "reasons",
    "95 %",
    "× first",
    "held back by",
    "answers",
)
BRIEF = {WORK: 5, LOAD: 8}  # columns on a terminal: the notes say the rest
SPREAD = 1.5  # the fastest run of a variant over its slowest, from which the machine counts as unquiet
ABOVE = 1.1  # times what the bare model was measured to do, which nothing can exceed
SECTIONS = {
    "ablation": ablation_tables.ablation_page,
    "grid": generators_tables.generators_page,
    "serve": load_tables.load_page,
    "rollouts": rollouts_tables.rollouts_page,
}
"""Key of a document → what makes the page of one that has this key: its own table, notes and plots."""


def bench_page(document: Mapping[str, Any]) -> Page:
    """What people are shown of a comparison. `document`: as `bench_document.py` makes it."""
    title = f"gpuinfer bench {document['target']}"
    page = next((make for key, make in SECTIONS.items() if key in document), _page)(title, document)
    environment = (document["environment"] or {}).items()
    facts = [*((name, str(value)) for name, value in environment), ("started", document["started_at"])]
    plots = page.plots if bench_plots.reports_of(document) else {}
    return replace(page, notes=list(_notes(document, page.notes)), plots=plots, facts=facts)


def _page(title: str, document: Mapping[str, Any]) -> Page:
    """Of work the speed, of a load what became of the requests too."""
    compared, columns = document["comparison"], LOAD if document["of_load"] else WORK
    rows = []
    for row in compared:
        won = row["name"] == document["winner"]
        counts, mean, parity = row["reasons"], row["rows_per_batch"], row["parity"]
        reasons = [
            f"{name} {count / sum(counts.values()):.0%}"
            for name, count in sorted(counts.items(), key=lambda one: -one[1])  # the most frequent first
        ]
        answers = "not checked"
        if parity is not None:
            answers = f"{parity['difference']:.0e} off" if parity["holds"] else "WRONG"
        latency = {**row["latency_s"], **({"p95": row["median"]} if row["metric"] == LATENCY else {})}
        cells = {
            "": ("★ " if won else "") + row["name"],
            "median": value_text(row["metric"], row["median"]),
            "95 %": span(row["metric"], *row["ci95"]) if row["ci95"] else "unknown",
            "× first": ratio_to_first(row),
            "×": "" if row["standing"] == "first" or row["ratio_to_first"] is None else f"{row['ratio_to_first']:.2f}",
            "rows/s": number(row["rows_per_s"]),
            **{name: short(latency[name]) if name in latency else "" for name in ("p50", "p95", "mean")},
            "rows/batch": f"{whole(mean)}{_batches_to_first(row)}" if mean else "",
            "batch": "" if not mean else whole(mean) if mean >= 10 else number(mean),
            "cut": next(iter(reasons), ""),
            "reasons": ", ".join(reasons),
            "roofline": f"{row['efficiency']:.0%}" if row["efficiency"] is not None else "",
            "held back by": row["bottleneck"]["class"],
            "answers": answers,
        }
        rows.append([cells[column] for column in columns])
    width = BRIEF[columns]
    reports, about = bench_plots.reports_of(document), "nothing was measured"
    if compared:
        most, seconds = max(len(row["rates"]) for row in compared), document["course"]["seconds"]
        runs = f"{most} run{'s' if most > 1 else ''}"
        each = f" of up to {short(seconds)}" if seconds else " to the end"
        ratios = "ratios pair by pair" + (", over 1 is faster" if compared[0]["metric"] == LATENCY else "")
        about = f"{metric_unit(compared[0]['metric'])}, median of {runs}{each}; {ratios}"
    plots = {
        "throughput": plot("The runs", len(reports), lambda axes: draw_throughput(axes, document)),
        "time": plot("Where the lanes' time went", len(reports), lambda axes: bench_plots.draw_time(axes, reports)),
    }
    if any(report["batches"]["count"] for runs in reports.values() for report in runs):
        plots["batches"] = plot("Rows in a batch", 6, lambda axes: bench_plots.draw_batches(axes, reports))
        plots["queue_wait"] = plot(
            "Waiting in the queue", len(reports), lambda axes: bench_plots.draw_queue_wait(axes, reports)
        )
    return Page(
        title,
        document["verdict"],
        document["command"],
        Table(columns, rows),
        about,
        brief=Table(columns[:width], [row[:width] for row in rows]),
        plots=plots,
    )


def _notes(document: Mapping[str, Any], own: Sequence[Note]) -> Iterator[Note]:
    """The notes below the table, with the `own` notes of this kind of comparison."""
    yield "verdict", document["verdict"]
    behind = [
        f"{row['name']} ({number(row['rows_per_s'])} rows/s)" for row in document["comparison"] if not row["keeps_up"]
    ]
    if behind:
        yield (
            "behind",
            f"{', '.join(behind)}: under 0.99 of what the best answers: requests pile up, or are lost. It cannot win.",
        )
    if document["why"]:
        yield "why", document["why"]
    yield from own
    compared = document["comparison"]
    if compared and not document["of_load"]:
        yield from (("batches", text) for text in _about_batches(compared))
    spread = max((max(row["rates"]) / min(row["rates"]) for row in compared if min(row["rates"]) > 0), default=1.0)
    above = max((row["exceeded"] or 0.0 for row in compared), default=0.0)
    signs = [f"runs of one variant differ by {spread:.1f}×"] if spread > SPREAD else []
    if above > ABOVE:
        signs.append(f"a run reached {above:.0%} of what the bare model had been measured to do")
    if unquiet := (
        f"{' and '.join(signs)}: something else was busy here. Stop it, or measure for longer." if signs else ""
    ):
        yield "unquiet", unquiet
    if "search" in document:
        trials = document["search"]["tried"]
        rates = ["cannot run" if trial["rate"] is None else number(trial["rate"]) for trial in trials]
        yield "tried", ", ".join(f"{trial['name']}: {rate}" for trial, rate in zip(trials, rates, strict=True))
    rows = [row for row in document["comparison"] if row["parity"]]
    right = [row["parity"] for row in rows if row["parity"]["holds"]]
    if right:
        most = max(parity["difference"] for parity in right)
        apart = f"within {most:.0e}" if most else "exactly"
        yield "answers", f"the model's own, {apart}, on {right[0]['rows']} rows"
    for row in rows:
        if not row["parity"]["holds"]:
            off, allowed = row["parity"]["difference"], row["parity"]["tolerance"]
            apart = "its answers have another shape than the model's"
            if off is not None:
                apart = f"{off:.2g} off, where {allowed:.2g} is allowed"
            yield "wrong answers", f"{row['name']}: {apart}"
    for what in ("skipped", "failed"):
        for one in document[what]:
            yield what, f"{one['name']}: {one['reason']}"
    if document["status"] == "partial":
        yield "stopped", "before all was done: the figures are those of the runs that had ended"
    if document["command"]:
        yield "command", document["command"]


LIKE_FIRST = 0.05  # mean batches that are as near to those of the first are the same


def _batches_to_first(row: Mapping[str, Any]) -> str:
    """Such as ` (3.2×)`; nothing for the first, and where batches are as large."""
    ratio = row["rows_per_batch_to_first"]
    if row["standing"] == "first" or ratio is None or abs(ratio - 1) <= LIKE_FIRST:
        return ""
    return f" ({ratio:.2g}×)" if ratio < 10 else f" ({ratio:.0f}×)"


def _about_batches(compared: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Of each variant whose batches are of another size than those of the first: what that has brought."""
    first = compared[0]
    for row in compared[1:]:
        ratio = row["rows_per_batch_to_first"]
        if ratio is None or abs(ratio - 1) <= LIKE_FIRST:
            continue
        larger, speed = ratio > 1, row["ratio_to_first"]
        times = f"{ratio:.2g} times" if larger else f"{ratio:.0%} of"
        means = (
            f"{row['name']} computes batches of {whole(row['rows_per_batch'])} rows, {times} those of {first['name']}"
        )
        brought = ""
        if speed is not None and row["standing"] == "tie":
            brought = "; that has changed the speed by no more than the noise"
        elif speed is not None and larger == (row["standing"] == "faster"):
            brought = f", and is {speed:.2f} times as fast"
        elif speed is not None:
            why = "larger batches were not what was missing here" if larger else "smaller ones were enough here"
            brought = f", and yet it is {speed:.2f} times as fast: {why}"
        yield f"{means}{brought}"


def ratio_to_first(row: Mapping[str, Any]) -> str:
    """How many times as good as the first, with the interval; empty for the first."""
    if row["standing"] == "first" or row["ratio_to_first"] is None:
        return ""
    tie = {"tie": " tie" if row["ratio_ci95"] else ", one run"}.get(row["standing"], "")
    return f"{row['ratio_to_first']:.2f}{interval_text(row['ratio_ci95'])}{tie}"
