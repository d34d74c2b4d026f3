"""Cut when the batch is full, when no client is left to wait for, or when waiting costs more than it saves."""

from __future__ import annotations

import math

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import BatchRecord, QueueView, Reason, Request, Strategy
from gpuinfer.strategies.priority import oldest_first
from gpuinfer.strategies.timing import CutTiming


class Dynamic(Strategy):
    """Dynamic batching. Without options it waits only for those that come soon, and only while that pays."""

    class Options(api.Options):
        max_wait: float | None = Field(
            None, ge=0, allow_inf_nan=False, description="seconds that a request may wait for company; default: learnt"
        )
        max_rows: int | None = Field(None, ge=1, description="rows in one batch, below what the backend can take")

    def __init__(self, setup: api.Setup | None = None, /, **options: object) -> None:
        super().__init__(setup, **options)
        self._timing = CutTiming(self.options.max_rows)

    def cut_at(self, queue: QueueView) -> float:
        if self.options.max_wait is None:
            return self._timing.due(queue)
        oldest = queue.waiting[0].arrived
        if queue.all_clients_wait or queue.rows >= self._timing.room(queue):
            return oldest
        return max(oldest, min(oldest + float(self.options.max_wait), self._timing.must_start(queue)))

    def select(self, queue: QueueView) -> list[Request]:
        """The oldest requests, as long as their rows fit; a block over the cap goes alone."""
        share = self._timing.share(queue) if self.options.max_wait is None else math.inf
        return oldest_first(queue, self._timing.room(queue), share)

    def reason(self, queue: QueueView) -> Reason:
        if self.options.max_wait is None or queue.all_clients_wait or queue.rows >= self._timing.room(queue):
            return self._timing.reason(queue)
        if not self.options.max_wait:
            return Reason.FREE
        waited = queue.now >= queue.waiting[0].arrived + self.options.max_wait
        return Reason.WAITED if waited or queue.now < self._timing.must_start(queue) else Reason.DEADLINE

    def observe(self, batch: BatchRecord) -> None:
        self._timing.observe(batch)
