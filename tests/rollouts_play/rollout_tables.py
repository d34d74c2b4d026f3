"""Environments that behave, and some that do not. Named as `rollout_tables:Name`."""

from __future__ import annotations

import asyncio
import dataclasses
import time

from gpuinfer import api
from gpuinfer.rollouts.environment import Environment, Observation, Outcome


def user(text):
    return [{"role": "user", "content": text}]


class Chatting(Environment):
    """Two agents speak in turns of both, for some steps; the reward is the length of what was said."""

    class Options(api.Options):
        steps: int = 2
        wait: float = 0.0  # seconds of a step

    agents = ("left", "right")

    async def reset(self, seed):
        self.seed, self.step_number = seed, 0

    async def observe(self):
        text = f"{self.seed % 1000}: step {self.step_number}"
        return {agent: Observation(messages=user(text), max_tokens=6) for agent in self.agents}

    async def step(self, answers):
        await asyncio.sleep(self.options.wait)
        self.step_number += 1
        rewards = {agent: float(len(answer)) for agent, answer in answers.items()}
        return Outcome(
            rewards=rewards, done=self.step_number >= self.options.steps, metrics={"steps": self.step_number}
        )


def by_function(steps: int = 1):
    """A factory that is no class."""
    return Chatting(steps=steps)


class Flaky(Chatting):
    """The first game in this process to be stepped raises."""

    raised = False

    async def step(self, answers):
        if not Flaky.raised:
            Flaky.raised = True
            raise ZeroDivisionError("the board is gone")
        return await super().step(answers)


class Blocking(Chatting):
    """Computes on the event loop, so that all other games wait."""

    class Options(Chatting.Options):
        seconds: float = 0.6

    async def step(self, answers):
        time.sleep(self.options.seconds)  # noqa: ASYNC251
        return await super().step(answers)


class Crooked(Chatting):
    """Misbehaves in the way that the option names."""

    class Options(Chatting.Options):
        kind: str

    async def observe(self):
        shown = {
            "list": ["left"],
            "stranger": {"middle": Observation(messages=user("hello"))},
            "text": {"left": "hello"},
            "roleless": {"left": Observation(messages=[{"content": "hello"}])},
        }
        return shown.get(self.options.kind) or await super().observe()

    async def step(self, answers):
        match self.options.kind:
            case "hangs":
                await asyncio.Event().wait()
            case "none":
                return None
            case "unhappy":
                remark = "nobody bids. Try --env-option loud=true."
                return dataclasses.replace(await super().step(answers), remark=remark)
        rewards = {"nan": {"left": float("nan")}, "rewarded": {"middle": 1.0}}  # and "endless" ends no game
        return Outcome(rewards=rewards.get(self.options.kind, {}))
