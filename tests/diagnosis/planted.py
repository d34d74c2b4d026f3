"""A workload whose every station is made of sleep, so that a bottleneck of any strength can be planted.

Two cores are enough for it, and what is planted is known exactly. Worker processes import this by name, and no torch.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator

import numpy as np

from gpuinfer.api import Channel, Infer, ModelSpec, Options, Progress, Workload

FEATURES = 4
SLEEPER = "sleepers:Sleeper"


def service_s(rows: float, fixed_s: float, row_s: float, knee: int) -> float:
    """Seconds that the sleeping model takes for a batch: no faster a row beyond `knee`."""
    return (fixed_s + row_s * min(rows, knee)) * max(1.0, rows / knee)


class Planted(Workload):
    """Workers that sleep as their search, ask, and do it again, `rounds` times for each block."""

    class Options(Options):
        workers: int = 4
        blocks: int = 2  # of each worker, in flight
        rows: int = 64  # of a block
        games_in_flight: int | None = None  # rows of all blocks; in place of `rows`
        rounds: int = 40
        search_s: float = 0.008  # for a block of `search_rows`; 0: no search, and no lane for it
        search_rows: int = 64
        uneven: float = 0.1  # each search takes between 1 - this and 1 + this of its time
        slow: float = 1.0  # how many times as long worker 0 takes
        offered: float = 0.0  # blocks a second, from all workers, whether or not others were answered
        seed: int = 0
        model: str = SLEEPER
        fixed_s: float = 0.014
        row_s: float = 0.00005
        knee: int = 128
        transfer_s: float = 0.0  # of a batch of `knee` rows

    def model(self) -> ModelSpec:
        given = self.options
        arguments = {name: getattr(given, name) for name in ("fixed_s", "row_s", "knee", "transfer_s")}
        if given.model != SLEEPER:
            arguments = {}
        return ModelSpec(given.model, inputs=FEATURES, arguments={"inputs": FEATURES, **arguments})

    @property
    def processes(self) -> int:
        return self.options.workers

    @property
    def block_rows(self) -> int:
        given = self.options
        if given.games_in_flight is None:
            return given.rows
        return max(1, given.games_in_flight // (given.workers * given.blocks))

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        given = self.options
        rows = given.rounds * given.rows * given.blocks * given.workers
        rounds = max(1, round(rows / (self.block_rows * given.blocks * given.workers)))
        told = {**given.model_dump(), "rows": self.block_rows, "rounds": rounds}
        yield Progress(0, rows, setup=True)
        done = ready = 0
        arguments = [{**told, "worker": worker} for worker in range(given.workers)]
        async with infer.workers("planted:work", arguments) as workers:
            async for _, message in workers:
                if message is None:
                    continue
                ready += "ready" in message
                done += message.get("rows", 0)
                yield Progress(done, rows, facts=self.facts(), setup=ready < given.workers)
                if "ready" in message and ready == given.workers:
                    for worker in range(given.workers):
                        await workers.send(worker, {"go": True})

    def facts(self) -> dict[str, float]:
        given = self.options
        if given.offered:
            return {"offered_rows_per_s": given.offered * self.block_rows}
        blocks = given.workers * given.blocks
        if not given.search_s:
            return {"clients": blocks}
        games = {} if given.games_in_flight is None else {"games_in_flight": given.games_in_flight}
        told = {"workers": given.workers, "blocks": given.blocks, "rows_outstanding": blocks * self.block_rows}
        return {**told, **games}


async def work(infer: Infer, channel: Channel, arguments) -> None:
    """One worker: its blocks take turns on one thread, as in self-play."""
    await infer.ready()
    await channel.send({"ready": True})
    await channel.receive()
    chance = random.Random(f"{arguments['seed']} {arguments['worker']}")
    if arguments["offered"]:
        await _offer(infer, arguments, chance)
    else:
        await _ask(infer, arguments, chance)
    await channel.send({"rows": arguments["rounds"] * arguments["rows"] * arguments["blocks"]})


async def _ask(infer: Infer, arguments, chance: random.Random) -> None:
    lane = infer.lane("search") if arguments["search_s"] else None
    turn = asyncio.Lock()
    slow = arguments["slow"] if arguments["worker"] == 0 else 1.0
    seconds = arguments["search_s"] * arguments["rows"] / arguments["search_rows"] * slow

    async def play() -> None:
        block = _block(infer, arguments["rows"])
        with infer.client() as me:
            for _ in range(arguments["rounds"]):
                if lane is not None:
                    async with turn:
                        lane.enter("search")
                        await asyncio.sleep(seconds * chance.uniform(1 - arguments["uneven"], 1 + arguments["uneven"]))
                        lane.enter("idle")
                await infer(block, rows=len(block), client=me)

    await asyncio.gather(*(play() for _ in range(arguments["blocks"])))


async def _offer(infer: Infer, arguments, chance: random.Random) -> None:
    """Blocks come when they come: each after an exponential time, answered or not."""
    rate, asked = arguments["offered"] / arguments["workers"], []
    due = time.monotonic()
    for _ in range(arguments["rounds"] * arguments["blocks"]):
        due += chance.expovariate(rate)
        await asyncio.sleep(max(0.0, due - time.monotonic()))
        block = _block(infer, arguments["rows"])
        asked.append(asyncio.ensure_future(infer(block, rows=len(block))))
    await asyncio.gather(*asked)


def _block(infer: Infer, rows: int) -> np.ndarray:
    return np.zeros((rows, FEATURES), np.float32)
