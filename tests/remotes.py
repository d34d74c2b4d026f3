"""A remote backend for the tests of the runtime, and what it saw. Child processes import it by name."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from helpers import Doubler, note

from gpuinfer.api import BackendContext, Channel, Infer, Options
from gpuinfer.errors import UsageError
from gpuinfer.stats import Histogram, Snapshot


class Far(Doubler):
    """Stands for a server: each question after its counters finds one more batch of seven rows."""

    remote = True

    class Options(Options):
        max_rows: int = 64
        ready_file: str = ""
        closed_file: str = ""
        asked_file: str = ""  # grows by the asking process at each question after the counters
        silent_after: int = 1_000_000  # questions that it answers
        client: bool = False

    asked = 0
    started = False

    async def start(self, context: BackendContext) -> None:
        await super().start(context)
        self.started, self.context = True, context

    def connect(self):
        if not self.started:
            raise UsageError("there is no server yet. Start it first.")
        return Way({**self.options.model_dump(), "client": True})

    def block(self, rows):
        return bytearray(rows)

    async def stats(self):
        note(self.options.asked_file)
        self.asked += 1
        if self.asked > self.options.silent_after:
            await asyncio.Event().wait()
        waits = Histogram()
        waits.add(0.25)
        lane = {"name": "forward 0", "stations": {"forward": float(self.asked)}}
        return Snapshot(
            requests=1000,
            rows=7000,
            batches={7: self.asked},
            reasons={"clients": self.asked},
            latency=waits.to_wire(),
            queue_wait=waits.to_wire(),
            first_token=waits.to_wire(),
            between_tokens=waits.to_wire(),
            errors={"failed": 99, "retried": self.asked},
            lanes=(lane,),
            rss_peak_mb=100_000.0,
            device={"name": "far away"},
        ).to_wire()


@dataclass(frozen=True)
class Way:
    options: dict

    def open(self):
        backend = Far(**self.options)
        backend.started = True
        return backend


async def busy(infer: Infer, channel: Channel, arguments) -> None:
    """Computes on its event loop for a while, as a long search does."""
    total = 0
    for number in range(arguments["steps"]):
        total += number
    await channel.send({"total": total})
