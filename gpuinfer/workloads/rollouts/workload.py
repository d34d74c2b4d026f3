"""Rollouts: the workload that plays an environment with a model, many games at once, and keeps the record of it."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from gpuinfer import errors
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.errors import UsageError
from gpuinfer.generation import MOST_TEMPERATURE
from gpuinfer.host.following import followed
from gpuinfer.openai.options import check_model, model_of, rendering_of, sampling_of, try_out
from gpuinfer.workloads.rollouts.conversing import Conversing
from gpuinfer.workloads.rollouts.feeding import Feed, Open
from gpuinfer.workloads.rollouts.keeping import Keeper, Nowhere
from gpuinfer.workloads.rollouts.loading import open_environment
from gpuinfer.workloads.rollouts.options import RolloutsOptions
from gpuinfer.workloads.rollouts.playing import Player, PlayPlan
from gpuinfer.workloads.rollouts.running import Loop, NoReference, NoTrainer, Tally

log = logging.getLogger(__name__)


class Rollouts(Workload):
    """Play an environment with a model, all agents of many games at once; write the record for training."""

    class Options(RolloutsOptions):
        """They stand in a file of their own."""

    options: Options
    goes_on_by, writes_to = ("resume",), ("out", "steps")
    max_failures = 1.0  # a game that fails is played again, and where none succeeds the run has failed anyway

    def __init__(self, setup: Setup | None = None, /, **options: Any) -> None:
        super().__init__(setup, **options)
        own = self.options
        check_model(own, "rollouts")
        if own.env is None:
            raise UsageError("rollouts needs an environment. Give --env arithmetic, or --env module:factory.")
        if own.resume and own.out is None:
            raise UsageError("--resume needs to know where the record is. Add --out DIR.")
        self.environment = open_environment(own.env, own.env_option, own.horizon)
        self.sampling = sampling_of(own, logprobs=0, processed_logprobs=True)
        self.rendering = rendering_of(own)
        self.temperatures = temperatures(own.role_temperature)
        self._groups: int | None = own.groups  # None: without end

    def trial(self, setup: Setup, **changes: Any) -> Rollouts:
        """Games without end, to nowhere."""
        nowhere = {"out": None, "resume": False, "steps": None, "listen": None}
        played = Rollouts(setup, **{**self.options.model_dump(), **nowhere, **changes})
        played._groups = None
        return played

    @property
    def deterministic(self) -> bool:
        return self.options.deterministic

    def model(self) -> ModelSpec:
        return model_of(self.options, self.options.batch_size)

    def plan(self) -> PlayPlan:
        own = self.options
        return PlayPlan(
            samples=own.samples_per_group,
            seed=self.setup.seed,
            horizon=None if self.environment.knows_horizon else own.horizon,
            max_turns=own.max_turns,
            step_seconds=own.step_seconds,
            attempts=own.attempts,
            constrain=own.constrain,
            sampling=self.sampling,
            model=self.model().name,
            temperatures=self.temperatures,
        )

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        preparing = asyncio.create_task(self._prepare(infer))
        async for _ in followed(preparing, infer.stopping):
            yield Progress(0, note="loading the model", setup=True)
        if preparing.cancelled():
            return
        chat, keeper = preparing.result()
        player = Player(infer, self.environment, self.plan(), chat)
        loop = self._loop(infer, player, keeper)
        yield self._progress(loop.tally, player)  # the run's clock starts
        running = asyncio.create_task(loop.run())
        try:
            async for _ in followed(running, infer.stopping):
                yield self._progress(loop.tally, player)
        except BaseExceptionGroup as group:
            raise errors.unwrap(group) from group
        finally:
            chat.close()
            await keeper.close()
        self._say(loop.tally, stopped=running.cancelled())
        yield self._progress(loop.tally, player)

    async def _prepare(self, infer: Infer) -> tuple[Conversing, Keeper]:
        """Everything that may take a while before the first game."""
        await asyncio.to_thread(try_out, self.model(), self.sampling)
        chat = await asyncio.to_thread(self._chat, self.model())
        await infer.ready()
        return chat, Nowhere()

    def _chat(self, spec: ModelSpec) -> Conversing:
        from gpuinfer.text.checkpoint import open_checkpoint
        from gpuinfer.text.language import open_language

        checkpoint = open_checkpoint(spec)
        language = open_language(checkpoint.language_files(), checkpoint.shape)
        return Conversing(language, self.rendering, plain=self.options.plain)

    def _loop(self, infer: Infer, player: Player, keeper: Keeper) -> Loop:
        own, limits, gate = self.options, infer.limits, Open()
        feed = Feed(
            self._numbers(keeper.done),
            player.counts,
            gate,
            slots=limits.slots or limits.max_rows * limits.in_flight,
            samples=own.samples_per_group,
            limit=own.groups_in_flight,
        )
        return Loop(feed, gate, player, NoReference(), keeper, NoTrainer())

    def _numbers(self, done: frozenset[int]) -> Iterator[int]:
        numbers = itertools.count() if self._groups is None else iter(range(self._groups))
        return (number for number in numbers if number not in done)

    def _progress(self, tally: Tally, player: Player) -> Progress:
        counts = player.counts
        return Progress(
            tally.done,
            self._groups,
            "groups",
            counts={
                "games": tally.games,
                "input_tokens": counts.input_tokens,
                "output_tokens": counts.output_tokens,
                "cached_tokens": counts.cached_tokens,
            },
            note=f"{tally.failed} games played again" if tally.failed else "",
            before=tally.before,
        )

    def _say(self, tally: Tally, stopped: bool) -> None:
        if tally.failed:
            log.warning(
                "%d games ended in an error and were played again; the record has them as failed.", tally.failed
            )
        if stopped and self.options.out is not None:
            log.warning("stopped; what was played is in %s. Run it again with --resume to go on.", self.options.out)


def temperatures(given: list[str]) -> Mapping[str, float]:
    """`role=T` of each flag. Raises `UsageError`."""
    found = {}
    for word in given:
        role, _, value = word.rpartition("=")
        try:
            number = float(value)
        except ValueError:
            number = -1.0
        if not role or not 0 <= number <= MOST_TEMPERATURE:
            raise UsageError(f"--role-temperature {word}: not a role and its temperature. Write role=0.7.")
        found[role] = number
    return found
