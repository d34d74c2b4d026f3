"""The real engine on a virtual clock, under the very load that a simulation draws."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random

from gpuinfer.api import Backend
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendError, Expired, QueueFull
from gpuinfer.testing import run_virtual


def diary(strategy, **options):
    """A strategy that writes down its batches: when, how many rows, and once they have run, why and how long."""

    class Diary(strategy):
        def account(self, batch, now):
            super().account(batch, now)
            self.cuts.append((now, sum(request.rows for request in batch), [request.arrived for request in batch]))

        def observe(self, batch):
            super().observe(batch)
            self.ran.append((batch.started, batch.rows, batch.requests, batch.reason, batch.seconds))
            self.waits.append(batch.queue_wait_s)

    kept = Diary(**options)
    kept.cuts, kept.ran, kept.waits = [], [], []
    return kept


def written(kept, start):
    """What a diary holds, with times counted from `start`."""
    cuts = [(now - start, rows, [at - start for at in arrived]) for now, rows, arrived in kept.cuts]
    ran = [(started - start, *rest, wait) for (started, *rest), wait in zip(kept.ran, kept.waits, strict=True)]
    return cuts, ran


class Model(Backend):
    """Takes the time that the service model draws, with the dice of a simulation's first replica."""

    def __init__(self, limits, service, seed):
        super().__init__()
        self.limits, self.service = limits, service
        self.dice = random.Random(f"{seed}/service/0")

    async def infer(self, batch):
        await asyncio.sleep(self.service.draw(sum(request.rows for request in batch), self.dice))
        if self.service.fails(self.dice):
            raise BackendError("as planned. Try again.")
        return [None for _ in batch]


def serve(load, clients, service, strategy, limits, *, seed, requests, max_queue_rows=None):
    """Runs it; returns the diary and the last snapshot. `clients` is a Closed load, or None."""
    return run_virtual(_serve(load, clients, service, strategy, limits, seed, requests, max_queue_rows))


async def _serve(load, closed, service, strategy, limits, seed, requests, max_queue_rows):
    loop = asyncio.get_running_loop()
    engine = Engine(Model(limits, service, seed), strategy, max_queue_rows=max_queue_rows, clock=loop.time)
    await engine.start()
    start, dice = loop.time(), random.Random(f"{seed}/arrivals")

    async def ask(one):
        await asyncio.sleep(one.at)
        with contextlib.suppress(BackendError, Expired, QueueFull):
            await engine.submit(
                None, rows=one.rows, priority=one.priority, timeout=one.timeout, client=one.client, group=one.group
            )

    left = requests

    async def ask_again_and_again(client):
        nonlocal left
        while left > 0:
            left -= 1
            await asyncio.sleep(closed.think_s(dice))
            with contextlib.suppress(BackendError, Expired):
                await engine.submit(None, client=client)
        engine.leave(client)

    if closed is None:
        await asyncio.gather(*(ask(one) for one in itertools.islice(load.asks(dice), requests)))
    else:
        for client in range(closed.clients):
            engine.join(client)
        await asyncio.gather(*(ask_again_and_again(client) for client in range(closed.clients)))
    seen = engine.snapshot()
    await engine.close()
    return written(strategy, start), seen
