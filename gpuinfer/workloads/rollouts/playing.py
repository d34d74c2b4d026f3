"""One group of games from the same start: all at once, each agent of each a coroutine that awaits its own answer.

A game that raises, answers nonsense or never ends is recorded and played again with other random numbers. When one has
failed so often that it is the start's fault, the whole group is played from another start.
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
from gpuinfer.rollouts.environment import Observation
from gpuinfer.rollouts.record import Ending, Game, Group
from gpuinfer.workloads.rollouts.conversing import Conversing
from gpuinfer.workloads.rollouts.loading import EnvironmentMaker
from gpuinfer.workloads.rollouts.speaking import POLICY, Counts, Seat, Speaker
from gpuinfer.workloads.rollouts.table import GameFailed, Table

log = logging.getLogger(__name__)


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


class Player:
    """Plays groups, any number of them at once. The same number is the same group, whatever else is played, as long as
    the weights are the same and the environment keeps to its seed.
    """

    def __init__(self, infer: Infer, make_environment: EnvironmentMaker, plan: PlayPlan, chat: Conversing) -> None:
        self.counts = Counts()
        self.began = time.monotonic()
        self._infer, self._make, self._plan, self._chat = infer, make_environment, plan, chat
        self._speakers: dict[str, Speaker] = {}
        self._warned = False

    async def play(self, number: int, begun: Callable[[], None] = lambda: None) -> Group:
        """Raises `WorkError` when no start can be played, and what ends the whole run.

        `begun` is called whenever one of its games is about to ask for the first time.
        """
        began, failed = time.monotonic(), list[Game]()
        for start in range(self._plan.attempts):
            seed = seed_of(self._plan.seed, number, start)
            games = await self._all_samples(number, seed, start, failed, begun)
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

    async def _all_samples(
        self, number: int, seed: int, start: int, failed: list[Game], begun: Callable[[], None]
    ) -> list[Game] | None:
        """None: one of them failed at every attempt, so that this start is given up."""
        found: list[list[Game]] = [[] for _ in range(self._plan.samples)]
        try:
            async with asyncio.TaskGroup() as tasks:
                for sample in range(self._plan.samples):
                    tasks.create_task(self._sample(number, sample, seed, start, found[sample], begun))
        except BaseExceptionGroup as group:
            if not isinstance(error := unwrap(group), GameFailed):
                raise error from group
        failed += [game for tries in found for game in tries if game.error]
        games = [tries[-1] for tries in found if tries and not tries[-1].error]
        return games if len(games) == self._plan.samples else None

    async def _sample(
        self, number: int, sample: int, seed: int, start: int, found: list[Game], begun: Callable[[], None]
    ) -> None:
        """Adds each attempt to `found`; the last is without error, or else it raises `GameFailed`."""
        for attempt in range(self._plan.attempts):
            again = "" if not (start or attempt) else f"+{start}.{attempt}"
            game = await GamePlay(self, f"g{number}", sample, again, seed, begun).play(attempt)
            found.append(game)
            if not game.error:
                return
        raise GameFailed(game.error)

    def speaker(self, role: str) -> Speaker:
        """Who speaks for that role."""
        if (known := self._speakers.get(role)) is None:
            known = self._speakers[role] = self._plan.opponents.get(role) or self._policy(role)
        return known

    def _policy(self, role: str) -> Speaker:
        plan = self._plan
        temperature = plan.temperatures.get(role, plan.sampling.temperature)
        sampling = msgspec.structs.replace(plan.sampling, temperature=temperature)
        return Speaker(self._infer, self._chat, sampling, plan.model, plan.adapter)

    def warn(self, error: GameFailed) -> None:
        """Of what goes wrong when a game is over already; once, as it would be the same for each."""
        if not self._warned:
            self._warned = True
            log.warning("%s", error)


class GamePlay:
    """One attempt at one sample."""

    def __init__(
        self, player: Player, group: str, sample: int, again: str, seed: int, begun: Callable[[], None]
    ) -> None:
        self._player, self._plan = player, player._plan
        self._id, self._key = f"{group}/{sample}", f"{group}/{sample}{again}"
        self._sample, self._seed, self._begun = sample, seed, begun
        self._table = Table(player._make, self._plan.step_seconds)
        self._seats: dict[str, Seat] = {}
        self._steps = 0
        self._metrics: Mapping[str, float] = {}

    async def play(self, attempt: int) -> Game:
        """Raises what ends the whole run; what ends this game alone is its `error`."""
        began, error = time.monotonic(), ""
        ending: Ending = "error"
        try:
            ending = await self._to_its_end()
            if ending == "turns":
                error = f"{self._player._make.who} has not ended a game in {self._steps} steps. Raise --max-turns."
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

    async def _to_its_end(self) -> Ending:
        await self._table.reset(self._seed)
        for agent in self._table.agents:
            role = self._table.roles.get(agent, POLICY)
            self._seats[agent] = Seat(
                f"{self._id}/{agent}",
                f"{self._key}/{agent}",
                agent,
                role,
                self._player.speaker(role),
                self._player.counts,
                self._player.began,
            )
        while self._steps < self._plan.max_turns:
            if self._steps == self._plan.horizon:
                return "horizon"
            if await self._one_step():
                return "done"
        return "turns"

    async def _one_step(self) -> bool:
        """Whether the game is over."""
        asked = await self._table.observe()
        if not self._steps:
            self._begun()
        answers = await self._answers(asked)
        outcome = await self._table.step(answers)
        for agent, reward in outcome.rewards.items():
            self._seats[agent].reward(self._steps, float(reward))
        self._metrics = outcome.metrics or self._metrics
        self._steps += 1
        return outcome.done

    async def _answers(self, asked: Mapping[str, Observation]) -> dict[str, str]:
        """Of all who are to speak, at once."""
        try:
            async with asyncio.TaskGroup() as tasks:
                saying = {
                    agent: tasks.create_task(self._seats[agent].answer(self._steps, observation, self._plan.constrain))
                    for agent, observation in asked.items()
                }
        except BaseExceptionGroup as group:
            raise unwrap(group) from group
        return {agent: task.result() for agent, task in saying.items()}

    async def _close(self) -> None:
        self._player.counts.environment_s += self._table.seconds
        try:
            await self._table.close()
        except GameFailed as error:
            self._player.warn(error)


def seed_of(seed: int, number: int, start: int) -> int:
    """Of a group's games: 63 bits of the run's seed, the group's number and how many starts were given up."""
    digest = hashlib.blake2b(f"{seed} {number} {start}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
