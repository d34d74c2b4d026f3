"""Cut when the batch is full, when the oldest request has waited long enough, or when nobody is left to wait for."""

from __future__ import annotations

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import QueueView, Reason, Request, Strategy


class Dynamic(Strategy):
    """Dynamic batching. Without options it never waits: what comes while the backend is busy makes the next batch."""

    class Options(api.Options):
        max_wait: float = Field(
            0.0, ge=0, allow_inf_nan=False, description="seconds that a request may wait for company"
        )
        max_rows: int | None = Field(None, ge=1, description="rows in one batch, below what the backend can take")

    def cut_at(self, queue: QueueView) -> float:
        oldest = queue.waiting[0].arrived
        if queue.rows >= self._room(queue) or queue.all_clients_wait:
            return oldest
        return oldest + float(self.options.max_wait)

    def select(self, queue: QueueView) -> list[Request]:
        """The oldest requests, as long as their rows fit; a block over `max_rows` goes alone."""
        chosen: list[Request] = []
        room, rows = self._room(queue), 0
        for request in queue.waiting:
            rows += request.rows
            if rows > room and chosen:
                break
            chosen.append(request)
        return chosen

    def reason(self, queue: QueueView) -> Reason:
        room = self._room(queue)
        if queue.rows >= room:
            return Reason.FULL if room == queue.limits.max_rows else Reason.CAP
        if queue.all_clients_wait:
            return Reason.CLIENTS
        return Reason.WAITED if self.options.max_wait else Reason.FREE

    def _room(self, queue: QueueView) -> int:
        return min(self.options.max_rows or queue.limits.max_rows, queue.limits.max_rows)
