"""What the kit finds in environments that break what they promise."""

from __future__ import annotations

import itertools
import random

import pytest
from pydantic import BaseModel, Field

from gpuinfer import api
from gpuinfer.rollouts.builtin_environments import Arithmetic, BlobText
from gpuinfer.rollouts.environment import Environment, Observation, Outcome
from gpuinfer.testing import assert_ok
from gpuinfer.testing.environments import AGAIN, BEARS, BEGINS, SAME, check_environment


class Good(Environment):
    """Two agents in turns; one round each."""

    class Options(api.Options):
        rounds: int = Field(2, ge=1)

    agents = ("a", "b")

    async def reset(self, seed):
        self.number, self.left = random.Random(seed).randint(0, 99), 2 * self.options.rounds

    async def observe(self):
        return {self.agents[self.left % 2]: Observation([{"role": "user", "content": f"{self.number}?"}])}

    async def step(self, answers):
        self.left -= 1
        return Outcome(rewards=dict.fromkeys(answers, 1.0), done=not self.left)


@pytest.mark.parametrize("environment", [Good, Arithmetic, BlobText])
def test_an_environment_in_order_keeps_every_promise(environment):
    assert_ok(check_environment(environment))


def showing(shown):
    async def observe(self):
        return shown

    return type("Shown", (Good,), {"observe": observe})


def stepping(outcome):
    async def step(self, answers):
        return outcome(answers)

    return type("Stepped", (Good,), {"step": step})


class Chance(Good):
    async def reset(self, seed):
        await super().reset(random.SystemRandom().getrandbits(40))


class Remembers(Good):
    def __init__(self, **options):
        super().__init__(**options)
        self.games = itertools.count()

    async def reset(self, seed):
        await super().reset(seed + next(self.games))


class Lax(Good):
    class Options(BaseModel):
        rounds: int = 1


def literal(answers):
    return Outcome(rewards={agent: float(said or 0) for agent, said in answers.items()}, done=True)


@pytest.mark.parametrize(
    ("environment", "promise", "said"),
    [
        (
            showing({"c": Observation([{"role": "user", "content": "?"}])}),
            BEGINS,
            "'c', which is no agent. They are a, b",
        ),
        (showing({"a": "say something"}), BEGINS, "observe gave str for a"),
        (showing({"a": Observation(["say something"])}), BEGINS, "a is shown 'say something'. A message is"),
        (type("Silent", (Good,), {"agents": ()}), BEGINS, "its agents are []"),
        (stepping(literal), BEARS, "could not convert string to float"),
        (
            stepping(lambda answers: Outcome(rewards={"a": float("nan")}, done=True)),
            BEARS,
            "the reward of a is nan. Give",
        ),
        (stepping(lambda answers: None), BEARS, "step gave a NoneType. Return"),
        (Chance, SAME, "Draw chance from `reset`'s seed alone."),
        (Remembers, AGAIN, "Let `reset` forget all of the last game."),
        (Lax, "refuses unknown options", "Derive `class Options(gpuinfer.api.Options)`"),
        (dict, "builds", "{} is no gpuinfer.rollouts.environment.Environment"),
    ],
)
def test_a_broken_promise_is_named(environment, promise, said):
    broken = {finding.name: finding.detail for finding in check_environment(environment) if not finding.ok}
    assert next(iter(broken)) == promise
    assert said in broken[promise]
