"""Dynamic without knobs under closed-loop clients: the real engine, on a virtual clock, with random think times."""

import asyncio
import random
from dataclasses import dataclass

import pytest

from gpuinfer.api import Backend, Limits
from gpuinfer.engine.engine import Engine
from gpuinfer.stats import summarise
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import run_virtual

FIXED_S, ROW_S = 0.005, 0.0001
SECONDS = 1.0
WAITS = [0.0, 0.0001, 0.0003, 0.001, 0.003, 0.01]


class Model(Backend):
    """A fixed cost for each batch, and some for each row; its lanes do not slow one another down."""

    def __init__(self, limits):
        super().__init__()
        self.limits = limits

    async def infer(self, batch):
        await asyncio.sleep(FIXED_S + ROW_S * sum(request.rows for request in batch))
        return [None for _ in batch]


@dataclass
class Outcome:
    rows_per_s: float
    batch: float  # mean requests
    reasons: dict
    sizes: dict
    latency: dict


async def serve(strategy, clients, *, lanes=2, rows=1, enough_rows=None, think=None):
    think = think or (lambda dice: dice.expovariate(10_000.0))
    loop = asyncio.get_running_loop()
    engine = Engine(Model(Limits(4096, lanes, enough_rows=enough_rows)), strategy, clock=loop.time)
    await engine.start()
    began, dice = loop.time(), random.Random(7)

    async def ask_again_and_again(me):
        engine.join(me)
        while loop.time() < began + SECONDS:
            await asyncio.sleep(think(dice))
            await engine.submit(None, rows=rows, client=me)
        engine.leave(me)

    await asyncio.gather(*(ask_again_and_again(number) for number in range(clients)))
    took, counted = loop.time() - began, engine.snapshot()
    await engine.close()
    batches = sum(counted.batches.values())
    latency = summarise(counted.latency)
    return Outcome(counted.rows / took, counted.requests / batches, counted.reasons, counted.batches, latency)


def test_blocks_of_enough_rows_each_go_at_once_in_a_lane_of_their_own():
    outcome = run_virtual(serve(Dynamic(), 2, rows=1000, enough_rows=512))
    assert set(outcome.sizes) == {1000}
    assert outcome.latency["max"] == pytest.approx(FIXED_S + 1000 * ROW_S)


@pytest.mark.parametrize("lanes", [pytest.param(1, id="one lane"), pytest.param(2, id="two lanes")])
@pytest.mark.parametrize("clients", [1, 2, *(pytest.param(n, marks=pytest.mark.thorough) for n in (8, 64))])
def test_without_knobs_it_is_as_good_as_the_best_fixed_wait(clients, lanes):
    best = max(run_virtual(serve(Dynamic(max_wait=wait), clients, lanes=lanes)).rows_per_s for wait in WAITS)
    assert run_virtual(serve(Dynamic(), clients, lanes=lanes)).rows_per_s >= 0.98 * best


def test_a_client_that_pauses_now_and_then_does_not_hold_up_the_others():
    def pauses(dice):
        return 0.0001 if dice.random() < 0.97 else 0.030

    steady, pausing = run_virtual(serve(Dynamic(), 32)), run_virtual(serve(Dynamic(), 32, think=pauses))
    assert pausing.latency["p50"] < 1.2 * steady.latency["p50"]
