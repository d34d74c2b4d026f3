"""A loop for people: `loop.md`, one page that needs no network (`loop.html`), and the plot of both (`loop.svg`).

The loss of each step of all trainings is in `loss.jsonl`: rows as `report/loss_curve.py` has them, with `iteration`.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

import msgspec

from gpuinfer.errors import WorkError
from gpuinfer.host.files import put_whole
from gpuinfer.loop import story
from gpuinfer.loop.plan import Plan
from gpuinfer.loop.story import Document
from gpuinfer.report import loss_curve, plotting
from gpuinfer.report.strength import in_elo

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TITLE = "gpuinfer loop"
ALT = "Elo over the first generation, and the loss, by iteration"
SIZE = 8.0, 4.6  # inches
STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem }
html { color: #222; background: #fff } h1 { line-height: 1.2 } img { max-width: 100% }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; display: block; overflow-x: auto }
th, td { padding: .3rem .8rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap }
th { color: #777; font-weight: normal } pre { background: #f4f4f4; padding: .6rem; overflow-x: auto }
.verdict { font-size: 1.15rem; font-weight: 600 }
"""


def write(plan: Plan, told: Document) -> None:
    """Put `loop.json`, `loop.md`, `loop.html`, `loop.svg` and `loss.jsonl` into the plan's folder. Raises `WorkError`
    when one cannot be.
    """
    folder, curves = plan.folder, {at: loss_curve.read(plan.curve(at)) for at in range(1, plan.iterations + 1)}
    picture = plotting.image(plot(told, curves), "svg")
    rows = [{"iteration": at, **row} for at, curve in curves.items() for row in curve]
    texts = {
        loss_curve.NAME: b"".join(msgspec.json.encode(row) + b"\n" for row in rows),
        "loop.json": json.dumps(told, indent=2, ensure_ascii=False).encode() + b"\n",
        "loop.md": markdown(told).encode(),
        "loop.html": page(told, picture).encode(),
        "loop.svg": picture,
    }
    for name, content in texts.items():
        try:
            put_whole(folder / name, lambda file, content=content: file.write(content))  # type: ignore[misc]
        except OSError as error:
            raise WorkError(f"{folder / name} cannot be written: {error.strerror}. Make room there.") from error


def markdown(told: Document) -> str:
    """The verdict, the table, and a link to the plot that lies beside it."""
    lines = [f"# {TITLE}", "", story.verdict(told), "", f"    {told['command']}", ""]
    columns = story.columns(told)
    lines += [_line(columns), _line(["---:"] * len(columns)), *map(_line, story.rows(told)), ""]
    return "\n".join([*lines, f"![{ALT}](loop.svg)", ""])


def page(told: Document, picture: bytes) -> str:
    """One HTML file with everything in it."""
    data = base64.b64encode(picture).decode("ascii")
    table = "".join(f"\n<tr>{''.join(f'<td>{escape(cell)}' for cell in row)}" for row in story.rows(told))
    return (
        f'<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>{TITLE}</title>\n'
        f'<meta name="viewport" content="width=device-width">\n<style>{STYLE}</style>\n<h1>{TITLE}</h1>\n'
        f'<p class="verdict">{escape(story.verdict(told))}</p>\n<pre>{escape(told["command"])}</pre>\n'
        f'<img alt="{ALT}" src="data:image/svg+xml;base64,{data}">\n'
        f"<table><tr>{''.join(f'<th>{escape(column)}' for column in story.columns(told))}{table}\n</table>\n</html>\n"
    )


def plot(told: Document, curves: Mapping[int, Sequence[loss_curve.Row]]) -> Figure:
    """Elo with its interval above, the loss below: of each step as a line, at the end of each iteration as a dot."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=SIZE, layout="constrained")
    above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
    _strength(above, told)
    trained = [(one["iteration"], one["loss"]) for one in told["iterations"] if one["loss"] is not None]
    steps = [
        (iteration - 1 + row["step"] / curve[-1]["step"], row["loss"])
        for iteration, curve in curves.items()
        for row in curve
        if row.get("loss") is not None
    ]
    loss_curve.draw(below, steps, plotting.COLOURS[1])
    below.plot([at for at, _ in trained], [loss for _, loss in trained], "o", color=plotting.COLOURS[1], markersize=4)
    below.set_ylabel("loss")
    below.set_xlabel("iteration")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def _strength(axes: Axes, told: Document) -> None:
    """A dot a match, its interval a whisker; one without a bound is drawn to where it is known, with an arrow."""
    colour = plotting.COLOURS[0]
    axes.axhline(0, color="#999999", linewidth=1, linestyle=":")
    dots: list[tuple[int, float]] = [(0, 0.0)]
    for one in told["iterations"]:
        if (strength := one["strength"]) is None:
            continue
        low, high = strength["elo_ci95"]
        ends = [end for end in (low, high) if end is not None]
        at, elo = one["iteration"], strength["elo"]
        elo = elo if elo is not None else ends[0] if ends else 0.0
        dots.append((at, elo))
        axes.plot([at, at], [low if low is not None else elo, high if high is not None else elo], color=colour)
        if strength["elo"] is None:
            axes.plot([at], [elo], "^" if strength["score"] else "v", color=colour, markersize=9)
        axes.annotate(in_elo(strength), (at, elo), textcoords="offset points", xytext=(0, 9), ha="right", fontsize=7)
    axes.plot([at for at, _ in dots], [elo for _, elo in dots], "o-", color=colour, markersize=4, alpha=0.8)
    axes.set_ylabel("Elo over the first generation,\n95 % interval")


def _line(cells: Any) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
