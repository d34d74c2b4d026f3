"""One group of games from the same start: all at once, each agent of each a coroutine that awaits its own answer.

All agents that are to speak answer at once, then the environment takes a step.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec

from gpuinfer.api import Infer
from gpuinfer.errors import BackendDied, BackendError, RequestError, WorkError, unwrap
from gpuinfer.generation import Sampling
from gpuinfer.rollouts.agent import POLICY, Agent, ChatEncoder, RolloutCounts, Speaker
from gpuinfer.rollouts.concurrency import ConcurrencyController, GamePlace
from gpuinfer.rollouts.environment import Observation
from gpuinfer.rollouts.guarded_environment import EnvironmentMaker, GameFailed, GuardedEnvironment
from gpuinfer.rollouts.record import Ending, Game, Group

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GameRules:
    """What all games of a run have in common. `began`: the run, on the monotonic clock."""

    make: EnvironmentMaker
    speaker: Callable[[str], Speaker]  # by role
    controller: ConcurrencyController
    began: float
    horizon: int | None  # in steps
    max_turns: int
    step_seconds: float
    constrain: bool


class GamePlay:
    """One attempt at one sample. `again` distinguishes the random numbers of attempts."""

    def __init__(self, rules: GameRules, group: str, sample: int, again: str, seed: int) -> None:
        self._rules, self._counts = rules, rules.controller.counts
        self._id, self._key = f"{group}/{sample}", f"{group}/{sample}{again}"
        self._sample, self._seed = sample, seed
        self._table = GuardedEnvironment(rules.make, rules.step_seconds, self._counts)
        self._seats: dict[str, Agent] = {}
        self._steps = 0
        self._metrics: Mapping[str, float] = {}

    async def play(self, attempt: int) -> Game:
        """Raises what ends the whole run; what ends this game alone is its `error`."""
        async with self._rules.controller.place() as place:
            began, error = time.monotonic(), ""
            ending: Ending = "error"
            try:
                ending = await self._to_its_end(place)
                if ending == "turns":
                    error = f"{self._rules.make.who} has not ended a game in {self._steps} steps. Raise --max-turns."
            except BackendDied:
                raise
            except (GameFailed, RequestError, BackendError) as caught:
                error = str(caught)
            finally:
                await self._close()
        return Game(
            sample=self._sample,
            seed=self._seed,
            ending=ending,
            trajectories=tuple(seat.trajectory() for seat in self._seats.values()),
            steps=self._steps,
            metrics=dict(self._metrics),
            error=error,
            attempt=attempt,
            seconds=time.monotonic() - began,
        )

    async def _to_its_end(self, place: GamePlace) -> Ending:
        await self._table.reset(self._seed)
        for agent in self._table.agents:
            role = self._table.roles.get(agent, POLICY)
            speaker, began = self._rules.speaker(role), self._rules.began
            self._seats[agent] = Agent(
                f"{self._id}/{agent}", f"{self._key}/{agent}", agent, role, speaker, self._counts, began
            )
        self._rules.controller.game_started(place, len(self._seats))
        while self._steps < self._rules.max_turns:
            if self._steps == self._rules.horizon:
                return "horizon"
            if await self._one_step(place):
                return "done"
        return "turns"

    async def _one_step(self, place: GamePlace) -> bool:
        """Whether the game is over."""
        outcome = await self._table.step(await self._answers(await self._table.observe(), place))
        for agent, reward in outcome.rewards.items():
            self._seats[agent].reward(self._steps, float(reward))
        self._metrics = outcome.metrics or self._metrics
        if outcome.remark and not self._counts.remarked:  # once: all games would say the same
            self._counts.remarked = True
            log.warning("%s: %s", self._rules.make.who, outcome.remark)
        self._steps += 1
        return outcome.done

    async def _answers(self, asked: Mapping[str, Observation], place: GamePlace) -> dict[str, str]:
        """Of all who are to speak, at once."""
        self._counts.ask(len(asked))
        self._rules.controller.asking(place)
        try:
            async with asyncio.TaskGroup() as tasks:
                saying = {
                    agent: tasks.create_task(self._seats[agent].answer(self._steps, observation, self._rules.constrain))
                    for agent, observation in asked.items()
                }
                for task in saying.values():
                    task.add_done_callback(self._counts.answered)
        except BaseExceptionGroup as group:
            raise unwrap(group) from group
        return {agent: task.result() for agent, task in saying.items()}

    async def _close(self) -> None:
        """What goes wrong there harms nothing: the game is over."""
        self._counts.environment_s += self._table.seconds
        try:
            await self._table.close()
        except GameFailed as error:
            log.log(logging.WARNING if not self._counts.complained else logging.INFO, "%s", error)
            self._counts.complained = True


@dataclass(frozen=True)
class PlayPlan:
    """How games are played."""

    samples: int = 1
    seed: int = 0
    horizon: int | None = None  # in steps
    max_turns: int = 1000
    step_seconds: float = 300.0
    attempts: int = 3
    constrain: bool = True
    sampling: Sampling = field(default_factory=Sampling)
    model: str = "policy"  # whose name the record bears
    adapter: str | None = None
    temperatures: Mapping[str, float] = field(default_factory=dict)  # by role
    opponents: Mapping[str, Speaker] = field(default_factory=dict)  # by role


class GroupPlayer:
    """Plays groups, any number of them at once. The same number is the same group, whatever else is played, as long as
    the weights are the same and the environment keeps to its seed.
    """

    def __init__(
        self,
        infer: Infer,
        make_environment: EnvironmentMaker,
        plan: PlayPlan,
        chat: ChatEncoder,
        controller: ConcurrencyController | None = None,
    ) -> None:
        """Without a controller all games are played at once."""
        self.began = time.monotonic()
        self._infer, self._make, self._plan, self._chat = infer, make_environment, plan, chat
        self._speakers: dict[str, Speaker] = {}
        controller = controller or ConcurrencyController(RolloutCounts())
        self.counts = controller.counts
        self._rules = GameRules(
            make=make_environment,
            speaker=self.speaker,
            controller=controller,
            began=self.began,
            horizon=plan.horizon,
            max_turns=plan.max_turns,
            step_seconds=plan.step_seconds,
            constrain=plan.constrain,
        )

    async def play(self, number: int) -> Group:
        """Raises `WorkError` when no start can be played, and what ends the whole run."""
        began, failed = time.monotonic(), list[Game]()
        for start in range(self._plan.attempts):
            seed = seed_of(self._plan.seed, number, start)
            games = await self._all_samples(number, seed, start, failed)
            if games is not None:
                return Group(
                    id=f"g{number}",
                    number=number,
                    environment=self._make.name,
                    games=tuple(games),
                    failed=tuple(failed),
                    started=began - self.began,
                    seconds=time.monotonic() - began,
                )
        raise WorkError(
            f"group {number} could not be played: {len(failed)} games ended in an error, from "
            f"{self._plan.attempts} starts. The last says: {failed[-1].error}"
        )

    async def _all_samples(self, number: int, seed: int, start: int, failed: list[Game]) -> list[Game] | None:
        """None: one of them failed at every attempt, so that this start is given up."""
        found: list[list[Game]] = [[] for _ in range(self._plan.samples)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for sample in range(self._plan.samples):
                    tasks.create_task(self._sample(number, sample, seed, start, found[sample]))
        except BaseExceptionGroup as group:
            if not isinstance(error := unwrap(group), GameFailed):
                raise error from group
        failed += [game for tries in found for game in tries if game.error]
        games = [tries[-1] for tries in found if tries and not tries[-1].error]
        return games if len(games) == self._plan.samples else None

    async def _sample(self, number: int, sample: int, seed: int, start: int, found: list[Game]) -> None:
        """Adds each attempt to `found`; the last is without error, or else it raises `GameFailed`."""
        for attempt in range(self._plan.attempts):
            again = "" if not (start or attempt) else f"+{start}.{attempt}"
            game = await GamePlay(self._rules, f"g{number}", sample, again, seed).play(attempt)
            found.append(game)
            if not game.error:
                return
        raise GameFailed(game.error)

    def speaker(self, role: str) -> Speaker:
        """Who speaks for that role."""
        plan = self._plan
        if role not in self._speakers:
            temperature = plan.temperatures.get(role, plan.sampling.temperature)
            sampling = msgspec.structs.replace(plan.sampling, temperature=temperature)
            policy = Speaker(self._infer, self._chat, sampling, plan.model, plan.adapter)
            self._speakers[role] = plan.opponents.get(role, policy)
        return self._speakers[role]


def seed_of(seed: int, number: int, start: int) -> int:
    """Of a group's games: 63 bits of the run's seed, the group's number and how many starts were given up."""
    digest = hashlib.blake2b(f"{seed} {number} {start}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
