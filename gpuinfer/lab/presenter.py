"""A result for people: a table with its notes, further tables and plots, as Markdown, as one HTML page that needs no
network, and as files in a folder. The terminal, Markdown and the page show the same; JSON is for programs.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuinfer.errors import WorkError
from gpuinfer.host.extras import missing_extra
from gpuinfer.host.files import put_whole
from gpuinfer.report import plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

log = logging.getLogger(__name__)

Note = tuple[str, str]  # a name and a text
WIDTH, BAR, AROUND = 8.0, 0.42, 1.2  # inches: a plot, one bar, axis and title

TEMPLATE = """\
{% macro table(one) %}
<table><tr>{% for column in one.columns %}<th>{{ column }}{% endfor %}
{% for row in one.rows %}<tr>{% for cell in row %}<td>{{ cell }}{% endfor %}
{% endfor %}</table>
{% endmacro %}
<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{{ page.title }}</title>
<meta name="viewport" content="width=device-width">
<style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
html { color: #222; background: #fff }
h1, h2 { line-height: 1.2 } h2 { margin-top: 2.5rem; font-size: 1.1rem }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th:first-child, td:first-child { text-align: left } th { color: #777; font-weight: normal }
dt { color: #777 } dd { margin: 0 0 .6rem 0 } pre { background: #f4f4f4; padding: .6rem; overflow-x: auto }
img { max-width: 100% } .verdict { font-size: 1.15rem; font-weight: 600 }
</style>
<h1>{{ page.title }}</h1>
<p class="verdict">{{ page.verdict }}</p>
{% if page.command %}<pre>{{ page.command }}</pre>{% endif %}
{% if page.about %}<p>{{ page.about }}</p>{% endif %}
{{ table(page.table) }}
<dl>{% for name, text in page.notes if name not in ("verdict", "command") %}<dt>{{ name }}<dd>{{ text }}
{% endfor %}</dl>
{% for one in page.more %}<h2>{{ one.title }}</h2>{{ table(one) }}{% endfor %}
{% for title, picture in pictures %}<h2>{{ title }}</h2>
<img alt="{{ title }}" src="data:image/svg+xml;base64,{{ picture }}">
{% endfor %}
{% if page.facts %}<h2>Measured with</h2>
<dl>{% for name, text in page.facts %}<dt>{{ name }}<dd>{{ text }}
{% endfor %}</dl>{% endif %}
</html>
"""


@dataclass(frozen=True, slots=True)
class Table:
    """Heads, and a cell of each row for each head."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""

    def markdown(self) -> Iterator[str]:
        """The lines of the table."""
        yield _line(self.columns)
        yield _line(["---", *["---:"] * (len(self.columns) - 1)])
        yield from map(_line, self.rows)


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(_text, cells))} |"


def _text(text: str) -> str:
    """Plain text, as Markdown and a cell of its tables can hold."""
    return text.replace("|", "\\|").replace("<", "&lt;").replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Plot:
    """A figure that is drawn when somebody wants to see it."""

    title: str
    figure: Callable[[], Figure]


def plot(title: str, bars: int, draw: Callable[[Axes], None]) -> Plot:
    """A plot of one pair of axes, with room for so many bars."""

    def figure() -> Figure:
        from matplotlib.figure import Figure

        made = Figure(figsize=(WIDTH, AROUND + BAR * max(2, bars)), layout="constrained")
        axes = made.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        draw(axes)
        return made

    return Plot(title, figure)


@dataclass(frozen=True, slots=True)
class Page:
    """All that people are shown of one result."""

    title: str
    verdict: str
    command: str | None
    table: Table
    about: str = ""  # what the figures are
    brief: Table | None = None  # in place of the table on a terminal
    notes: Sequence[Note] = ()  # those named verdict and command repeat these
    more: Sequence[Table] = ()
    plots: Mapping[str, Plot] = field(default_factory=dict)  # by file name, without the suffix
    facts: Sequence[Note] = ()  # what it was measured with

    def markdown(self, kind: str = "png") -> str:
        """Tables and notes, and links to the plots, which are files of `kind` in the same folder."""
        lines = [f"# {self.title}", "", *([self.about, ""] if self.about else []), *self.table.markdown(), ""]
        for name, text in self.notes:
            lines += [f"    {text}" if name == "command" else f"**{name}** {_text(text)}", ""]
        for one in self.more:
            lines += [f"## {one.title}", "", *one.markdown(), ""]
        for name, one_plot in self.plots.items():
            lines += [f"![{one_plot.title}]({name}.{kind})", ""]
        return "\n".join(lines)

    def html(self) -> str:
        """One file with everything in it, the plots as SVG."""
        pictures = [
            (one.title, base64.b64encode(plotting.image(one.figure(), "svg")).decode()) for one in self.plots.values()
        ]
        text: str = _template().render(page=self, pictures=pictures)
        return text

    def write(self, folder: Path, name: str, document: Mapping[str, Any], cure: str, kind: str = "png") -> None:
        """Put NAME.json (the document), NAME.md, NAME.html and each plot, as `kind`, into the folder. Without the extra
        `plots` there are no plots, and the log says so.

        Raises `WorkError`, which ends with the cure, when one of them cannot be written.
        """
        if self.plots and (problem := missing_extra("plots", f"{folder / next(iter(self.plots))}.{kind}")) is not None:
            log.warning("%s", problem)
            replace(self, plots={}).write(folder, name, document, cure, kind)
            return
        text = json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        files = {
            f"{name}.json": text.encode(),
            f"{name}.md": self.markdown(kind).encode(),
            f"{name}.html": self.html().encode(),
            **{f"{plot}.{kind}": plotting.image(one.figure(), kind) for plot, one in self.plots.items()},
        }
        for path, content in files.items():
            write_file(folder / path, content, cure)


def write_file(path: Path, content: bytes, cure: str) -> None:
    """Whole or not at all. Raises `WorkError`, which ends with the cure."""
    try:
        put_whole(path, lambda file: file.write(content))
    except OSError as error:
        raise WorkError(f"{path} could not be written: {error.strerror}. {cure}") from error


@cache
def _template() -> Any:
    import jinja2

    return jinja2.Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE)
