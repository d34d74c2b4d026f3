"""The loss of a training, step by step: rows of JSON lines, read back, and drawn.

A row has `step` (how many were done, from 1) and the means since the row before it: `loss`, its parts as `loss_policy`,
`gradient_norm`, and the `learning_rate` of the last of those steps. A row of a validation has `step`, `validation` and
its parts instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gpuinfer.report import plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NAME, PICTURE = "loss.jsonl", "loss.svg"
ALT = "loss by step, and on the positions kept apart"
SIZE = 8.0, 4.0  # inches
MOST_POINTS = 2000  # of a line: a picture shows no more
SMOOTHED = 50  # parts of the line: each point of the smooth one is the mean of one part's width before it
FAINT, PART = 0.3, "loss_"

Row = Mapping[str, float]


def read(path: Path) -> list[Row]:
    """The rows of a file, but for a last one that a killed run has not written whole; none where there is no file."""
    try:
        lines = path.read_bytes().splitlines()
    except OSError:
        return []
    return list(_rows(lines))


def _rows(lines: Sequence[bytes]) -> Iterator[Row]:
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield row


def plot(rows: Sequence[Row]) -> Figure:
    """The loss and its parts by step; what they were on positions kept apart as dots."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE, layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    names = dict.fromkeys(name for row in rows for name in row if name == "loss" or name.startswith(PART))
    for place, name in enumerate(names):
        colour = plotting.COLOURS[place % len(plotting.COLOURS)]
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        draw(axes, points, colour, name.removeprefix(PART))
        apart = name.replace("loss", "validation", 1)
        validated = [(row["step"], row[apart]) for row in rows if row.get(apart) is not None]
        axes.plot([at for at, _ in validated], [value for _, value in validated], "o", color=colour, markersize=4)
    axes.set_xlabel("step; dots: on the positions kept apart")
    axes.legend(ncols=max(1, len(names)), loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)
    return figure


def draw(axes: Axes, points: Sequence[tuple[float, float]], colour: str, label: str | None = None) -> None:
    """A faint line of all points, and a line of what they are on the whole."""
    few = list(_thinned(points))
    width = max(1, len(few) // SMOOTHED)
    smooth = [
        (at, sum(value for _, value in before) / len(before))
        for place, (at, _) in enumerate(few)
        if (before := few[max(0, place + 1 - width) : place + 1])
    ]
    axes.plot([at for at, _ in few], [value for _, value in few], color=colour, alpha=FAINT, linewidth=0.8)
    axes.plot([at for at, _ in smooth], [value for _, value in smooth], color=colour, linewidth=1.5, label=label)


def _thinned(points: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """So few that a picture can show them: means of neighbours, each where the last of them is."""
    together = -(-len(points) // MOST_POINTS)
    for start in range(0, len(points), together or 1):
        part = points[start : start + together]
        yield part[-1][0], sum(value for _, value in part) / len(part)
