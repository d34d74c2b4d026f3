"""A run of rollouts in a process of its own, on the real clock: `python planted_program.py JSON`.

All of it is the real thing but the model: its answers take the time that they are told to, which is slept.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
from pydantic import Field
from virtual_engine import TOKENS, Waits, drawn, told

from gpuinfer import api
from gpuinfer.api import Backend, BackendContext, Event, Limits, ModelSpec, Request, Result, Setup
from gpuinfer.generation import Prompt
from gpuinfer.rollouts.steps import StepRecord
from gpuinfer.rollouts.trainer import SimulatedTrainer
from gpuinfer.runtime.run import run
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.workloads.rollouts.workload import Rollouts


class Sleeping(Backend):
    """A model of text whose steps, passes and weights take their time."""

    class Options(api.Options):
        token: float = Field(description="seconds of a step, whatever rows are in it")
        slots: int
        score: float = Field(0.0, description="seconds of a prompt of which log-probabilities are told")
        load: float = Field(0.0, description="seconds until new weights are in force")
        cold: float = Field(0.0, description="seconds before the first step of all")

    options: Options
    serves = ("text",)

    async def start(self, context: BackendContext) -> None:
        slots = self.options.slots
        self.limits = Limits(slots, in_flight=slots, slots=slots)
        self._stepped, self._rows, self._version = context.stepped, 0, ""
        self._warm: asyncio.Task[None] | None = None
        self._ticking = asyncio.create_task(self._tick())

    async def _tick(self) -> None:
        while True:
            rows, began = self._rows, time.monotonic()
            await asyncio.sleep(self.options.token)
            if rows:
                self._stepped(rows, time.monotonic() - began)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        return await asyncio.gather(*(self._answer(request.payload) for request in batch))

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        for done in asyncio.as_completed([asyncio.ensure_future(self._event(request)) for request in batch]):
            yield await done

    async def _event(self, request: Request) -> Event:
        return Event(request, await self._answer(request.payload))

    async def _answer(self, prompt: Prompt) -> Any:
        own, began, version = self.options, time.monotonic(), self._version
        self._rows += 1
        try:
            if self._warm is None:
                self._warm = asyncio.create_task(asyncio.sleep(own.cold))
            await asyncio.shield(self._warm)
            if prompt.sampling.prompt_logprobs is not None:
                await asyncio.sleep(own.score)
                return msgspec.structs.replace(told(prompt), versions=("",))
            await asyncio.sleep(own.token)
            first = time.monotonic()
            await asyncio.sleep(own.token * (TOKENS - 1))
            return drawn(prompt, first - began, time.monotonic() - began, version)
        finally:
            self._rows -= 1

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        await asyncio.sleep(self.options.load)
        self._version = f"{adapter}@{version}"

    async def close(self) -> None:
        self._ticking.cancel()


def main(backend: dict[str, Any], environment: float, train: float, batch: int, **options: Any) -> None:
    """Raises whatever ends the run."""
    Waits.seconds = environment
    setup = Setup(ModelSpec("tiny", kind="text"))
    common = {"env": "virtual_engine:Waits", "model": "tiny", "max_new_tokens": TOKENS, "trainer_seconds": train}
    workload = Rollouts(setup, **common, batch_groups=batch, **options)
    workload.consumer = SimulatedTrainer(train, batch, weights="elsewhere", adapter="policy")
    run(workload, Sleeping(setup, **backend), Dynamic(setup), roofline=False)


def kinds(steps: Sequence[StepRecord]) -> list[tuple[str, str]]:
    return [(step.verdict["kind"], step.verdict["why"]) for step in steps]


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
