"""The plots of servers under load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpuinfer.report.plotting import COLOURS
from gpuinfer.units import number, short

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Document = Mapping[str, Any]


def percentiles(axes: Axes, document: Document, name: str) -> None:
    """Latency over percentile, a line for each way: how bad the worst are, which a median hides."""
    from matplotlib.ticker import LogLocator

    for place, way in enumerate(document["serve"]["ways"]):
        curve = way["curves"][name]
        if curve:
            at = [100 * step / (len(curve) - 1) for step in range(len(curve))]
            axes.plot(at, curve, color=COLOURS[place % len(COLOURS)], label=way["name"], linewidth=1.8)
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.set_xlim(0, 100)
    axes.set_xlabel("percentile of the requests")
    axes.yaxis.set_major_formatter(lambda value, _: short(value))
    axes.yaxis.set_minor_formatter(lambda value, _: "")
    axes.grid(axis="y", alpha=0.3)
    axes.legend(ncols=4, loc="lower left", bbox_to_anchor=(0, 1), frameon=False, fontsize=8)


def scaling(axes: Axes, document: Document) -> None:
    """Speed over replicas beside that of the first times their number. Both axes in doublings."""
    found = document["serve"]["scaling"]
    replicas = [one["replicas"] for one in found]
    ideal = [found[0]["median"] * one / replicas[0] for one in replicas]
    axes.plot(replicas, ideal, "--", color="#999999", label="the first, times the replicas")
    axes.plot(replicas, [one["median"] for one in found], "o-", color=COLOURS[0], label="measured")
    for one in found:
        axes.annotate(
            f"{one['efficiency']:.0%}", (one["replicas"], one["median"]), (4, -12), textcoords="offset points"
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(replicas, [str(one) for one in replicas])
    axes.set_xlabel("replicas")
    axes.yaxis.set_major_formatter(lambda value, _: number(value))
    axes.legend(loc="upper left", frameon=False, fontsize=8)
