"""What came of a simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from gpuinfer.stats import Snapshot, mean_size, summarise


@dataclass(frozen=True)
class Outcome:
    """All that was counted after the warm-up. Rates are of the time until the last arrival, so that the end, when
    nothing comes any more, does not dilute them; latencies are of all requests.
    """

    snapshot: Snapshot  # of all replicas
    replicas: Sequence[Snapshot]
    seconds: float  # of simulated time that was counted, until the last arrival
    offered_requests: int
    offered_rows_per_s: float
    served_rows_per_s: float
    served_requests_per_s: float
    utilisation: float  # share of the time that the lanes spent on batches
    capacity_rows_per_s: float  # of all replicas, at the best batch size
    notices: Sequence[str] = ()  # what is to be said about it, once each

    @cached_property
    def latency_s(self) -> dict[str, float]:
        """`{mean, p50, p95, p99, max}` from arrival to answer; empty when nothing was answered."""
        return summarise(self.snapshot.latency)

    @cached_property
    def queue_wait_s(self) -> dict[str, float]:
        """The same from arrival to batch."""
        return summarise(self.snapshot.queue_wait)

    @property
    def served_share(self) -> float:
        """Of the requests that were settled, those that were answered; 1 when there were none."""
        lost = sum(self.snapshot.errors.values())
        return self.snapshot.requests / (self.snapshot.requests + lost) if lost else 1.0

    @property
    def mean_batch_rows(self) -> float:
        """0 when no batch ran."""
        return mean_size(self.snapshot.batches)

    @property
    def max_batch_rows(self) -> int:
        return max(self.snapshot.batches, default=0)
