"""A backend that stands in for a GPU while you tune a strategy."""

import asyncio
from collections.abc import Sequence

from pydantic import Field

from gpuinfer import api


class Echo(api.Backend):
    """Answers each request with its own payload, after a time that a real batch of that many rows might take."""

    class Options(api.Options):
        seconds: float = Field(0.001, ge=0, description="what any batch takes")
        seconds_per_row: float = Field(0.0, ge=0, description="what each of its rows adds")
        max_rows: int = Field(256, ge=1, description="rows in one batch")
        in_flight: int = Field(1, ge=1, description="batches at once")

    async def start(self, context: api.BackendContext) -> None:
        self.limits = api.Limits(self.options.max_rows, self.options.in_flight)

    async def infer(self, batch: Sequence[api.Request]) -> Sequence[api.Result]:
        rows = sum(request.rows for request in batch)
        await asyncio.sleep(self.options.seconds + self.options.seconds_per_row * rows)
        return [request.payload for request in batch]
