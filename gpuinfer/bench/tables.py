"""The table of a comparison, as words: the terminal, Markdown and the page show the same one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuinfer.bench import grid
from gpuinfer.bench.interval import LATENCY
from gpuinfer.bench.rollouts import shown as rollouts
from gpuinfer.bench.serve import shown
from gpuinfer.bench.words import between, span, unit, value
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
SPREAD = 1.5  # the fastest run of a variant over its slowest, from which the machine is called unquiet
ABOVE = 1.1  # times what the bare model was measured to do, which nothing can exceed
BRIEF = {WORK: 5, LOAD: 8}  # of them on a terminal: the rest is said below the table
WINNER = "★ "


def about(document: Mapping[str, Any]) -> str:
    """What the figures are."""
    if "grid" in document:
        return grid.about(document)
    if "serve" in document:
        return shown.about(document)
    if "rollouts" in document:
        return rollouts.about(document)
    rows, seconds = document["comparison"], document["course"]["seconds"]
    if not rows:
        return "nothing was measured"
    most = max(len(row["rates"]) for row in rows)
    runs = f"{most} run{'s' if most > 1 else ''}"
    each = f" of up to {short(seconds)}" if seconds else " to the end"
    ratios = "ratios pair by pair" + (", over 1 is faster" if rows[0]["metric"] == LATENCY else "")
    return f"{unit(rows[0]['metric'])}, median of {runs}{each}; {ratios}"


def columns(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Of work the speed, of a load what became of the requests too; of generators the batch sizes."""
    if "grid" in document:
        return grid.columns(document)
    if "serve" in document:
        return tuple(shown.columns(document))
    if "rollouts" in document:
        return tuple(rollouts.columns(document))
    return LOAD if document["of_load"] else WORK


def rows(document: Mapping[str, Any]) -> Iterator[list[str]]:
    """One for each variant that was measured, in the order in which they were named: a cell for each column."""
    if "grid" in document:
        yield from grid.rows(document)
        return
    if "serve" in document:
        yield from shown.rows(document)
        return
    if "rollouts" in document:
        yield from rollouts.rows(document)
        return
    for row in document["comparison"]:
        cells = _cells(row, row["name"] == document["winner"])
        yield [cells[column] for column in columns(document)]


def brief(document: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns and rows for a terminal."""
    if "grid" in document:
        return columns(document), list(grid.rows(document, intervals=False))
    if "serve" in document:
        names, cells = shown.brief(document)
        return tuple(names), cells
    if "rollouts" in document:
        heads, cells = rollouts.brief(document)
        return tuple(heads), cells
    width = BRIEF[columns(document)]
    return columns(document)[:width], [row[:width] for row in rows(document)]


def more(document: Mapping[str, Any]) -> Iterator[shown.Table]:
    """Tables that only a page has room for."""
    if "serve" in document:
        yield from shown.more(document)
    if "rollouts" in document:
        yield from rollouts.more(document)


def _cells(row: Mapping[str, Any], won: bool) -> dict[str, str]:
    latency = {**row["latency_s"], **({"p95": row["median"]} if row["metric"] == LATENCY else {})}
    return {
        "": (WINNER if won else "") + row["name"],
        "median": value(row["metric"], row["median"]),
        "95 %": span(row["metric"], *row["ci95"]) if row["ci95"] else "unknown",
        "× first": _first(row),
        "×": "" if row["standing"] == "first" or row["ratio_to_first"] is None else f"{row['ratio_to_first']:.2f}",
        "rows/s": number(row["rows_per_s"]),
        **{name: short(latency[name]) if name in latency else "" for name in ("p50", "p95", "mean")},
        "rows/batch": whole(row["rows_per_batch"]) if row["rows_per_batch"] else "",
        "batch": _mean(row["rows_per_batch"]),
        "cut": next(_reasons(row["reasons"]), ""),
        "reasons": ", ".join(_reasons(row["reasons"])),
        "roofline": f"{row['efficiency']:.0%}" if row["efficiency"] is not None else "",
        "held back by": row["bottleneck"]["class"],
        "answers": _answers(row["parity"]),
    }


def _mean(mean: float | None) -> str:
    """Rows in a batch, where it matters whether that is one or two."""
    return "" if not mean else whole(mean) if mean >= 10 else number(mean)


def _reasons(counts: Mapping[str, int]) -> Iterator[str]:
    """Such as `clients 84%`, `free 16%`: the most frequent first."""
    for name, count in sorted(counts.items(), key=lambda one: -one[1]):
        yield f"{name} {count / sum(counts.values()):.0%}"


def notes(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of what there is to say beside the table."""
    yield "verdict", document["verdict"]
    if behind := [f"{row['name']} ({number(row['rows_per_s'])} rows/s)" for row in _behind(document)]:
        yield (
            "behind",
            f"{', '.join(behind)}: under 0.99 of what the best answers: requests pile up, or are lost. It cannot win.",
        )
    if document["why"]:
        yield "why", document["why"]
    if "grid" in document:
        yield "versions", grid.versions(document)
    if "serve" in document:
        yield from shown.notes(document)
    if "rollouts" in document:
        yield from rollouts.notes(document)
    if unquiet := _unquiet(document["comparison"]):
        yield "unquiet", unquiet
    if "search" in document:
        yield "tried", ", ".join(_trial(trial) for trial in document["search"]["tried"])
    yield from _parity([row for row in document["comparison"] if row["parity"]])
    for what in ("skipped", "failed"):
        for one in document[what]:
            yield what, f"{one['name']}: {one['reason']}"
    if document["status"] == "partial":
        yield "stopped", "before all was done: the figures are those of the runs that had ended"
    if document["command"]:
        yield "command", document["command"]


def _behind(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [row for row in document["comparison"] if not row["keeps_up"]]


def _parity(rows: list[Mapping[str, Any]]) -> Iterator[tuple[str, str]]:
    right = [row["parity"] for row in rows if row["parity"]["holds"]]
    if right:
        most = max(parity["difference"] for parity in right)
        apart = f"within {most:.0e}" if most else "exactly"
        yield "answers", f"the model's own, {apart}, on {right[0]['rows']} rows"
    for row in rows:
        if not row["parity"]["holds"]:
            yield "wrong answers", f"{row['name']}: {_apart(row['parity'])}"


def _unquiet(rows: list[Mapping[str, Any]]) -> str:
    """Signs that something else was at work on this machine; empty when there are none."""
    spread = max((max(row["rates"]) / min(row["rates"]) for row in rows if min(row["rates"]) > 0), default=1.0)
    above = max((row["exceeded"] or 0.0 for row in rows), default=0.0)
    signs = [f"runs of one variant differ by {spread:.1f}×"] if spread > SPREAD else []
    if above > ABOVE:
        signs.append(f"a run reached {above:.0%} of what the bare model had been measured to do")
    return f"{' and '.join(signs)}: something else was busy here. Stop it, or measure for longer." if signs else ""


def _trial(trial: Mapping[str, Any]) -> str:
    return f"{trial['name']}: {'cannot run' if trial['rate'] is None else number(trial['rate'])}"


def _first(row: Mapping[str, Any]) -> str:
    if row["standing"] == "first" or row["ratio_to_first"] is None:
        return ""
    tie = {"tie": " tie" if row["ratio_ci95"] else ", one run"}.get(row["standing"], "")
    return f"{row['ratio_to_first']:.2f}{between(row['ratio_ci95'])}{tie}"


def _answers(parity: Mapping[str, Any] | None) -> str:
    if parity is None:
        return "not checked"
    return f"{parity['difference']:.0e} off" if parity["holds"] else "WRONG"


def _apart(parity: Mapping[str, Any]) -> str:
    if parity["difference"] is None:
        return "its answers have another shape than the model's"
    return f"{parity['difference']:.2g} off, where {parity['tolerance']:.2g} is allowed"
