"""Shared parts of plots: colours for everybody's eyes, figures as the same bytes each time; and the loss of a training,
read and drawn.

A row of `loss.jsonl` has `step` (how many were done, from 1) and the means since the row before it: `loss`, its parts
as `loss_policy`, `gradient_norm`, and the `learning_rate` of the last of those steps. A row of a validation has `step`,
`validation` and its parts instead.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# A palette that the colour-blind can read (Okabe and Ito, "Color universal design", 2008).
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00", "#56b4e9", "#f0e442", "#000000")


def image(figure: Figure, kind: str) -> bytes:
    """The figure as `png` or `svg`, the same bytes for the same figure."""
    import matplotlib as mpl

    buffer = io.BytesIO()
    with mpl.rc_context({"svg.hashsalt": "gpuinfer", "svg.fonttype": "none"}):
        figure.savefig(buffer, format=kind, dpi=144, metadata={"Date": None} if kind == "svg" else None)
    return buffer.getvalue()


LOSS_FILE, LOSS_PICTURE = "loss.jsonl", "loss.svg"
LOSS_ALT = "loss by step, and on the positions kept apart"
LOSS_SIZE = 8.0, 4.0  # inches
MOST_POINTS = 2000  # of a line: a picture shows no more
SMOOTHED = 50  # parts of the line: each point of the smooth one is the mean of one part's width before it
FAINT, PART = 0.3, "loss_"

LossRow = Mapping[str, float]


def read_losses(path: Path) -> list[LossRow]:
    """The rows of a file, without an incomplete last one; none if there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    rows: list[LossRow] = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = json.loads(line)
            if isinstance(row, dict) and isinstance(row.get("step"), int):
                rows.append(row)
    return rows


def plot_losses(rows: Sequence[LossRow]) -> Figure:
    """Plot the loss and its parts by step; validation losses as dots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=LOSS_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    names = dict.fromkeys(name for row in rows for name in row if name == "loss" or name.startswith(PART))
    for place, name in enumerate(names):
        colour = COLOURS[place % len(COLOURS)]
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        draw_losses(axes, points, colour, name.removeprefix(PART))
        apart = name.replace("loss", "validation", 1)
        validated = [(row["step"], row[apart]) for row in rows if row.get(apart) is not None]
        axes.plot([at for at, _ in validated], [value for _, value in validated], "o", color=colour, markersize=4)
    axes.set_xlabel("step; dots: on the positions kept apart")
    axes.legend(ncols=max(1, len(names)), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)
    return figure


def draw_losses(axes: Axes, points: Sequence[tuple[float, float]], colour: str, label: str | None = None) -> None:
    """Draw a faint line of all points, thinned out to what a picture can show, and a smoothed line. Of neighbours it
    shows means, each at the last one's step.
    """
    together = max(1, -(-len(points) // MOST_POINTS))
    parts = [points[start : start + together] for start in range(0, len(points), together)]
    few = [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
    width = max(1, len(few) // SMOOTHED)
    smooth = [
        (at, sum(value for _, value in before) / len(before))
        for place, (at, _) in enumerate(few)
        if (before := few[max(0, place + 1 - width) : place + 1])
    ]
    axes.plot([at for at, _ in few], [value for _, value in few], color=colour, alpha=FAINT, linewidth=0.8)
    axes.plot([at for at, _ in smooth], [value for _, value in smooth], color=colour, linewidth=1.5, label=label)
