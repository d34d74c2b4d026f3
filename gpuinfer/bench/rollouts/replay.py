"""The same prompts again, all of them at hand from the start, and answers of the same lengths: what the engine can do.

A game waits for its answers before it asks again, and the environment takes its time; here nothing waits for anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.bench.rollouts.counted import asked
from gpuinfer.errors import QueueFull, WorkError
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.rollouts.record import Group

AHEAD = 4  # prompts that are handed over for each slot: one always waits when a slot is free
LEAST_AHEAD = 64
AGAIN_S, TRIES = 0.05, 12_000  # between two tries at a queue that is full, and how many


@dataclass(frozen=True, slots=True)
class Recorded:
    """One call of a record."""

    tokens: tuple[int, ...]
    length: int  # of the answer


def calls(groups: Iterable[Group]) -> list[Recorded]:
    """All that were answered, in the order in which they were asked."""
    turns = [
        (turn.timing.asked, Recorded(prompt, len(turn.completion_tokens)))
        for group in groups
        for game in group.games
        for trajectory in game.trajectories
        for prompt, turn in asked(trajectory)
        if turn.completion_tokens
    ]
    return [one for _, one in sorted(turns, key=lambda pair: pair[0])]


class Replay(Workload):
    """Asks recorded prompts again. Log-probabilities are wanted as rollouts want them: they are part of the work."""

    def __init__(self, setup: Setup, spec: ModelSpec, sampling: Sampling, recorded: Sequence[Recorded]) -> None:
        super().__init__(setup)
        self._spec, self._sampling, self._recorded = spec, sampling, recorded
        self._done = self._input = self._output = self._cached = 0

    def model(self) -> ModelSpec:
        return self._spec

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        yield Progress(0, len(self._recorded), "rows", note="loading the model", setup=True)
        await infer.ready()
        if not self._recorded:
            raise WorkError("the record has no answers to ask for again. Play more games.")
        yield self._progress()
        asking = asyncio.create_task(self._all(infer))
        while not asking.done() and not infer.stopping.is_set():
            await asyncio.wait([asking], timeout=0.1)
            yield self._progress()
        if asking.done():
            await asking
        else:
            asking.cancel()
            await asyncio.wait([asking])
        yield self._progress()

    async def _all(self, infer: Infer) -> None:
        limits = infer.limits
        slots = limits.slots or limits.max_rows * limits.in_flight
        room = asyncio.Semaphore(max(LEAST_AHEAD, AHEAD * slots))
        async with asyncio.TaskGroup() as tasks:
            for number, one in enumerate(self._recorded):
                await room.acquire()
                tasks.create_task(self._one(infer, number, one)).add_done_callback(lambda task: room.release())

    async def _one(self, infer: Infer, number: int, one: Recorded) -> None:
        sampling = msgspec.structs.replace(
            self._sampling, constraint=None, max_tokens=one.length, min_tokens=0, ignore_eos=True
        )
        generation = await _asked(infer, Prompt(tokens=one.tokens, sampling=sampling, key=f"again{number}"))
        self._done += 1
        self._input += generation.prompt_tokens
        self._cached += generation.cached_tokens
        self._output += sum(len(answer.tokens) for answer in generation.completions)

    def _progress(self) -> Progress:
        counts = {"input_tokens": self._input, "output_tokens": self._output, "cached_tokens": self._cached}
        return Progress(self._done, len(self._recorded), "rows", counts=counts)


async def _asked(infer: Infer, prompt: Prompt) -> Generation:
    """A queue that is full is tried again."""
    for _ in range(TRIES):
        try:
            found: Any = await infer(prompt)
        except QueueFull:
            await asyncio.sleep(AGAIN_S)
        else:
            answer: Generation = found
            return answer
    raise WorkError("the backend's queue has been full for 10 minutes. Name a larger --max-queue-rows.")
