"""What one engine counts as it goes, for its snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuinfer.batching.cutting import Cut
from gpuinfer.stats import ERRORS, Histogram, Lane, Snapshot


class Tally:
    """Running counters. Every request ends in exactly one of: answered, or one of `stats.ERRORS`."""

    __slots__ = ("_batch_s", "_batches", "_errors", "_latency", "_queue_wait", "_reasons", "_requests", "_rows")

    def __init__(self) -> None:
        self._requests = self._rows = 0
        self._errors = dict.fromkeys(ERRORS, 0)
        self._batches: Counter[int] = Counter()
        self._batch_s: dict[int, list[float]] = {}
        self._reasons: Counter[str] = Counter()
        self._latency, self._queue_wait = Histogram(), Histogram()

    def cut(self, batch: Cut, now: float) -> None:
        self._batches[batch.rows] += 1
        self._reasons[batch.reason.value] += 1
        for request in batch.requests:
            self._queue_wait.add(now - request.arrived)

    def ran(self, rows: int, seconds: float) -> None:
        """Count one batch of so many rows that the backend has answered, and the seconds that it took."""
        spent = self._batch_s.setdefault(rows, [0, 0.0])
        spent[0] += 1
        spent[1] += seconds

    def answered(self, rows: int, latency_s: float) -> None:
        self._requests += 1
        self._rows += rows
        self._latency.add(latency_s)

    def error(self, kind: str) -> None:
        """Count one request that got no result; `kind` is one of `stats.ERRORS`."""
        self._errors[kind] += 1

    def snapshot(self, waiting: int, lanes: Sequence[Lane]) -> Snapshot:
        return Snapshot(
            requests=self._requests,
            rows=self._rows,
            batches=dict(self._batches),
            batch_s={rows: list(spent) for rows, spent in self._batch_s.items()},
            reasons=dict(self._reasons),
            latency=self._latency.to_wire(),
            queue_wait=self._queue_wait.to_wire(),
            errors=dict(self._errors),
            waiting=waiting,
            lanes=tuple(lane.to_wire() for lane in lanes),
        )
