"""Recorded games again: counted in tokens, replayed as prompts that are all at hand from the start (what the engine can
do), or played with the recorded answers forced while the model draws as much as it did, so that a run without
constraints meets the same positions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import msgspec

from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.errors import QueueFull, WorkError
from gpuinfer.generation import Generation, Prompt, Sampling
from gpuinfer.rollouts.meter import InferWrapper
from gpuinfer.rollouts.record import Game, Group, Trajectory, Turn

Asked = tuple[tuple[int, ...], Turn]
"""The whole prompt of a turn, and the turn."""


@dataclass
class Tokens:
    """Of some calls together."""

    calls: int = 0
    prompt: int = 0  # all that the model was given, what it had been given before included
    cached: int = 0  # of these, what had been computed for another prompt
    completion: int = 0

    def add(self, prompt: int, turn: Turn) -> None:
        self.calls += 1
        self.prompt += prompt
        self.cached += turn.cached_tokens
        self.completion += len(turn.completion_tokens)


def recorded_calls(trajectory: Trajectory) -> Iterable[Asked]:
    """Every turn with its whole prompt, in order."""
    for _, turns in trajectory.contexts():
        tokens: tuple[int, ...] = ()
        for turn in turns:
            tokens += turn.prompt_tokens
            yield tokens, turn
            tokens += turn.completion_tokens


def tokens_by_step(game: Game) -> dict[str, Tokens]:
    return _counted(game, lambda trajectory, turn: f"step {turn.step + 1}")


def tokens_by_agent(game: Game) -> dict[str, Tokens]:
    return _counted(game, lambda trajectory, turn: trajectory.agent)


def tokens_of_game(game: Game) -> Tokens:
    return _counted(game, lambda trajectory, turn: "").get("", Tokens())


def _counted(game: Game, key: Callable[[Trajectory, Turn], str]) -> dict[str, Tokens]:
    """In the order of the steps."""
    turns = [
        (trajectory, prompt, turn) for trajectory in game.trajectories for prompt, turn in recorded_calls(trajectory)
    ]
    found: dict[str, Tokens] = {}
    for trajectory, prompt, turn in sorted(turns, key=lambda one: one[2].step):
        found.setdefault(key(trajectory, turn), Tokens()).add(len(prompt), turn)
    return found


AHEAD = 4  # prompts that are handed over for each slot: one always waits when a slot is free
LEAST_AHEAD = 64
AGAIN_S, TRIES = 0.05, 12_000  # between two tries at a queue that is full, and how many


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """One call of a record."""

    tokens: tuple[int, ...]
    length: int  # of the answer


def calls(groups: Iterable[Group]) -> list[RecordedCall]:
    """All answered calls, in the order of their requests."""
    turns = [
        (turn.timing.asked, RecordedCall(prompt, len(turn.completion_tokens)))
        for group in groups
        for game in group.games
        for trajectory in game.trajectories
        for prompt, turn in recorded_calls(trajectory)
        if turn.completion_tokens
    ]
    return [one for _, one in sorted(turns, key=lambda pair: pair[0])]


class Replay(Workload):
    """Asks recorded prompts again. Log-probabilities are wanted as rollouts want them: they are part of the work."""

    def __init__(self, setup: Setup, spec: ModelSpec, sampling: Sampling, recorded: Sequence[RecordedCall]) -> None:
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
        requests = asyncio.create_task(self._all(infer))
        while not requests.done() and not infer.stopping.is_set():
            await asyncio.wait([requests], timeout=0.1)
            yield self._progress()
        if requests.done():
            await requests
        else:
            requests.cancel()
            await asyncio.wait([requests])
        yield self._progress()

    async def _all(self, infer: Infer) -> None:
        limits = infer.limits
        slots = limits.slots or limits.max_rows * limits.in_flight
        room = asyncio.Semaphore(max(LEAST_AHEAD, AHEAD * slots))
        async with asyncio.TaskGroup() as tasks:
            for number, one in enumerate(self._recorded):
                await room.acquire()
                tasks.create_task(self._one(infer, number, one)).add_done_callback(lambda task: room.release())

    async def _one(self, infer: Infer, number: int, one: RecordedCall) -> None:
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


@dataclass(frozen=True, slots=True)
class RecordedAnswers:
    """An answer of a record."""

    text: str
    length: int  # in tokens


def recorded_answers(groups: Iterable[Group]) -> dict[str, RecordedAnswers]:
    """All that was answered, by the prompt's key: group/sample/agent/number of the turn."""
    return {
        f"{trajectory.id}/{number}": RecordedAnswers(turn.text, len(turn.completion_tokens))
        for group in groups
        for game in group.games
        for trajectory in game.trajectories
        for number, turn in enumerate(trajectory.turns)
    }


class ForcedReplay(Workload):
    """Rollouts `own` of the same seed and settings as the record, with the recorded answers."""

    def __init__(self, own: Workload, answers: Mapping[str, RecordedAnswers]) -> None:
        super().__init__(own.setup)
        self._own, self._answers = own, answers

    def model(self) -> ModelSpec | None:
        return self._own.model()

    @property
    def deterministic(self) -> bool:
        return self._own.deterministic

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        async for progress in self._own.run(cast(Infer, ForcedInfer(infer, self._answers))):
            yield progress


class ForcedInfer(InferWrapper):
    """Draws as many tokens as the record has, and says what it says."""

    def __init__(self, own: Infer, answers: Mapping[str, RecordedAnswers]) -> None:
        super().__init__(own)
        self._answers = answers

    async def __call__(self, payload: Any, **ways: Any) -> Any:
        if (answer := self._answers.get(payload.key)) is None:
            raise WorkError(
                f"the record has no answer to {payload.key}: the games have gone another way than when they were "
                "recorded. Compare with an environment that keeps to its seed."
            )
        free = msgspec.structs.replace(
            payload.sampling, constraint=None, max_tokens=answer.length, min_tokens=0, ignore_eos=True
        )
        found: Generation = await self._own(msgspec.structs.replace(payload, sampling=free), **ways)
        replaced = tuple(msgspec.structs.replace(one, text=answer.text) for one in found.completions)
        return msgspec.structs.replace(found, completions=replaced)
