"""Rollouts of games of recorded lengths on a virtual clock: the workload itself, with engines that take the time that
`Engine` says. So a run takes seconds, and any machine gives the same.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from gpuinfer.api import Limits, ModelSpec, Priority, Setup
from gpuinfer.generation import Candidate, Completion, Generation, Logprob, Prompt
from gpuinfer.rollouts import files
from gpuinfer.rollouts.environment import Environment, Observation, Outcome
from gpuinfer.rollouts.meter import LevelIntegral
from gpuinfer.rollouts.steps import StepRecord, read_steps
from gpuinfer.testing.fakes import FakeInfer, VirtualLoop
from gpuinfer.workloads.rollouts.workload import Rollouts

ENVIRONMENT_S = 0.01  # of a phase, on the one thread of all games
LOGPROB = Logprob(Candidate(0, -1.0, 1))


# What games are like


def shapes_of(record: Path) -> dict[str, Any]:
    """Of each game its phases; of each phase the tokens of prompt and answer of each power that was asked."""
    games, prompts, cached = [], 0, 0
    for group in files.read(record):
        for game in group.games:
            phases: dict[int, dict[str, Any]] = {}
            for trajectory in game.trajectories:
                for turn in trajectory.turns:
                    name = str(turn.messages[-1]["content"]).partition("\n")[0]
                    phase = phases.setdefault(turn.step, {"phase": name, "powers": []})
                    phase["powers"].append([len(turn.prompt_tokens), len(turn.completion_tokens)])
                    prompts, cached = prompts + len(turn.prompt_tokens), cached + turn.cached_tokens
            games.append([phases[step] for step in sorted(phases)])
    return {"games": games, "cached_share": round(cached / prompts, 3)}


@lru_cache(maxsize=4)
def read_shapes(path: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


class ShapedGame(Environment):
    """A game of the lengths of a recorded one: `max_tokens` says how long an answer will be, the message how long its
    prompt is.
    """

    class Options(BaseModel):
        shapes: str  # a file of recorded lengths

    agents = tuple(f"power{number}" for number in range(7))
    _thread: asyncio.Lock | None = None  # all games share one, as Diplomacy's engine does

    def __init__(self, **options: Any) -> None:
        self._games = read_shapes(self.Options(**options).shapes)["games"]

    async def reset(self, seed: int) -> None:
        self._phases = random.Random(seed).choice(self._games)
        self._at = 0

    async def observe(self) -> Mapping[str, Observation]:
        powers = zip(self.agents, self._phases[self._at]["powers"], strict=False)
        return {
            power: Observation([{"role": "user", "content": str(prompt)}], anew=True, max_tokens=max(1, answer))
            for power, (prompt, answer) in powers
        }

    async def step(self, answers: Mapping[str, str]) -> Outcome:
        async with ShapedGame._thread or asyncio.Lock():
            await asyncio.sleep(ENVIRONMENT_S)
        self._at += 1
        done = self._at == len(self._phases)
        return Outcome(rewards=dict.fromkeys(self.agents, 1 / 7) if done else {}, done=done)


class LengthEncoder:
    """In the place of a tokenizer: a message that says how many tokens it has."""

    async def added(self, conversation: Any, observation: Observation) -> tuple[int, ...]:
        conversation.tokens, conversation.messages = (), [*observation.messages]
        return (0,) * int(str(observation.messages[-1]["content"]))

    def close(self) -> None: ...


class ShapedRollouts(Rollouts):
    """The workload itself, without a tokenizer."""

    def _chat(self, spec: ModelSpec) -> Any:
        return LengthEncoder()


# Engines on a virtual clock


@dataclass(frozen=True)
class Engine:
    """A continuous batcher: each step gives every row a token, and takes in prompts."""

    slots: int = 16
    step_s: float = 0.020  # however many rows
    row_s: float = 0.00025  # of each row in the step
    prompt_s: float = 0.0001  # of each prompt token that no cache has
    cached: float = 0.9  # of the prompt tokens of play; those of a reference pass are all computed


@dataclass
class Row:
    """A prompt in an engine, or waiting for one."""

    prompt: Prompt
    asked: float
    answered: asyncio.Future[Generation]
    gives_way: bool  # to all others that wait
    admitted: float = 0.0
    first: float = 0.0
    left: int = 0  # tokens

    @property
    def scores(self) -> bool:
        """It is a reference pass, which draws nothing."""
        return self.prompt.sampling.prompt_logprobs is not None


@dataclass
class RunningEngine:
    rows: list[Row] = field(default_factory=list)
    waiting: list[Row] = field(default_factory=list)
    at_work: asyncio.Task[None] | None = None
    seconds: Counter[int] = field(default_factory=Counter)  # by rows in a step


class Engines(FakeInfer):
    """Several engines; a prompt goes to the one that has the least to do. `drawn`: (time, tokens drawn so far)."""

    def __init__(self, engine: Engine, count: int) -> None:
        slots = engine.slots * count
        super().__init__(lambda request: None, Limits(slots, slots, slots))
        self._engine, self._running = engine, [RunningEngine() for _ in range(count)]
        self.drawn: list[tuple[float, int]] = [(time.monotonic(), 0)]

    async def __call__(self, payload: Any, **ways: Any) -> Any:
        row = Row(
            payload, time.monotonic(), asyncio.get_running_loop().create_future(), ways.get("priority") is Priority.LOW
        )
        engine = min(self._running, key=lambda one: len(one.rows) + len(one.waiting))
        place = len(engine.waiting)
        if not row.gives_way:
            place = next((at for at, one in enumerate(engine.waiting) if one.gives_way), place)
        engine.waiting.insert(place, row)
        if engine.at_work is None or engine.at_work.done():
            engine.at_work = asyncio.create_task(self._work(engine))
        await asyncio.wait({row.answered, engine.at_work}, return_when=asyncio.FIRST_COMPLETED)
        if not row.answered.done():
            engine.at_work.result()  # which raises
        return row.answered.result()

    async def _work(self, engine: RunningEngine) -> None:
        model = self._engine
        while engine.rows or engine.waiting:
            room = model.slots - len(engine.rows)
            taken, engine.waiting = engine.waiting[:room], engine.waiting[room:]
            computed = 0.0
            for row in taken:
                row.admitted, row.left = time.monotonic(), 0 if row.scores else row.prompt.sampling.max_tokens
                computed += len(row.prompt.tokens or ()) * (1.0 if row.scores else 1 - model.cached)
            engine.rows += taken
            rows = len(engine.rows)
            took = model.step_s + model.row_s * rows + model.prompt_s * computed
            await asyncio.sleep(took)
            engine.seconds[rows] += took  # type: ignore[assignment]  # seconds
            self._give_tokens(engine)

    def _give_tokens(self, engine: RunningEngine) -> None:
        now, drew = time.monotonic(), 0
        for row in engine.rows:
            drew += not row.scores
            row.first, row.left = row.first or now, row.left - 1
            if row.left <= 0 and not row.answered.done():
                row.answered.set_result(self._generation(row, now))
        engine.rows = [row for row in engine.rows if row.left > 0]
        self.drawn.append((now, self.drawn[-1][1] + drew))

    def _generation(self, row: Row, now: float) -> Generation:
        prompt, tokens = row.prompt, len(row.prompt.tokens or ())
        if row.scores:
            return Generation(completions=(), prompt_tokens=tokens, prompt_logprobs=(None, *(LOGPROB,) * (tokens - 1)))
        count = prompt.sampling.max_tokens
        answer = Completion(
            text="", tokens=(0,) * count, finish_reason="length", logprobs=(LOGPROB,) * count, processed=(-1.0,) * count
        )
        cached = int(tokens * self._engine.cached)
        times = {"first_token_s": row.first - row.admitted, "seconds": now - row.admitted}
        return Generation(completions=(answer,), prompt_tokens=tokens, cached_tokens=cached, **times)

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None: ...

    async def counted(self) -> Mapping[str, Any]:
        seconds: Counter[int] = Counter()
        for engine in self._running:
            seconds.update(engine.seconds)
        batch_s = {rows: [1, spent / len(self._running)] for rows, spent in seconds.items()}
        lanes = [{"name": "forward 0", "stations": {"forward": sum(seconds.values()) / len(self._running)}}]
        return {"batch_s": batch_s, "lanes": lanes, "slots": self.limits.slots}

    def tokens_per_s(self) -> float:
        """Drawn in full swing: between the first and the last tenth of all tokens."""
        most = self.drawn[-1][1]
        middle = [(at, count) for at, count in self.drawn if 0.1 * most <= count <= 0.9 * most]
        (began, first), (ended, last) = middle[0], middle[-1]
        return (last - first) / (ended - began)


class Loop(VirtualLoop):
    """What would go on in a thread takes no time."""

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *arguments: Any) -> Any:
        done = self.create_future()
        done.set_result(func(*arguments))
        return done


@contextmanager
def virtual_time(now: Callable[[], float]) -> Iterator[None]:
    """`time.monotonic` reads the virtual clock meanwhile."""
    real, integral = time.monotonic, LevelIntegral.__init__.__defaults__
    time.monotonic = now  # type: ignore[assignment]
    LevelIntegral.__init__.__defaults__ = (now,)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        time.monotonic = real
        LevelIntegral.__init__.__defaults__ = integral  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Played:
    """What came of one run. Seconds are virtual."""

    tokens_per_s: float  # drawn, in full swing
    ready_per_s: float  # drawn, until the last group was ready, its reference pass included
    group_s: float  # from the start of a group until it is ready, its reference pass included; the mean
    steps: Sequence[StepRecord]

    def settled(self) -> Sequence[StepRecord]:
        """Steps between the first rollouts and the last groups, which are alone."""
        return [step for step in self.steps[2:] if not step.tail_s] or self.steps

    @property
    def step_s(self) -> float:
        """Of the trainer."""
        return statistics.fmean(step.wall_s for step in self.settled())

    @property
    def waited(self) -> float:
        """The share of the trainer's time in which it waited."""
        steps = self.settled()
        return sum(step.wait_s for step in steps) / sum(step.wall_s for step in steps)

    @property
    def staleness(self) -> float:
        """In versions."""
        return statistics.fmean(step.staleness_mean for step in self.settled())


def play(shapes: Path, engines: int, *, slots: int = Engine.slots, **options: Any) -> Played:
    """One run of the workload on so many engines; `options` are its own."""
    engine = Engine(slots, cached=read_shapes(str(shapes))["cached_share"])
    with tempfile.TemporaryDirectory() as scratch, asyncio.Runner(loop_factory=Loop) as runner:
        steps = Path(scratch, "steps.jsonl")
        if "trainer_seconds" in options:
            options["steps"] = steps
        given = {"samples_per_group": 6, "model": "tiny", "max_new_tokens": 256, **options}
        given["env"], given["env_option"] = "rollouts_virtual:ShapedGame", [f"shapes={shapes}"]
        with virtual_time(runner.get_loop().time):
            run = runner.run(_play(Engines(engine, engines), given))
        found = tuple(read_steps(steps)) if steps.exists() else ()
    return Played(*run, found)


async def _play(engines: Engines, options: Mapping[str, Any]) -> tuple[float, float, float]:
    ShapedGame._thread = asyncio.Lock()
    workload = ShapedRollouts(Setup(), **options)
    began, last = time.monotonic(), None
    async for progress in workload.run(engines):
        last = progress
    elapsed_s = time.monotonic() - began
    under_way = last.facts["groups_in_flight"] * elapsed_s / max(1, last.done)  # by Little's law
    return engines.tokens_per_s(), engines.drawn[-1][1] / elapsed_s, under_way
