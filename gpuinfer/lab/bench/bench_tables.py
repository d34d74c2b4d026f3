"""A comparison as tables, as Markdown and as one page that needs no network.

The terminal, Markdown and the page show the same table; JSON is for programs.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from gpuinfer.errors import WorkError
from gpuinfer.lab.bench import bench_plots, generators_tables
from gpuinfer.lab.bench.comparison import between, span, unit, value_text
from gpuinfer.lab.bench.measurement import LATENCY
from gpuinfer.lab.rollouts_bench import rollouts_tables as rollouts
from gpuinfer.lab.serve_bench import load_tables
from gpuinfer.report import plotting
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
        return generators_tables.about(document)
    if "serve" in document:
        return load_tables.about(document)
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


def comparison_columns(document: Mapping[str, Any]) -> tuple[str, ...]:
    """Of work the speed, of a load what became of the requests too; of generators the batch sizes."""
    if "grid" in document:
        return generators_tables.columns(document)
    if "serve" in document:
        return tuple(load_tables.columns(document))
    if "rollouts" in document:
        return tuple(rollouts.columns(document))
    return LOAD if document["of_load"] else WORK


def comparison_rows(document: Mapping[str, Any]) -> Iterator[list[str]]:
    """One for each variant that was measured, in the order in which they were named: a cell for each column."""
    if "grid" in document:
        yield from generators_tables.rows(document)
        return
    if "serve" in document:
        yield from load_tables.rows(document)
        return
    if "rollouts" in document:
        yield from rollouts.rows(document)
        return
    for row in document["comparison"]:
        cells = _cells(row, row["name"] == document["winner"])
        yield [cells[column] for column in comparison_columns(document)]


def brief(document: Mapping[str, Any]) -> tuple[tuple[str, ...], list[list[str]]]:
    """Columns and rows for a terminal."""
    if "grid" in document:
        return comparison_columns(document), list(generators_tables.rows(document, intervals=False))
    if "serve" in document:
        names, cells = load_tables.brief(document)
        return tuple(names), cells
    if "rollouts" in document:
        heads, cells = rollouts.brief(document)
        return tuple(heads), cells
    width = BRIEF[comparison_columns(document)]
    return comparison_columns(document)[:width], [row[:width] for row in comparison_rows(document)]


def more(document: Mapping[str, Any]) -> Iterator[load_tables.Table]:
    """Tables that only a page has room for."""
    if "serve" in document:
        yield from load_tables.more(document)
    if "rollouts" in document:
        yield from rollouts.more(document)


def _cells(row: Mapping[str, Any], won: bool) -> dict[str, str]:
    latency = {**row["latency_s"], **({"p95": row["median"]} if row["metric"] == LATENCY else {})}
    return {
        "": (WINNER if won else "") + row["name"],
        "median": value_text(row["metric"], row["median"]),
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
        yield "versions", generators_tables.versions(document)
    if "serve" in document:
        yield from load_tables.notes(document)
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


TITLES = {
    "throughput": "The runs",
    "steps": "How long a step of the trainer lasts",
    "scaling": "How it scales with replicas",
    "ttft": "Time to the first token",
    "e2e": "Latency from end to end",
    "batch_sizes": "Tokens per second by batch size",
    "batches": "Rows in a batch",
    "time": "Where the lanes' time went",
    "queue_wait": "Waiting in the queue",
}

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
html { color: #222; background: #fff }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem; font-size: 1.1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: #777; font-weight: normal }
dt { color: #777 } dd { margin: 0 0 .6rem 0 } pre { background: #f4f4f4; padding: .6rem; overflow-x: auto }
img { max-width: 100% } .verdict { font-size: 1.15rem; font-weight: 600 }
"""


def markdown(document: Mapping[str, Any], plots: Mapping[str, bytes]) -> str:
    """The table, the verdict and links to the plots that lie beside it."""
    columns = list(comparison_columns(document))
    lines = [f"# {_title(document)}", "", about(document), "", _line(columns)]
    lines += [_line(["---", *["---:"] * (len(columns) - 1)]), *map(_line, comparison_rows(document)), ""]
    for name, text in notes(document):
        lines += [f"    {text}" if name == "command" else f"**{name}** {_cell(text)}", ""]
    for title, heads, rows in more(document):
        lines += [
            f"## {title}",
            "",
            _line([*heads]),
            _line(["---", *["---:"] * (len(heads) - 1)]),
            *map(_line, rows),
            "",
        ]
    for name in plots:
        lines += [f"![{TITLES[name]}]({name}.png)", ""]
    return "\n".join(lines)


def page(document: Mapping[str, Any], plots: Mapping[str, bytes]) -> str:
    """One HTML file with everything in it; `plots` are SVG."""
    return "".join(
        [
            f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{escape(_title(document))}</title>\n',
            '<meta name="viewport" content="width=device-width">\n',
            f"<style>{STYLE}</style>\n<h1>{escape(_title(document))}</h1>\n",
            f'<p class="verdict">{escape(document["verdict"])}</p>\n',
            *_command(document),
            *_table(document),
            *_notes(document),
            *_more(document),
            *_pictures(plots),
            *_surroundings(document),
            "</html>\n",
        ]
    )


def _title(document: Mapping[str, Any]) -> str:
    return f"gpuinfer bench {document['target']}"


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


def _command(document: Mapping[str, Any]) -> Iterator[str]:
    if document["command"]:
        yield f"<pre>{escape(document['command'])}</pre>\n"


def _table(document: Mapping[str, Any]) -> Iterator[str]:
    yield f"<p>{escape(about(document))}</p>\n"
    yield from _tabulated(comparison_columns(document), comparison_rows(document))


def _tabulated(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield "<table><tr>"
    yield from (f"<th>{escape(column)}" for column in columns)
    for row in rows:
        yield "\n<tr>"
        yield from (f"<td>{escape(cell)}" for cell in row)
    yield "\n</table>\n"


def _more(document: Mapping[str, Any]) -> Iterator[str]:
    for title, columns, rows in more(document):
        yield f"<h2>{escape(title)}</h2>\n"
        yield from _tabulated(columns, rows)


def _notes(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<dl>"
    for name, text in notes(document):
        if name not in ("verdict", "command"):
            yield f"<dt>{escape(name)}<dd>{escape(text)}\n"
    yield "</dl>\n"


def _pictures(plots: Mapping[str, bytes]) -> Iterator[str]:
    for name, picture in plots.items():
        data = base64.b64encode(picture).decode("ascii")
        yield f'<h2>{TITLES[name]}</h2>\n<img alt="{TITLES[name]}" src="data:image/svg+xml;base64,{data}">\n'


def _surroundings(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<h2>Measured with</h2>\n<dl>"
    for name, value in (document["environment"] or {}).items():
        yield f"<dt>{escape(name)}<dd>{escape(str(value))}\n"
    yield f"<dt>started<dd>{escape(document['started_at'])}\n</dl>\n"


def write(folder: Path, document: Mapping[str, Any]) -> None:
    """Put `bench.json`, `bench.md`, `bench.html` and a PNG for each plot into the folder.

    Raises `WorkError` when one of them cannot be written.
    """
    figures = bench_plots.plots(document)
    svg = {name: plotting.image(figure, "svg") for name, figure in figures.items()}
    png = {name: plotting.image(figure, "png") for name, figure in figures.items()}
    texts = {
        "bench.json": json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n",
        "bench.md": markdown(document, png),
        "bench.html": page(document, svg),
    }
    try:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        for name, picture in png.items():
            (folder / f"{name}.png").write_bytes(picture)
    except OSError as error:
        raise WorkError(
            f"the report could not be written to {folder}: {error.strerror}. Make room there, or give another --report."
        ) from error
