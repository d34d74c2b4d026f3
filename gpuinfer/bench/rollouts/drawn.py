"""The plot of a trainer's steps: the jump where the buffer runs dry, and the depth that cures it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpuinfer.bench.rollouts.cases import way_of
from gpuinfer.report.plotting import COLOURS
from gpuinfer.units import short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]


def steps(axes: Axes, document: Document) -> None:
    """Seconds of each step but the first, which fills the buffer, a line for each depth; what of it the trainer itself
    took is the dashed line.
    """
    from matplotlib.ticker import MaxNLocator

    found = document["rollouts"]["steps"]
    for place, one in enumerate(found):
        lasted = one["wall_s"][1:]
        axes.plot(
            range(2, len(lasted) + 2),
            lasted,
            "o-",
            color=COLOURS[place % len(COLOURS)],
            label=way_of(one["way"]),
            markersize=4,
        )
    trained = [seconds for one in found for seconds in one["train_s"]]
    axes.axhline(
        sum(trained) / max(1, len(trained)), color="#999999", linestyle="--", linewidth=1, label="the trainer alone"
    )
    axes.set_ylim(bottom=0)
    axes.set_xlabel("step of the trainer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("a step lasts")
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.legend(ncols=5, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)
