"""The screen: a live view while a run goes on, plain lines where there is no terminal, and a panel at its end.

The only file of ours that imports rich. `view` and `summary` say what is shown; this draws it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from gpuinfer.cli.screen import live_view
from gpuinfer.cli.screen.final_panel import in_brief
from gpuinfer.cli.screen.final_panel import panel_rows as summary_rows
from gpuinfer.cli.screen.final_panel import trial_rows as tried_rows
from gpuinfer.cli.screen.node_rows import node_table
from gpuinfer.cli.screen.workload_rows import PanelRow
from gpuinfer.units import bar, duration, number, short

if TYPE_CHECKING:
    from gpuinfer.lab.presenter import Page
    from gpuinfer.runtime.run import RunUpdate

FONT = re.compile(r"@font-face\s*\{[^}]*\}\s*")  # that rich would have a browser fetch
ACCENT, FAINT, BAD, GOOD = "cyan", "dim", "red", "green"
TONES = {"plain": "", "strong": "bold", "command": ACCENT, "bad": BAD, "warning": "yellow"}
WARNINGS = ("skipped", "stopped", "unquiet", "the sender", "failed requests")
NOTES = {"verdict": "bold", "command": ACCENT} | dict.fromkeys(WARNINGS, "yellow")
NOTES |= dict.fromkeys(("failed", "wrong answers"), BAD)
STATUS = {"done": GOOD, "partial": "yellow", "failed": BAD}

EXACT_BELOW_S = 10.0  # a short run is worth its decimals
WIDE = 72  # columns inside the panel from which the two charts stand side by side
WIDEST = 112  # a longer bar says nothing more
FIRST = 16  # columns for the names of what is compared
GAP = 4  # columns between the two
ASIDE = 2  # columns left free: the terminal's echo of ^C must not wrap and tear the view


class Display:
    """What people see of a run: progress on standard error, the result on standard output unless a report goes there.

    Only a terminal gets a live view, unless `live` is False. `quiet` leaves the result alone. `brief`: the workload has
    printed its result itself, and the final message is one line. `answers`: the result is what the workload wrote,
    so that `quiet` leaves the panel out too, unless something has failed.
    """

    def __init__(
        self,
        title: str,
        *,
        live: bool | None = None,
        quiet: bool = False,
        brief: bool = False,
        answers: bool = False,
        report_on_stdout: bool = False,
    ) -> None:
        self._title = title
        self._progress = Console(stderr=True)
        self._result = Console(stderr=report_on_stdout)
        self._brief = brief
        self._says_end = not (quiet and (brief or answers))
        self._quiet = quiet or brief
        self._over = False  # nothing more goes on
        wanted = self._progress.is_terminal and live is not False
        screen = Live(console=self._progress, refresh_per_second=8, transient=True, redirect_stdout=False)
        self._live = screen if wanted and not self._quiet else None
        self._pace = live_view.ProgressPace()
        self._lines = live_view.ViewLines()

    def __enter__(self) -> Display:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    def _stop(self) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def update(self, update: RunUpdate) -> None:
        """Show where the run is. Call it a few times a second."""
        self._pace.add(update)
        rates = self._pace.rates()
        if self._live:
            self._live.update(frame(update, rates, self._title, *self._progress.size))
        elif not (self._quiet or self._over) and (line := self._lines.due(update, rates)):
            print(line, file=sys.stderr, flush=True)

    def final(self, report: Mapping[str, Any], trying_s: float | None = None) -> None:
        """Show the result, in the place of the live view. `trying_s` is how long the trial of its advice takes."""
        self._stop()
        self._over = True
        if not self._brief:
            if self._says_end or report["status"] != "done" or report.get("failures"):
                self._result.print(result_panel(report, trying_s))
        elif self._says_end and (line := in_brief(report)):
            self._progress.print(Text(line, style=FAINT))

    @contextlib.contextmanager
    def trying(self, words: str, turns: int) -> Iterator[Callable[[int], None]]:
        """Show that an advice is tried, in so many turns; yields what takes the number of finished turns."""
        if self._quiet or not self._progress.is_terminal:
            if not self._quiet:
                print(f"trying {words} …", file=sys.stderr, flush=True)
            yield lambda done: None
            return
        with self._progress.status(Text(f"trying {words}")) as status:
            yield lambda done: status.update(
                Text.assemble(f"trying {words} ", (f"· turn {done + 1} of {turns}", FAINT))
            )

    def tried(self, report: Mapping[str, Any]) -> None:
        """What the trial brought, below the run's panel."""
        self._result.print(
            _panel(tried_rows(report["bottleneck"]), Text.assemble(("gpuinfer", f"bold {ACCENT}"), " advice"))
        )


@contextlib.contextmanager
def progress_bar(label: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """A bar on standard error while the body runs, in a notebook below its cell; yields what takes one more `done`."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    began = time.monotonic()
    # In a notebook without ipywidgets rich would print a warning in the place of a bar: there it is a line at the end.
    console = Console(stderr=True, force_jupyter=None if importlib.util.find_spec("ipywidgets") else False)
    with Progress(*columns, console=console, refresh_per_second=8) as progress:
        task, done = progress.add_task(label, total=total, rate=""), 0

        def advance(more: int = 1) -> None:
            nonlocal done
            done += more
            rate = done / max(time.monotonic() - began, 1e-9)
            progress.update(task, completed=done, rate=f"{number(rate)}/s")

        yield advance


def frame(update: RunUpdate, rates: Mapping[str, float], title: str, width: int, height: int) -> RenderableType:
    """The live view for a terminal of `width` columns and `height` lines."""
    width = min(width - ASIDE, WIDEST)
    inside = width - 4
    body: list[RenderableType]
    if live_view.preparing(update):
        body = [Text(f"{live_view.note_of(update) or 'preparing'} …", style=ACCENT)]
    else:
        done, total = update.progress.done, update.progress.total
        share = f"{done / total:.0%}" if total else ""
        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(justify="right", no_wrap=True)
        completed = ProgressBar(
            total=total or 1, completed=done if total else 0, complete_style=ACCENT, finished_style=GOOD
        )
        remark = "  ".join(filter(None, [share, live_view.left_of(update, brief=inside < WIDE)]))
        line.add_row(Text(live_view.done_of(update)), completed, Text(remark, style=FAINT))
        parts = []
        for text in live_view.rates_of(rates) or ["measuring …"]:
            value, unit = live_view.value_and_unit(text)
            parts.append(Text.assemble((value, "bold"), " ", (unit, FAINT)))
        gap = next(
            (gap for gap in ((6, 4, 2) if inside >= WIDE else (2,)) if _joined(parts, gap).cell_len <= inside), 2
        )
        while len(parts) > 1 and _joined(parts, gap).cell_len > inside:
            parts.pop()
        below = [Text(part) for part in live_view.health_of(update, rates)]
        errors = live_view.errors_of(live_view.with_failed(update.snapshot.errors, update.progress.failed))
        below.append(Text(errors, style=BAD) if errors else Text("no errors"))
        if note := live_view.note_of(update):
            below.append(Text(note, style=ACCENT))
        body = [
            line,
            Text(),
            _joined(parts, gap),
            Text(),
            *_nodes(update, inside, height),
            _charts(update, inside, height),
            Text(),
            Text(" · ", style=FAINT, no_wrap=True, overflow="ellipsis").join(below),
        ]
    clock = Text(duration(update.elapsed_s or update.setup_s), style=FAINT)
    return Panel(
        Group(*body),
        title=Text.assemble(("gpuinfer", f"bold {ACCENT}"), f" {title}"),
        title_align="left",
        subtitle=clock,
        subtitle_align="right",
        border_style=FAINT,
        width=width,
    )


def result_panel(report: Mapping[str, Any], trying_s: float | None = None) -> RenderableType:
    """The final panel of a `gpuinfer.report/1`."""
    status = str(report.get("status", ""))
    wall_s = report.get("wall_s") or 0.0
    took = f" in {duration(wall_s) if wall_s >= EXACT_BELOW_S else short(wall_s)}"
    name = f" {report.get('workload', '')} "
    title = Text.assemble(("gpuinfer", f"bold {ACCENT}"), name, (status, STATUS.get(status, "")), took)
    return _panel(summary_rows(report, trying_s), title)


def _panel(rows: Iterable[PanelRow], title: Text) -> Panel:
    table = Table.grid(padding=(0, 2))
    table.add_column(style=FAINT, no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(Text(row.name), Text(row.text, style=TONES[row.tone]))
    return Panel(table, title=title, title_align="left", border_style=FAINT)


def facts(title: str, rows: Sequence[Sequence[str]]) -> None:
    """Print a small table on standard output: a name, a value, a remark."""
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(style=FAINT, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    Console().print(Text(title, style=f"bold {ACCENT}"), table, "", sep="\n")


def comparison(
    title: str,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    notes: Sequence[tuple[str, str]],
    *,
    on_stderr: bool = False,
) -> None:
    """Print a table with a row for each thing compared, and below it what there is to say."""
    table = Table(box=box.SIMPLE_HEAD, header_style=FAINT, pad_edge=False, collapse_padding=True)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", min_width=0 if index else FIRST)
    for row in rows:
        table.add_row(*map(Text, row))
    below = Table.grid(padding=(0, 2))
    below.add_column(style=FAINT, no_wrap=True)
    below.add_column(overflow="fold")
    for name, text in notes:
        below.add_row(Text(name), Text(text, style=NOTES.get(name, "")))
    Console(stderr=on_stderr).print(Text(title, style=f"bold {ACCENT}"), table, below, "", sep="\n")


def show_page(page: Page, title: str = "", *, on_stderr: bool = False) -> None:
    """Print a result's table with its notes, under the page's title or another."""
    table = page.brief or page.table
    comparison(title or page.title, table.columns, table.rows, page.notes, on_stderr=on_stderr)


def svg(renderable: RenderableType, title: str, width: int = 80) -> str:
    """What the screen would show, as a picture for a page, in the reader's own fonts: it asks no other host for one."""
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(renderable)
    return FONT.sub("", console.export_svg(title=title))


def _joined(parts: Sequence[Text], gap: int) -> Text:
    return Text(" " * gap, no_wrap=True, overflow="ellipsis").join(parts)


def _nodes(update: RunUpdate, width: int, height: int) -> Iterator[RenderableType]:
    """A table of the nodes, as many as fit into half of the height; nothing of a run without nodes."""
    found = live_view.nodes_of(update)
    if not found or not found["nodes"]:
        return
    nodes = node_table(found, _node_lines(update, height), width)
    table = Table.grid(padding=(0, 2, 0, 0))
    for index in range(len(nodes.columns)):
        last = index == len(nodes.columns) - 1
        table.add_column(
            justify="left" if index < 2 or last else "right",
            no_wrap=True,
            overflow="ellipsis",
            ratio=1 if last else None,
        )
    table.add_row(*(Text(name, style=FAINT) for name in nodes.columns))
    for cells, bad in zip(nodes.rows, nodes.bad, strict=True):
        table.add_row(*(Text(cell, style=BAD if bad else "") for cell in cells))
    yield table
    yield Text(nodes.remark, style=FAINT, no_wrap=True, overflow="ellipsis")
    yield Text()


def _node_lines(update: RunUpdate, height: int) -> int:
    """Lines for nodes; 0 where there are none."""
    found = live_view.nodes_of(update)
    return min(len(found["nodes"]), max(3, height // 2 - 5)) if found else 0


def _charts(update: RunUpdate, width: int, height: int) -> RenderableType:
    side_by_side = width >= WIDE
    if nodes := _node_lines(update, height):
        height -= nodes + 3
    rows = max(1, min(10, height - 10 if side_by_side else (height - 11) // 2))
    time = live_view.time_chart(update, rows)
    if not update.snapshot.batches:  # the workload brings its own answers, or nothing was asked yet
        return _chart(time, width)
    batches = live_view.batch_chart(update.snapshot, rows)
    if not side_by_side:
        return Group(_chart(batches, width), _chart(time, width))
    half = (width - GAP) // 2
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_row(_chart(batches, half), _chart(time, half))
    return grid


def _chart(chart: live_view.Chart, width: int) -> RenderableType:
    label = max((len(name) for name, _, _ in chart.bars), default=0)
    room = max(4, width - label - len("  100%"))
    lines = [Text.assemble((chart.title, "bold"), "  ", (chart.remark, FAINT))]
    for name, share, value in chart.bars:
        colour = FAINT if name in live_view.NOT_OURS else ACCENT
        lines.append(Text.assemble((name.rjust(label), FAINT), " ", (bar(share, room), colour), f" {value:>4}"))
    return Text("\n", no_wrap=True, overflow="crop").join(lines)
