"""One game, from its start to its end: whoever is to speak speaks at once, then the environment takes a step."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from gpuinfer.errors import BackendDied, BackendError, RequestError, unwrap
from gpuinfer.rollouts.environment import Observation
from gpuinfer.rollouts.record import Ending, Game
from gpuinfer.workloads.rollouts.crowding import Crowd, Place
from gpuinfer.workloads.rollouts.loading import EnvironmentMaker
from gpuinfer.workloads.rollouts.speaking import POLICY, Seat, Speaker
from gpuinfer.workloads.rollouts.table import GameFailed, Table

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class GameRules:
    """What all games of a run have in common. `began`: the run, on the monotonic clock."""

    make: EnvironmentMaker
    speaker: Callable[[str], Speaker]  # by role
    crowd: Crowd
    began: float
    horizon: int | None  # in steps
    max_turns: int
    step_seconds: float
    constrain: bool


class GamePlay:
    """One attempt at one sample. `again` makes its random numbers others than those of the attempt before."""

    def __init__(self, rules: GameRules, group: str, sample: int, again: str, seed: int) -> None:
        self._rules, self._counts = rules, rules.crowd.counts
        self._id, self._key = f"{group}/{sample}", f"{group}/{sample}{again}"
        self._sample, self._seed = sample, seed
        self._table = Table(rules.make, rules.step_seconds, self._counts)
        self._seats: dict[str, Seat] = {}
        self._steps = 0
        self._metrics: Mapping[str, float] = {}

    async def play(self, attempt: int) -> Game:
        """Raises what ends the whole run; what ends this game alone is its `error`."""
        async with self._rules.crowd.place() as place:
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

    async def _to_its_end(self, place: Place) -> Ending:
        await self._table.reset(self._seed)
        self._seats = {agent: self._seat(agent) for agent in self._table.agents}
        self._rules.crowd.seated(place, len(self._seats))
        while self._steps < self._rules.max_turns:
            if self._steps == self._rules.horizon:
                return "horizon"
            if await self._one_step(place):
                return "done"
        return "turns"

    def _seat(self, agent: str) -> Seat:
        role = self._table.roles.get(agent, POLICY)
        speaker, began = self._rules.speaker(role), self._rules.began
        return Seat(f"{self._id}/{agent}", f"{self._key}/{agent}", agent, role, speaker, self._counts, began)

    async def _one_step(self, place: Place) -> bool:
        """Whether the game is over."""
        outcome = await self._table.step(await self._answers(await self._table.observe(), place))
        for agent, reward in outcome.rewards.items():
            self._seats[agent].reward(self._steps, float(reward))
        self._metrics = outcome.metrics or self._metrics
        self._say(outcome.remark)
        self._steps += 1
        return outcome.done

    def _say(self, remark: str) -> None:
        """Once: all games would say the same."""
        if remark and not self._counts.remarked:
            self._counts.remarked = True
            log.warning("%s: %s", self._rules.make.who, remark)

    async def _answers(self, asked: Mapping[str, Observation], place: Place) -> dict[str, str]:
        """Of all who are to speak, at once."""
        self._counts.ask(len(asked))
        self._rules.crowd.asking(place)
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
