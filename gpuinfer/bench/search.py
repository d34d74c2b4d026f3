"""A bracketed search for good settings, by a few noisy measurements.

One setting after the other (Hooke and Jeeves, "Direct search", 1961), each on a ladder of doublings: upwards while it
pays, else downwards while it pays, until the best rung has a worse one on either side (bracketing: Press et al.,
"Numerical Recipes", 3rd edition, 2007, section 10.1). That finds the best where speed has a single peak along each
ladder, which is so for batches, workers and games in flight: too few starve the model, too many leave the caches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

WORTH = 1.03  # a gain below this is noise, and the smaller or the default setting stays

Point = Mapping[str, str]
"""Settings by axis; an axis that is not named has the default."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting: its rungs in ascending order, and the rung that its default stands nearest to."""

    name: str
    rungs: Sequence[str]
    start: int


def ladder(name: str, least: int, most: int, start: int) -> Axis:
    """Doublings from `least` up, the last one `most`; it starts at the rung nearest to `start` by ratio."""
    rungs = [least]
    while rungs[-1] * 2 < most:
        rungs.append(rungs[-1] * 2)
    if most > rungs[-1]:
        rungs.append(most)
    nearest = min(range(len(rungs)), key=lambda index: max(rungs[index] / start, start / rungs[index]))
    return Axis(name, [str(rung) for rung in rungs], nearest)


def climb(point: Point, axes: Sequence[Axis], rate: Callable[[Point], float | None]) -> Point:
    """The best point found from `point` on. `rate` measures one; None: it cannot run, or there is no time left."""
    top = rate(point)
    if top is None:
        return point
    for axis in axes:
        point, top = along(axis, point, top, rate)
    return point


def along(axis: Axis, point: Point, top: float, rate: Callable[[Point], float | None]) -> tuple[Point, float]:
    """The best point on one ladder, and its rate. The default counts as the rung at which it stands."""
    for step in (1, -1):
        index, moved = axis.start + step, False
        while 0 <= index < len(axis.rungs):
            there = {**point, axis.name: axis.rungs[index]}
            found = rate(there)
            if found is None or found <= WORTH * top:
                break
            point, top, moved, index = there, found, True, index + step
        if moved:
            break
    return point, top
