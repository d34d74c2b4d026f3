"""What one engine counts as it goes, for its snapshots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from gpuinfer.api import Priority, Request, Result
from gpuinfer.engine.scheduler import Cut
from gpuinfer.generation import Generation
from gpuinfer.stats import ERRORS, ClassCount, Histogram, Lane, Snapshot, merge_histograms


class Tally:
    """Running counters. Every request ends in exactly one of: answered, or one of `stats.ERRORS`."""

    def __init__(self) -> None:
        self._classes = [ClassCount() for _ in Priority]
        self._batches: Counter[int] = Counter()
        self._batch_s: dict[int, list[float]] = {}
        self._reasons: Counter[str] = Counter()
        self._failure = ""
        self._first_token, self._between_tokens = Histogram(), Histogram()

    def cut(self, batch: Cut, now: float, *, a_batch: bool = True) -> None:
        """Count why these requests are sent to the backend, how long they have waited, and the batch, if it is one."""
        if a_batch:
            self._batches[batch.rows] += 1
        self._reasons[batch.reason.value] += 1
        for request in batch.requests:
            self._classes[request.priority].queue_wait.add(now - request.arrived)

    def ran(self, rows: int, seconds: float) -> None:
        """Count one batch of so many rows that the backend has answered, and the seconds that it took."""
        spent = self._batch_s.setdefault(rows, [0, 0.0])
        spent[0] += 1
        spent[1] += seconds

    def stepped(self, rows: int, seconds: float) -> None:
        """Count one forward step of a backend with slots: its batches, whatever was admitted when."""
        self._batches[rows] += 1
        self.ran(rows, seconds)

    def answered(self, request: Request, now: float, result: Result = None) -> None:
        count = self._classes[request.priority]
        count.requests += 1
        count.rows += request.rows
        count.latency.add(now - request.arrived)
        if isinstance(result, Generation):
            # from the request to the first token, and from one to the next, by the generator's own times (of its slot),
            # which cost nothing: a backend that does not tell them is not measured
            tokens = max((len(one.tokens) for one in result.completions), default=0)
            after_the_first = result.seconds - result.first_token_s
            if tokens and result.seconds:
                self._first_token.add(now - request.arrived - after_the_first)
            if tokens > 1 and result.seconds:
                self._between_tokens.add(after_the_first / (tokens - 1))

    def error(self, kind: str, priority: Priority, detail: object = "") -> None:
        """Count one request that got no result; `kind` is one of `stats.ERRORS`, `detail` the error."""
        self._classes[priority].errors[kind] += 1
        if kind == "failed" and not self._failure:
            self._failure = str(detail)

    def snapshot(self, waiting: int, lanes: Sequence[Lane], notices: Sequence[str] = (), slots: int = 0) -> Snapshot:
        counts = {priority.name.lower(): self._classes[priority] for priority in Priority}
        seen = {name: count.to_wire() for name, count in counts.items() if count.seen}
        return Snapshot(
            requests=sum(count.requests for count in self._classes),
            rows=sum(count.rows for count in self._classes),
            batches=dict(self._batches),
            batch_s={rows: list(spent) for rows, spent in self._batch_s.items()},
            reasons=dict(self._reasons),
            latency=merge_histograms(wire["latency"] for wire in seen.values()),
            queue_wait=merge_histograms(wire["queue_wait"] for wire in seen.values()),
            errors={kind: sum(count.errors[kind] for count in self._classes) for kind in ERRORS},
            failure=self._failure,
            first_token=self._first_token.to_wire(),
            between_tokens=self._between_tokens.to_wire(),
            classes=seen,
            notices=tuple(notices),
            waiting=waiting,
            slots=slots,
            lanes=tuple(lane.to_wire() for lane in lanes),
        )
