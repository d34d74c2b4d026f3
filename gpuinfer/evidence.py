"""One run in numbers, as the verdict looks at it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.api import Roofline

SMALL_BATCH = 0.75  # of the roofline's batch


@dataclass(frozen=True, slots=True)
class Evidence:
    """One run in numbers. `lanes` are `{name, stations}`; those named "forward …" serve batches, the others work."""

    wall_s: float = 0.0
    lanes: Sequence[Mapping[str, Any]] = ()
    rows_per_s: float = 0.0
    rows_mean: float = 0.0  # of a batch
    reasons: Mapping[str, int] = field(default_factory=dict)
    latency_s: float = 0.0  # mean, submit → result
    queue_wait_s: float = 0.0  # mean
    roofline: Roofline | None = None
    facts: Mapping[str, float] = field(default_factory=dict)  # what the workload says of itself: `Progress.facts`
    total: int | None = None  # of the work that this run began with: `Progress.total` without what was done before
    cores: int = 1
    on_cpu: bool = True
    dtype: str = "float32"
    command: str = "gpuinfer"

    @property
    def efficiency(self) -> float:
        return self.rows_per_s / self.roofline.rows_per_s if self.roofline else 0.0

    @property
    def forwards(self) -> list[Mapping[str, Any]]:
        return [lane for lane in self.lanes if is_forward(lane["name"])]

    @property
    def work(self) -> list[Mapping[str, Any]]:
        return [lane for lane in self.lanes if not (is_forward(lane["name"]) or is_aside(lane["name"]))]

    @property
    def threads_busy(self) -> float:
        """How many threads were at work at once, on average."""
        each = self.facts.get("threads", 1)
        return (busy_s(self.forwards) * (each - 1) + busy_s(self.lanes)) / self.wall_s

    def share(self, station: str) -> float:
        """The station's share of all lanes' time."""
        return station_s(self.lanes, station) / (self.wall_s * len(self.lanes))

    def busy(self, lanes: Sequence[Mapping[str, Any]]) -> float:
        """The share of these lanes' time in which they were not idle."""
        return busy_s(lanes) / (self.wall_s * len(lanes)) if lanes else 0.0

    def cut_by(self, *reasons: str) -> float:
        """The share of batches that were cut for one of these reasons."""
        return sum(self.reasons.get(reason, 0) for reason in reasons) / max(1, sum(self.reasons.values()))

    @property
    def batches_small(self) -> bool:
        return self.roofline is not None and 0 < self.rows_mean < SMALL_BATCH * self.roofline.at_rows


def is_forward(name: str) -> bool:
    """Whether a lane of this name serves batches: "forward 0", or "worker 1: forward 0"."""
    return name.rpartition(": ")[2].startswith("forward")


def is_aside(name: str) -> bool:
    """Whether a lane of this name only writes down what the work brings, and holds nothing up by being idle."""
    return name.rpartition(": ")[2].startswith("records")


def station_s(lanes: Sequence[Mapping[str, Any]], station: str) -> float:
    return math.fsum(lane["stations"].get(station, 0.0) for lane in lanes)


def busy_s(lanes: Sequence[Mapping[str, Any]]) -> float:
    return math.fsum(seconds for lane in lanes for name, seconds in lane["stations"].items() if name != "idle")
