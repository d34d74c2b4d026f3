"""A workload that asks from several processes."""

from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np
from pydantic import Field

from gpuinfer import api


class Ping(api.Workload):
    """Asks for as many rows as you like, from as many processes, and says how many came back."""

    class Options(api.Options):
        rows: int = Field(1000, ge=1, description="rows to ask for, by all workers")
        workers: int = Field(2, ge=1, le=256, description="processes that ask")

    @property
    def processes(self) -> int:
        """How many open the backend: each gets its share of the cores."""
        return self.options.workers

    async def run(self, infer: api.Infer) -> AsyncIterator[api.Progress]:
        shares = [len(range(one, self.options.rows, self.processes)) for one in range(self.processes)]
        answered = [0] * self.processes
        yield api.Progress(0, self.options.rows, note="starting the workers", setup=True)  # the clock does not run yet
        async with infer.workers("gpuinfer_echo.workload:ask", [{"rows": share} for share in shares]) as workers:
            async for worker, message in workers:  # until every worker has ended
                if message is not None:
                    answered[worker] = message["answered"]
                    yield self._progress(sum(answered))
        yield self._progress(sum(answered))

    def _progress(self, answered: int) -> api.Progress:
        facts = {"workers": self.processes, "blocks": 1, "rows_outstanding": self.processes}
        return api.Progress(answered, self.options.rows, counts={"pings": answered}, facts=facts)


async def ask(infer: api.Infer, channel: api.Channel, arguments: Mapping[str, Any]) -> None:
    """One worker's whole life. What it is told and what it tells are plain values."""
    answered = 0
    with infer.client() as me:
        for number in range(arguments["rows"]):
            if infer.stopping.is_set():
                break
            row = np.full((1, 8), number, np.float32)
            answered += int(np.array_equal(await infer(row, client=me), row))
            if answered % 100 == 0:
                await channel.send({"answered": answered})
    await channel.send({"answered": answered})
