"""The forward lanes of a backend, and which of those that are free gets the next batch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence

from gpuinfer.api import Limits
from gpuinfer.stats import Lane

FADE = 0.99  # a device that is 3 times slower is tried again after 110 batches, where there is a choice


def forward_lanes(limits: Limits, clock: Callable[[], float], *, admits: bool = False) -> list[Lane]:
    """ "forward 0", … for each batch in flight, or "forward cuda:1 0", … where there are several devices.

    A backend that admits rows to slots has one a device, which no batch takes.
    """
    if not limits.devices:
        return [Lane(f"forward {number}", clock=clock) for number in range(1 if admits else limits.in_flight)]
    seen: Counter[str] = Counter()
    lanes = []
    for device in limits.devices:
        lanes.append(Lane(f"forward {device} {seen[device]}", clock=clock, device=device))
        seen[device] += 1
    return lanes


class BatchPace:
    """How long batches took lately, by size: within a factor of two of rows they are alike."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def took(self, rows: int, seconds: float) -> None:
        size = rows.bit_length()
        self._seconds[size] = 0.75 * self._seconds.get(size, seconds) + 0.25 * seconds

    def seconds(self, rows: int, unknown: float = math.inf) -> float:
        """What a batch of so many rows is expected to take; `unknown` before the first."""
        return self._seconds.get(rows.bit_length(), unknown)

    def fade(self, rows: int) -> None:
        """Expect a little less of a device that was not tried: it may have been slow for once, as a first batch is."""
        size = rows.bit_length()
        if size in self._seconds:
            self._seconds[size] *= FADE


class FreeLanes:
    """Lanes without a batch. The lane that was used last goes first; of several devices, the one that is expected to
    finish first. Under overload only one lane is free at a time: then there is no choice.
    """

    def __init__(self, lanes: Sequence[Lane]) -> None:
        self._free = list(lanes[::-1])
        self._several = any(lane.device for lane in lanes)
        self._paces = {lane.device: BatchPace() for lane in lanes}
        self._at_work: Counter[str] = Counter()  # batches, by device

    def __len__(self) -> int:
        return len(self._free)

    def take(self, rows: int) -> Lane:
        """A lane for a batch of so many rows. There must be one."""
        if not self._several:
            return self._free.pop()
        # a device that has not been tried takes no time, and so is tried
        lane = min(
            reversed(self._free),
            key=lambda one: self._paces[one.device].seconds(rows, 0.0) * (1 + self._at_work[one.device]),
        )
        self._free.remove(lane)
        self._at_work[lane.device] += 1
        for other in {one.device for one in self._free} - {lane.device}:
            self._paces[other].fade(rows)
        return lane

    def took(self, lane: Lane, rows: int, seconds: float) -> None:
        if self._several:
            self._paces[lane.device].took(rows, seconds)

    def put(self, lane: Lane) -> None:
        self._at_work[lane.device] -= self._several
        self._free.append(lane)
