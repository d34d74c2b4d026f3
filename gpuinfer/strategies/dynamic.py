"""Cut when the batch is full, when nobody is left to wait for, or when waiting costs more than it saves."""

from __future__ import annotations

import math

from pydantic import Field

from gpuinfer import api
from gpuinfer.api import BatchRecord, QueueView, Reason, Request, Strategy

MEMORY = 32  # what a batch costs is learnt from about so many
OUTLIER = 4.0  # no batch counts as having taken more than this many times the average
ALIKE = 0.05  # sizes that differ by less than this share of the average teach nothing about what a row costs
PATIENCE = 8.0  # average think times: of clients that come back, all but a few in ten thousand have (e^-8)


class Dynamic(Strategy):
    """Dynamic batching. Without options it waits only for clients that come back soon, and only while that pays."""

    class Options(api.Options):
        max_wait: float | None = Field(
            None, ge=0, allow_inf_nan=False, description="seconds that a request may wait for company; default: learnt"
        )
        max_rows: int | None = Field(None, ge=1, description="rows in one batch, below what the backend can take")

    def __init__(self, setup: api.Setup | None = None, /, **options: object) -> None:
        super().__init__(setup, **options)
        self._fixed_cost = FixedCost()
        self._freed = -math.inf  # when a lane last became free

    def cut_at(self, queue: QueueView) -> float:
        oldest = queue.waiting[0].arrived
        if queue.all_clients_wait or queue.rows >= self._room(queue) or len(queue.waiting) >= self._share(queue):
            return oldest
        if self.options.max_wait is not None:
            return oldest + float(self.options.max_wait)
        if self._may_wait(queue):
            return max(self._freed, queue.waiting[-1].arrived) + self._worth_waiting(queue)
        return oldest

    def select(self, queue: QueueView) -> list[Request]:
        """The oldest requests, as long as their rows fit; a block over the cap goes alone."""
        chosen: list[Request] = []
        room, share, rows = self._room(queue), self._share(queue), 0
        for request in queue.waiting:
            rows += request.rows
            if chosen and (rows > room or len(chosen) >= share):
                break
            chosen.append(request)
        return chosen

    def reason(self, queue: QueueView) -> Reason:
        room = self._room(queue)
        if queue.rows >= room:
            return Reason.FULL if room == queue.limits.max_rows else Reason.CAP
        if queue.all_clients_wait:
            return Reason.CLIENTS
        if len(queue.waiting) >= self._share(queue):
            return Reason.CAP
        if self.options.max_wait is not None:
            return Reason.WAITED if self.options.max_wait else Reason.FREE
        return Reason.GAIN if self._may_wait(queue) else Reason.FREE

    def observe(self, batch: BatchRecord) -> None:
        self._freed = batch.started + batch.seconds
        self._fixed_cost.learn(batch.rows, batch.seconds)

    def _room(self, queue: QueueView) -> int:
        """The rows of a batch for which nothing needs to wait."""
        most = queue.limits.max_rows
        return min(most, self.options.max_rows or most, queue.limits.enough_rows or most)

    def _share(self, queue: QueueView) -> float:
        """The requests for one lane when all lanes share alike what the live clients ask; inf when none are known.

        Without it, whoever comes back together goes together for ever, while other lanes have next to nothing to do.
        """
        if not queue.live or self.options.max_wait is not None or queue.limits.slots is not None:
            return math.inf
        return max(1, math.ceil((queue.outstanding + queue.thinking) / queue.limits.in_flight))

    def _may_wait(self, queue: QueueView) -> bool:
        """Whether the next of those who think is likely back before an extra batch would have paid its fixed cost."""
        return queue.think_s < queue.thinking * self._fixed_cost.seconds

    def _worth_waiting(self, queue: QueueView) -> float:
        """How many seconds a free lane may wait for the next of those who think, from the last that came back on.

        An extra batch costs its fixed cost, a wait its own length: waiting up to that cost is never worse than twice
        the best in hindsight (the ski-rental rule: Karlin, Manasse, Rudolph, Sleator, "Competitive snoopy caching",
        1988). In a closed loop what the lane gains everybody gains, so the wait is not counted for each who waits.
        """
        return min(self._fixed_cost.seconds, PATIENCE * queue.think_s)


class FixedCost:
    """What a batch costs however few its rows, in seconds: where the line through recent batches meets no rows.

    Least squares with exponentially decaying weights (Finch, "Incremental calculation of weighted mean and variance",
    2009). As long as all batches are alike the line is flat: their mean time, an upper bound.
    """

    __slots__ = ("_covariance", "_mean_rows", "_mean_s", "_seen", "_variance")

    def __init__(self) -> None:
        self._seen = 0
        self._mean_rows = self._mean_s = self._variance = self._covariance = 0.0

    def learn(self, rows: int, seconds: float) -> None:
        if self._seen:
            seconds = min(seconds, OUTLIER * self._mean_s)
        self._seen = min(self._seen + 1, MEMORY)
        weight = 1.0 / self._seen
        more_rows, more_s = rows - self._mean_rows, seconds - self._mean_s
        self._mean_rows += weight * more_rows
        self._mean_s += weight * more_s
        self._variance = (1 - weight) * (self._variance + weight * more_rows * more_rows)
        self._covariance = (1 - weight) * (self._covariance + weight * more_rows * more_s)

    @property
    def seconds(self) -> float:
        """0 before anything has run."""
        if not self._seen:
            return 0.0
        per_row = self._covariance / (self._variance + (ALIKE * self._mean_rows) ** 2)
        return min(max(self._mean_s - per_row * self._mean_rows, 0.0), self._mean_s)
