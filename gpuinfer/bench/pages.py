"""The comparison as Markdown and as one page that needs no network.

The files of a comparison: JSON for programs, Markdown and a page for people, plots for both.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable, Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from gpuinfer.bench import plots, tables
from gpuinfer.errors import WorkError
from gpuinfer.report import plotting

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
    columns = list(tables.columns(document))
    lines = [f"# {_title(document)}", "", tables.about(document), "", _line(columns)]
    lines += [_line(["---", *["---:"] * (len(columns) - 1)]), *map(_line, tables.rows(document)), ""]
    for name, text in tables.notes(document):
        lines += [f"    {text}" if name == "command" else f"**{name}** {_cell(text)}", ""]
    for title, heads, rows in tables.more(document):
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
    yield f"<p>{escape(tables.about(document))}</p>\n"
    yield from _tabulated(tables.columns(document), tables.rows(document))


def _tabulated(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    yield "<table><tr>"
    yield from (f"<th>{escape(column)}" for column in columns)
    for row in rows:
        yield "\n<tr>"
        yield from (f"<td>{escape(cell)}" for cell in row)
    yield "\n</table>\n"


def _more(document: Mapping[str, Any]) -> Iterator[str]:
    for title, columns, rows in tables.more(document):
        yield f"<h2>{escape(title)}</h2>\n"
        yield from _tabulated(columns, rows)


def _notes(document: Mapping[str, Any]) -> Iterator[str]:
    yield "<dl>"
    for name, text in tables.notes(document):
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
    figures = plots.plots(document)
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
