"""What is measured of a step is what was planted in it."""

import asyncio

import pytest

from gpuinfer.generation import Completion, Generation
from gpuinfer.rollouts.environment import Environment, Outcome
from gpuinfer.rollouts.guarded_environment import EnvironmentMaker
from gpuinfer.rollouts.meter import LevelIntegral, RolloutMeter, name_version


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_a_level_is_counted_over_time():
    clock = Clock()
    level = LevelIntegral(clock)
    clock.now = 1.0
    with level.during(3):
        clock.now = 3.0
        level.add(1)
        clock.now = 4.0
        level.add(-1)
    clock.now = 10.0
    assert level.take() == (10.0, 3.0)
    level.add(2)
    clock.now = 11.0
    assert level.take() == (2.0, 1.0)
    clock.now = 12.0
    assert level.take() == (2.0, 1.0)  # it goes on where it was


class Blocking(Environment):
    """Keeps the loop to itself for a moment of `clock`, and then waits for an event."""

    agents = ("a",)

    def __init__(self):
        self.roles = {"a": "policy"}
        self.closed = False

    async def reset(self, seed):
        self.seed = seed

    async def observe(self):
        await asyncio.sleep(0)
        return {"a": self.seed}

    async def step(self, answers):
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            raise KeyError("cancelled inside") from None
        return Outcome()

    async def close(self):
        self.closed = True


async def test_a_measured_environment_is_the_environment():
    meter = RolloutMeter()
    made = meter.environments(EnvironmentMaker("toy", Blocking, ""))()
    assert (made.agents, made.roles) == (("a",), {"a": "policy"})
    await made.reset(7)
    assert await made.observe() == {"a": 7}
    stepping = asyncio.create_task(made.step({}))
    await asyncio.sleep(0)
    assert (meter.in_environment.value, meter.thinking.value) == (1, 0)
    stepping.cancel()
    with pytest.raises(KeyError, match="cancelled inside"):
        await stepping
    assert (meter.in_environment.value, meter.thinking.value) == (0, 1)
    await made.close()
    assert (meter.in_environment.value, meter.thinking.value, made._own.closed) == (0, 0, True)
    assert meter.take()["blocked_s"] > 0
    assert meter.take()["blocked_s"] == 0


def test_tokens_without_a_version_are_of_that_which_was_in_force_when_they_were_requested():
    for spans, known in (
        (((0, ""),), ((0, "v3"),)),
        (((0, "policy@v2"),), ((0, "policy@v2"),)),
        (((0, ""), (1, "v2")), ((0, "v3"), (1, "v2"))),
    ):
        answer = Completion(text="ab", tokens=(1, 2), finish_reason="stop", versions=spans)
        named = name_version(Generation(completions=(answer,), prompt_tokens=1), "v3")
        assert named.completions[0].versions == known
