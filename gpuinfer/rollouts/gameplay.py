"""One group of games from the same start: all at once, each agent of each a coroutine that awaits its own answer.

All agents that are to speak answer at once, then the environment takes a step.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from gpuinfer.api import Infer
from gpuinfer.errors import BackendDied, BackendError, RequestError, WorkError, unwrap
from gpuinfer.generation import Sampling
from gpuinfer.rollouts.agent import POLICY, Agent, ChatEncoder, RolloutCounts, Speaker
from gpuinfer.rollouts.concurrency import ConcurrencyController, GamePlace
from gpuinfer.rollouts.guarded_environment import EnvironmentMaker, GameFailed, GuardedEnvironment
from gpuinfer.rollouts.record import Ending, Game, Group

log = logging.getLogger(__name__)


class GamePlay:
    """One attempt at one sample. `again` distinguishes the random numbers of attempts."""

    def __init__(self, player: GroupPlayer, group: str, sample: int, again: str, seed: int) -> None:
        self._player, self._plan, self._counts = player, player.plan, player.counts
        self._id, self._key = f"{group}/{sample}", f"{group}/{sample}{again}"
        self._sample, self._seed = sample, seed
        self._table = GuardedEnvironment(player.make, self._plan.step_seconds, self._counts)
        self._seats: dict[str, Agent] = {}
        self._steps = 0
        self._metrics: Mapping[str, float] = {}

    async def play(self, attempt: int) -> Game:
        """Raises what ends the whole run; what ends this game alone is its `error`."""
        async with self._player.controller.place() as place:
            began, error = time.monotonic(), ""
            ending: Ending = "error"
            try:
                ending = await self._to_its_end(place)
                if ending == "turns":
                    error = f"{self._player.make.who} has not ended a game in {self._steps} steps. Raise --max-turns."
            except BackendDied:
                raise
            except (GameFailed, RequestError, BackendError) as caught:
                error = str(caught)
            finally:
                self._counts.environment_s += self._table.seconds
                try:
                    await self._table.close()
                except GameFailed as fault:  # harms nothing: the game is over
                    log.log(logging.WARNING if not self._counts.complained else logging.INFO, "%s", fault)
                    self._counts.complained = True
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
            speaker, began = self._player.speaker(role), self._player.began
            self._seats[agent] = Agent(
                f"{self._id}/{agent}", f"{self._key}/{agent}", agent, role, speaker, self._counts, began
            )
        self._player.controller.game_started(place, len(self._seats))
        horizon = None if self._player.make.knows_horizon else self._plan.horizon
        while self._steps < self._plan.max_turns:
            if self._steps == horizon:
                return "horizon"
            if await self._one_step(place):
                return "done"
        return "turns"

    async def _one_step(self, place: GamePlace) -> bool:
        """Whether the game is over. All that are to speak answer at once."""
        asked = await self._table.observe()
        self._counts.ask(len(asked))
        self._player.controller.asking(place)
        try:
            async with asyncio.TaskGroup() as tasks:
                saying = {
                    agent: tasks.create_task(self._seats[agent].answer(self._steps, observation, self._plan.constrain))
                    for agent, observation in asked.items()
                }
                for task in saying.values():
                    task.add_done_callback(self._counts.answered)
        except BaseExceptionGroup as group:
            raise unwrap(group) from group
        outcome = await self._table.step({agent: task.result() for agent, task in saying.items()})
        for agent, reward in outcome.rewards.items():
            self._seats[agent].reward(self._steps, float(reward))
        self._metrics = outcome.metrics or self._metrics
        if outcome.remark and not self._counts.remarked:  # once: all games would say the same
            self._counts.remarked = True
            log.warning("%s: %s", self._player.make.who, outcome.remark)
        self._steps += 1
        return outcome.done


@dataclass(frozen=True)
class PlayPlan:
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
        self._infer, self.make, self.plan, self._chat = infer, make_environment, plan, chat
        self._speakers: dict[str, Speaker] = {}
        self.controller = controller or ConcurrencyController(RolloutCounts())
        self.counts = self.controller.counts

    async def play(self, number: int) -> Group:
        """Raises `WorkError` when no start can be played, and what ends the whole run."""
        began, failed, plan = time.monotonic(), list[Game](), self.plan
        for start in range(plan.attempts):
            digest = hashlib.blake2b(f"{plan.seed} {number} {start}".encode(), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
            found: list[list[Game]] = [[] for _ in range(plan.samples)]
            try:
                async with asyncio.TaskGroup() as tasks:
                    for sample in range(plan.samples):
                        tasks.create_task(self._sample(number, sample, seed, start, found[sample]))
            except BaseExceptionGroup as group:
                if not isinstance(error := unwrap(group), GameFailed):  # else this start is given up
                    raise error from group
            failed += [game for tries in found for game in tries if game.error]
            games = [tries[-1] for tries in found if tries and not tries[-1].error]
            if len(games) == plan.samples:
                return Group(
                    id=f"g{number}",
                    number=number,
                    environment=self.make.name,
                    games=tuple(games),
                    failed=tuple(failed),
                    started=began - self.began,
                    seconds=time.monotonic() - began,
                )
        raise WorkError(
            f"group {number} could not be played: {len(failed)} games ended in an error, from "
            f"{plan.attempts} starts. The last says: {failed[-1].error}"
        )

    async def _sample(self, number: int, sample: int, seed: int, start: int, found: list[Game]) -> None:
        """Adds each attempt to `found`; the last is without error, or else it raises `GameFailed`."""
        for attempt in range(self.plan.attempts):
            again = "" if not (start or attempt) else f"+{start}.{attempt}"
            game = await GamePlay(self, f"g{number}", sample, again, seed).play(attempt)
            found.append(game)
            if not game.error:
                return
        raise GameFailed(game.error)

    def speaker(self, role: str) -> Speaker:
        plan = self.plan
        if role not in self._speakers:
            temperature = plan.temperatures.get(role, plan.sampling.temperature)
            sampling = msgspec.structs.replace(plan.sampling, temperature=temperature)
            policy = Speaker(self._infer, self._chat, sampling, plan.model, plan.adapter)
            self._speakers[role] = plan.opponents.get(role, policy)
        return self._speakers[role]
