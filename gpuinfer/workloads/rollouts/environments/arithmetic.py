"""Arithmetic: one question, one answer, one reward. What a loop is tried with before it costs anything."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping

from pydantic import Field

from gpuinfer import api
from gpuinfer.rollouts.environment import Environment, Observation, Outcome

AGENT = "solver"
MOST_DIGITS = 32  # of an answer that is read
NUMBER = re.compile(r"-?\d+")
SIGNS = {"+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b}


class Arithmetic(Environment):
    """Asks for a sum, a difference or a product. 1 for an answer whose last number is it, else 0."""

    class Options(api.Options):
        largest: int = Field(99, ge=1, le=10**12, description="of the two numbers")
        operations: str = Field("+-*", pattern=r"^[+*-]+$", description="those that may come")

    options: Options
    agents = (AGENT,)

    async def reset(self, seed: int) -> None:
        chance = random.Random(seed)
        left, right = (chance.randint(0, self.options.largest) for _ in range(2))
        sign = chance.choice(self.options.operations)
        self._question, self._result = f"{left} {sign} {right}", SIGNS[sign](left, right)

    async def observe(self) -> Mapping[str, Observation]:
        text = f"What is {self._question}? Answer with the number alone."
        return {AGENT: Observation(messages=[{"role": "user", "content": text}])}

    async def step(self, answers: Mapping[str, str]) -> Outcome:
        found = NUMBER.findall(answers[AGENT])
        right = bool(found) and len(found[-1]) <= MOST_DIGITS and int(found[-1]) == self._result
        return Outcome(rewards={AGENT: float(right)}, done=True, metrics={"correct": float(right)})
