"""What a change would bring: the run replayed as it was and as it would be, and the two compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gpuinfer.report.evidence import Evidence, Lane, busy_s, place, visits
from gpuinfer.report.laws import Curve, cap, think_s
from gpuinfer.report.replay import System, rows_per_s

FITS = 0.25  # a replay further than this from what was measured predicts nothing
PATIENCE = 8.0  # times what clients take to come back: as long as `dynamic` waits for them, if that pays
DOUBT = 0.1  # of a gain, both ways, however well the replay fits


@dataclass(frozen=True, slots=True)
class Gain:
    """A factor of the throughput. `expected` is None where a range is all that can be said."""

    low: float = 1.0
    high: float = 1.0
    expected: float | None = None

    @classmethod
    def up_to(cls, high: float, otherwise: float = 1.0) -> Gain:
        """Anything from none to `high`; to `otherwise` where that is no number."""
        return cls(1.0, max(1.0, high if math.isfinite(high) else otherwise))


def systems_of(run: Evidence, curve: Curve | None) -> list[System]:
    """The run's queues, each with its workers and lanes; none when too little is known of them."""
    places = dict.fromkeys(place(lane["name"]) for lane in run.forwards)
    blocks = run.blocks_outstanding
    if curve is None or not blocks or round(blocks) < 1 or not run.requests or not run.block_rows:
        return []
    if not run.work:
        each = [think_s(run)] * round(blocks)
        return [_system(run, curve, each, [run.requests / len(each)] * len(each), 1, len(run.forwards))]
    systems = []
    for at in places:
        lanes = [lane for lane in run.work if len(places) == 1 or place(lane["name"]) == at]
        forwards = sum(place(lane["name"]) == at for lane in run.forwards)
        if lanes:
            each, shares = search_times(run, lanes), _shares(run, lanes)
            systems.append(_system(run, curve, each, shares, max(1, round(blocks / len(run.work))), forwards))
    return systems


def search_times(run: Evidence, lanes: Sequence[Lane]) -> list[float]:
    """Seconds of work for one block, for each of these lanes in their order; 0 where nothing was asked."""
    return [busy_s([lane]) / share if share else 0.0 for lane, share in zip(lanes, _shares(run, lanes), strict=True)]


def _shares(run: Evidence, lanes: Sequence[Lane]) -> list[float]:
    """The requests of each lane: as many as its visits, which a lane may count several of for each."""
    counted = sum(visits(lane) for lane in run.work)
    return [run.requests * (visits(lane) / counted if counted else 1 / len(run.work)) for lane in lanes]


def _system(
    run: Evidence, curve: Curve, search_s: Sequence[float], shares: Sequence[float], blocks: int, lanes: int
) -> System:
    wait_s = run.longest_wait_s if run.cut_by("waited") >= 0.5 else 0.0
    back_s, cost_s = statistics.fmean(search_s) * (blocks + 1) / 2, curve.seconds(run.block_rows)
    patience_s = min(cost_s, PATIENCE * back_s) if back_s < cost_s else 0.0
    return System(search_s, shares, blocks, run.block_rows, lanes, curve, cap(run), wait_s, patience_s)


def forecast(
    run: Evidence,
    now: Sequence[System],
    change: Callable[[Sequence[System]], Sequence[System]],
    most: float = math.inf,
    *,
    anchored: bool = True,
) -> Gain:
    """The gain of a change to these systems, at most `most`, and no more than the roofline leaves.

    Anchored, it compares two replays, and promises nothing when the first is far from what was measured. Else it
    compares the second with the measurement: for a change that takes away just what a replay cannot know.
    """
    most = max(1.0, min(most, 1 / run.efficiency if run.efficiency else math.inf))
    before = rows_per_s(now) if anchored or not now else run.rows_per_s
    if not before:
        return Gain.up_to(most)
    expected = max(1.0, min(rows_per_s(change(now)) / before, most))
    off = abs(before / run.rows_per_s - 1)
    if off > FITS:
        return Gain.up_to(most, expected)
    spread = max(DOUBT, off)
    return Gain(max(1.0, expected * (1 - spread)), max(expected, min(expected * (1 + spread), most)), expected)


# Changes


def without_waiting(systems: Sequence[System]) -> list[System]:
    return [replace(system, wait_s=0.0, patience_s=0.0) for system in systems]


def with_cap(systems: Sequence[System], rows: float) -> list[System]:
    return [replace(system, cap=rows) for system in systems]


def with_lanes(systems: Sequence[System], more: int) -> list[System]:
    return [replace(system, lanes=system.lanes + more) for system in systems]


def with_rows(systems: Sequence[System], factor: float, search: float) -> list[System]:
    """Blocks of so many times the rows, as many fewer, each `search` times as long to search for."""
    return [
        replace(
            system,
            rows=system.rows * factor,
            search_s=[seconds * search for seconds in system.search_s],
            shares=[share / factor for share in system.shares],
        )
        for system in systems
    ]


def with_workers(systems: Sequence[System], factor: float) -> list[System]:
    """So many times the workers, each like those there are; each with a queue of its own where they have."""
    if len(systems) > 1:
        count = max(1, round(len(systems) * factor))
        likes = [systems[index % len(systems)] for index in range(count)]
        scale = len(systems) / count
        return [replace(system, shares=[share * scale for share in system.shares]) for system in likes]
    return [_with(system, max(1, round(len(system.search_s) * factor))) for system in systems]


def alike(systems: Sequence[System]) -> list[System]:
    """Every worker as fast as the middle one, with an equal share."""
    middle = statistics.median([seconds for system in systems for seconds in system.search_s])
    share = statistics.fmean([share for system in systems for share in system.shares])
    return [
        replace(system, search_s=[middle] * len(system.search_s), shares=[share] * len(system.shares))
        for system in systems
    ]


def _with(system: System, count: int) -> System:
    share = math.fsum(system.shares) / count
    return replace(system, search_s=[statistics.fmean(system.search_s)] * count, shares=[share] * count)
