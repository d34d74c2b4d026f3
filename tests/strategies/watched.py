"""A strategy under watch: every promise that a strategy makes is checked at every question put to it."""

from __future__ import annotations

from gpuinfer.api import Strategy


class Watched(Strategy):
    """Asks another strategy everything twice, and keeps what was cut."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy
        self.batches: list[list] = []

    @property
    def notices(self):
        return self.strategy.notices

    def cut_at(self, queue):
        due = self.strategy.cut_at(queue)
        assert self.strategy.cut_at(queue) == due
        self.due = max(due, queue.waiting[0].arrived)
        return due

    def reason(self, queue):
        reason = self.strategy.reason(queue)
        assert self.strategy.reason(queue) is reason
        return reason

    def select(self, queue):
        assert queue.now >= self.strategy.cut_at(queue), "cut before it was due"
        chosen = list(self.strategy.select(queue))
        assert list(self.strategy.select(queue)) == chosen
        assert chosen
        assert len(set(chosen)) == len(chosen)
        assert sum(request.rows for request in chosen) <= queue.limits.max_rows
        return chosen

    def account(self, batch, now):
        self.batches.append([now, list(batch)])
        self.strategy.account(batch, now)

    def observe(self, batch):
        self.strategy.observe(batch)

    def shed(self, queue, arriving):
        return self.strategy.shed(queue, arriving)

    def retry_after(self, queue, request):
        return self.strategy.retry_after(queue, request)
