"""The whole workload on a virtual clock: an engine, an environment and a trainer that take the time they are told to.

What is played, admitted, buffered, measured and judged is the real thing; only time is not. So what was planted is
known exactly, and no machine is too slow for it.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpuinfer.api import Limits, ModelSpec, Setup
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Prompt
from gpuinfer.rollouts.agent import ChatEncoder
from gpuinfer.rollouts.environment import Environment, Observation, Outcome
from gpuinfer.rollouts.meter import LevelIntegral
from gpuinfer.rollouts.steps import StepRecord, read_steps
from gpuinfer.rollouts.trainer import SimulatedTrainer
from gpuinfer.testing.fakes import FakeInfer, VirtualLoop
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.language import open_language
from gpuinfer.workloads.rollouts.workload import Rollouts

TOKENS = 8  # of an answer
TURNS = 2  # of a game


@dataclass(frozen=True)
class World:
    """Seconds that things take, and how much of everything there is."""

    token: float = 0.1  # of each row's forward step, whatever stands beside it
    slots: int = 16
    score: float = 0.05  # one context's reference pass, in a slot
    cold: float = 0.0  # before the engine's first step
    load: float = 0.01  # new weights
    constrain: float = 0.0  # for each answer, in which the engine does nothing else
    environment: float = 0.02  # each of its calls
    train: float = 4.0
    batch: int = 4  # groups
    depth: int = 8  # groups
    samples: int = 4
    in_flight: int | None = None
    reference: str = "none"
    groups: int = 32


class Waits(Environment):
    """Two turns of one agent, each of whose calls takes its time."""

    agents = ("one",)
    seconds = 0.0

    async def reset(self, seed: int) -> None:
        self.turn = 0

    async def observe(self) -> Mapping[str, Observation]:
        return {"one": Observation(messages=[{"role": "user", "content": "and now?"}])}

    async def step(self, answers: Mapping[str, str]) -> Outcome:
        await asyncio.sleep(self.seconds)
        self.turn += 1
        return Outcome(rewards={"one": 1.0}, done=self.turn == TURNS)


class Engine(FakeInfer):
    """Answers take `token` seconds a token in one of its slots; what it counts is what an engine counts."""

    def __init__(self, world: World) -> None:
        super().__init__(lambda request: None, Limits(world.slots, world.slots, world.slots))
        self.world, self._free = world, asyncio.Semaphore(world.slots)
        self._cutting = asyncio.Lock()
        self._rows, self._since = 0, time.monotonic()
        self._seconds: Counter[int] = Counter()  # by rows in a step
        self._constrained = 0.0
        self._warm_at: float | None = None  # once it has been asked
        self._version = ""

    async def __call__(self, payload: Any, **ways: Any) -> Any:
        async with self._free:
            self._change(1)
            try:
                return await self._answer_to(payload, time.monotonic())
            finally:
                self._change(-1)

    async def _answer_to(self, prompt: Prompt, began: float) -> Generation:
        version = self._version
        if self._warm_at is None:
            self._warm_at = began + self.world.cold
        await asyncio.sleep(max(0.0, self._warm_at - began))
        if prompt.sampling.prompt_logprobs is not None:
            await asyncio.sleep(self.world.score)
            return told(prompt)
        if self.world.constrain:
            async with self._cutting:
                await asyncio.sleep(self.world.constrain)
                self._constrained += self.world.constrain
        await asyncio.sleep(self.world.token)
        first = time.monotonic()
        await asyncio.sleep(self.world.token * (TOKENS - 1))
        return drawn(prompt, first - began, time.monotonic() - began, version)

    def _change(self, by: int) -> None:
        now = time.monotonic()
        self._seconds[self._rows] += now - self._since
        self._rows, self._since = self._rows + by, now

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        await asyncio.sleep(self.world.load)
        self._version = f"{adapter}@{version}"

    async def counted(self) -> Mapping[str, Any]:
        self._change(0)
        seconds = {rows: spent for rows, spent in self._seconds.items() if rows}
        spent = {"forward": sum(seconds.values()) - self._constrained, "constrain": self._constrained}
        batch_s = {rows: [1, spent] for rows, spent in seconds.items()}
        return {"batch_s": batch_s, "lanes": [{"name": "forward 0", "stations": spent}], "slots": self.world.slots}


def drawn(prompt: Prompt, first_s: float, seconds: float, version: str) -> Generation:
    tokens = tuple(range(65, 65 + TOKENS))
    told = tuple(Logprob(Candidate(token, -1.0, 1)) for token in tokens)
    worth = {"logprobs": told, "processed": (-1.0,) * TOKENS, "versions": ((0, version),)}
    answer = Completion(text="so", tokens=tokens, finish_reason="length", **worth)
    count = len(prompt.tokens or ())
    return Generation(completions=(answer,), prompt_tokens=count, first_token_s=first_s, seconds=seconds)


def told(prompt: Prompt) -> Generation:
    tokens = prompt.tokens or ()
    chosen = (None, *(Logprob(Candidate(token, -1.0, 1)) for token in tokens[1:]))
    return Generation(completions=(), prompt_tokens=len(tokens), prompt_logprobs=chosen)


class Loop(VirtualLoop):
    """What would go on in a thread takes no time."""

    def run_in_executor(self, executor: Any, func: Any, *arguments: Any) -> Any:
        done = self.create_future()
        try:
            done.set_result(func(*arguments))
        except Exception as error:  # noqa: BLE001  it is raised where it is awaited
            done.set_exception(error)
        return done


def run(world: World, path: Any, patched: Any) -> tuple[list[StepRecord], Mapping[str, float]]:
    """All steps of one run, and what it said of itself at its end. `patched` is pytest's monkeypatch."""
    with asyncio.Runner(loop_factory=Loop) as runner, patched.context() as clock:
        now = runner.get_loop().time
        clock.setattr(time, "monotonic", now)
        clock.setattr(LevelIntegral.__init__, "__defaults__", (now,))
        clock.setattr(Waits, "seconds", world.environment)
        facts = runner.run(_run(world, path))
    return list(read_steps(path)), facts


class Played(Rollouts):
    """The tokenizer is opened once for all runs."""

    def _chat(self, spec: ModelSpec) -> ChatEncoder:
        return ChatEncoder(_language(), self.rendering)


@functools.cache
def _language() -> Any:
    checkpoint = open_checkpoint(ModelSpec("tiny", kind="text"))
    return open_language(checkpoint.language, checkpoint.shape)


async def _run(world: World, path: Any) -> Mapping[str, float]:
    workload = Played(
        Setup(), env="virtual_engine:Waits", model="tiny", groups=world.groups, samples_per_group=world.samples,
        groups_in_flight=world.in_flight, batch_groups=world.batch, buffer_depth=world.depth,
        trainer_seconds=world.train, reference=world.reference, max_new_tokens=TOKENS, steps=path,
    )  # fmt: skip
    workload.consumer = SimulatedTrainer(world.train, world.batch, weights="elsewhere", adapter="policy")
    last = None
    async for progress in workload.run(Engine(world)):
        last = progress
    return last.facts


def lost(steps: list[StepRecord]) -> Counter[str]:
    """Seconds that each kind cost, in steps that it was named in or beside."""
    found: Counter[str] = Counter()
    for step in steps:
        if step.verdict["kind"] != "healthy":
            for kind, share in step.verdict["shares"].items():
                found[kind] += share * step.wall_s
    return found
