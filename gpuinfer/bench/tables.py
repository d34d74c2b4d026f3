"""The table of a comparison, as words: the terminal, Markdown and the page show the same one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuinfer.bench.words import between, span, unit
from gpuinfer.screen.units import number, short, whole

COLUMNS = ("", "median", "95 %", "× first", "rows/batch", "roofline", "held back by", "answers")
SPREAD = 1.5  # the fastest run of a variant over its slowest, from which the machine is called unquiet
ABOVE = 1.1  # of the roofline, which nothing can exceed
BRIEF = 5  # of them on a terminal: the rest is said below the table
WINNER = "★ "


def about(document: Mapping[str, Any]) -> str:
    """What the figures are."""
    rows, seconds = document["comparison"], document["course"]["seconds"]
    if not rows:
        return "nothing was measured"
    most = max(len(row["rates"]) for row in rows)
    runs = f"{most} run{'s' if most > 1 else ''}"
    each = f" of {short(seconds)}" if seconds else " to the end"
    return f"{unit(rows[0]['metric'])}, median of {runs}{each}; ratios pair by pair"


def rows(document: Mapping[str, Any]) -> Iterator[list[str]]:
    """One for each variant that was measured, in the order in which they were named."""
    for row in document["comparison"]:
        yield [
            (WINNER if row["name"] == document["winner"] else "") + row["name"],
            number(row["median"]),
            span(*row["ci95"]) if row["ci95"] else "unknown",
            _first(row),
            whole(row["rows_per_batch"]) if row["rows_per_batch"] else "",
            f"{row['efficiency']:.0%}" if row["efficiency"] is not None else "",
            row["bottleneck"]["class"],
            _answers(row["parity"]),
        ]


def notes(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Name and text of what there is to say beside the table."""
    yield "verdict", document["verdict"]
    if document["why"]:
        yield "why", document["why"]
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
    above = max((row["efficiency"] or 0.0 for row in rows), default=0.0)
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
