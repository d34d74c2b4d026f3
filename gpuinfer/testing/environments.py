"""What an environment promises: games that are the same for the same seed, that come to an end, and bear any answer."""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from gpuinfer.generation import Constraint
from gpuinfer.rollouts.environment import Environment, Observation, Outcome
from gpuinfer.testing.findings import Examination, Finding, check_build, check_unknown_options, run_bounded

SEEDS = (0, 1, 2**63 - 1)
STEPS = 50  # of a game: one that goes on for longer is left there, as a run's horizon does
ANSWERS = ("", "42", "I do not know.", "<a>\x00\n\U0001f600</a> " * 50)  # what models say
BEGINS = "begins, and says who is to speak and what each is shown"
BEARS = "takes any answer, and scores its agents"
SAME = "plays the same game again with the same seed"
AGAIN = "begins anew after a game"

Make = Callable[[], Environment]


def check_environment(make: Make, timeout_s: float = 30.0, *, examiner: Examination | None = None) -> list[Finding]:
    """Every promise of `rollouts.environment.Environment`; `make` is called for a new game as often as needed. Each
    check may take `timeout_s`, or what `examiner` allows.
    """

    def check(examiner: Examination) -> None:
        if (one := check_build(make, Environment, examiner)) is not None:
            check_unknown_options(type(one).Options, one.options, type(one), examiner)
            asyncio.run(_check_games(make, examiner))

    return run_bounded(check, examiner or Examination(timeout_s))


async def _check_games(make: Make, examiner: Examination) -> None:
    broken = "" if await examiner.check_async(BEGINS, lambda: _fault_of_beginning(make)) else BEGINS
    for name, fault_of in {BEARS: _fault_of_answers, SAME: _fault_of_sameness, AGAIN: _fault_of_again}.items():
        if broken:
            examiner.skip(name, f"'{broken}' does not hold")
        elif not await examiner.check_async(name, functools.partial(fault_of, make)) and name == BEARS:
            broken = BEARS


@asynccontextmanager
async def _opened(make: Make) -> AsyncIterator[Environment]:
    one = make()
    try:
        yield one
    finally:
        await one.close()


async def _fault_of_beginning(make: Make) -> str | None:
    for seed in SEEDS:
        async with _opened(make) as one:
            await one.reset(seed)
            agents = list(one.agents)
            if not agents or len(set(agents)) < len(agents) or not all(isinstance(agent, str) for agent in agents):
                return f"its agents are {agents!r:.80}. After `reset` they are all that may ever speak, each once."
            if odd := [role for role in one.roles if role not in agents]:
                return f"its roles name {odd[0]!r:.80}, which is no agent. Give roles to `agents` alone."
            if fault := fault_of_observations(await one.observe(), agents):
                return fault
    return None


def fault_of_observations(observations: Any, agents: list[str]) -> str | None:
    """What is wrong with what `observe` returned."""
    if not isinstance(observations, Mapping):
        return f"observe gave a {type(observations).__name__}. Return a mapping from agent to Observation."
    for agent, observation in observations.items():
        if agent not in agents:
            return f"observe named {agent!r:.80}, which is no agent. They are {', '.join(agents):.80}."
        if not isinstance(observation, Observation):
            return f"observe gave {type(observation).__name__} for {agent}. Return gpuinfer.rollouts Observations."
        for message in observation.messages:
            if not (isinstance(message, Mapping) and {"role", "content"} <= set(message)):
                return f"{agent} is shown {message!r:.80}. A message is {{'role': …, 'content': …}}."
        if observation.constraint is not None and not isinstance(observation.constraint, Constraint):
            return (
                f"the constraint of {agent} is a {type(observation.constraint).__name__}. Give a Constraint, or None."
            )
    return None


def fault_of_outcome(outcome: Any, agents: list[str]) -> str | None:
    """What is wrong with what `step` gave."""
    if not isinstance(outcome, Outcome):
        return f"step gave a {type(outcome).__name__}. Return gpuinfer.rollouts.environment.Outcome."
    for agent, reward in outcome.rewards.items():
        if agent not in agents:
            return f"{agent!r:.80} got a reward and is no agent. They are {', '.join(agents):.80}."
        if not (isinstance(reward, int | float) and math.isfinite(reward)):
            return f"the reward of {agent} is {reward!r:.80}. Give a finite number."
    for name, value in outcome.metrics.items():
        if not (isinstance(value, int | float) and math.isfinite(value)):
            return f"the metric {name!r:.80} is {value!r:.80}. Give a finite number."
    return None


async def _fault_of_answers(make: Make) -> str | None:
    """A game in which all answers are the same, for each of `ANSWERS`."""
    for seed, answer in enumerate(ANSWERS):
        async with _opened(make) as one:
            await one.reset(seed)
            agents = list(one.agents)
            for _ in range(STEPS):
                observations = await one.observe()
                if fault := fault_of_observations(observations, agents):
                    return fault
                outcome = await one.step(dict.fromkeys(observations, answer))
                if fault := fault_of_outcome(outcome, agents):
                    return f"when all say {answer!r:.20}: {fault}"
                if outcome.done:
                    break
    return None


async def _fault_of_sameness(make: Make) -> str | None:
    games = []
    for _ in range(2):
        async with _opened(make) as one:
            games.append(await _played(one, SEEDS[1]))
    if games[0] == games[1]:
        return None
    return "the same seed and answers made two different games. Draw chance from `reset`'s seed alone."


async def _fault_of_again(make: Make) -> str | None:
    async with _opened(make) as one:
        first = await _played(one, SEEDS[1])
        await _played(one, SEEDS[0])
        if await _played(one, SEEDS[1]) == first:
            return None
    return "after another game the same seed made a different one. Let `reset` forget all of the last game."


async def _played(one: Environment, seed: int) -> list[Any]:
    """A game: what was shown, and what came of answers that are always the same."""
    await one.reset(seed)
    history: list[Any] = [list(one.agents)]
    for number in range(STEPS):
        observations = await one.observe()
        history.append({agent: [dict(message) for message in seen.messages] for agent, seen in observations.items()})
        outcome = await one.step({agent: ANSWERS[number % len(ANSWERS)] for agent in observations})
        history.append((dict(outcome.rewards), outcome.done, dict(outcome.metrics)))
        if outcome.done:
            break
    return history
