"""One group of games from the same start: all at once, each agent of each a coroutine that awaits its own answer.

A game that raises, answers nonsense or never ends is recorded and played again with other random numbers. When one has
failed so often that it is the start's fault, the whole group is played from another start.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from gpuinfer.api import Infer
from gpuinfer.errors import WorkError, unwrap
from gpuinfer.generation import Sampling
from gpuinfer.rollouts.record import Game, Group
from gpuinfer.workloads.rollouts.conversing import Conversing
from gpuinfer.workloads.rollouts.crowding import Crowd
from gpuinfer.workloads.rollouts.game import GamePlay, GameRules
from gpuinfer.workloads.rollouts.loading import EnvironmentMaker
from gpuinfer.workloads.rollouts.speaking import Counts, Speaker
from gpuinfer.workloads.rollouts.table import GameFailed


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

    def __init__(
        self,
        infer: Infer,
        make_environment: EnvironmentMaker,
        plan: PlayPlan,
        chat: Conversing,
        crowd: Crowd | None = None,
    ) -> None:
        """Without a crowd all games that are asked for are played at once."""
        self.began = time.monotonic()
        self._infer, self._make, self._plan, self._chat = infer, make_environment, plan, chat
        self._speakers: dict[str, Speaker] = {}
        crowd = crowd or Crowd(Counts())
        self.counts = crowd.counts
        self._rules = GameRules(
            make=make_environment,
            speaker=self.speaker,
            crowd=crowd,
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
        if (known := self._speakers.get(role)) is None:
            known = self._speakers[role] = self._plan.opponents.get(role) or self._policy(role)
        return known

    def _policy(self, role: str) -> Speaker:
        plan = self._plan
        temperature = plan.temperatures.get(role, plan.sampling.temperature)
        sampling = msgspec.structs.replace(plan.sampling, temperature=temperature)
        return Speaker(self._infer, self._chat, sampling, plan.model, plan.adapter)


def seed_of(seed: int, number: int, start: int) -> int:
    """Of a group's games: 63 bits of the run's seed, the group's number and how many starts were given up."""
    digest = hashlib.blake2b(f"{seed} {number} {start}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
