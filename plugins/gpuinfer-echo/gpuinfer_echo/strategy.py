"""A strategy for those who know the batch that their model likes best."""

from pydantic import Field

from gpuinfer import api


class Fixed(api.Strategy):
    """Cuts when `rows` rows wait, or when the oldest has waited `timeout` seconds."""

    class Options(api.Options):
        rows: int = Field(32, ge=1, description="rows to wait for")
        timeout: float = Field(0.01, ge=0, allow_inf_nan=False, description="seconds after which fewer rows will do")

    def cut_at(self, queue: api.QueueView) -> float:
        oldest = queue.waiting[0].arrived
        return oldest if self._enough(queue) else oldest + self.options.timeout

    def reason(self, queue: api.QueueView) -> api.Reason:
        return api.Reason.FULL if self._enough(queue) else api.Reason.WAITED

    def _enough(self, queue: api.QueueView) -> bool:
        return queue.rows >= min(self.options.rows, queue.limits.max_rows)
