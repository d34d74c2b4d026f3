"""Rollouts: the workload that plays an environment with a model, many games at once, and keeps the record of it."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec

from gpuinfer import errors
from gpuinfer.api import Infer, ModelSpec, Progress, Setup, Workload
from gpuinfer.division import Division, RangeFeed
from gpuinfer.errors import UsageError
from gpuinfer.host.event_loop import follow_task
from gpuinfer.rollouts.agent import POLICY, ChatEncoder, RolloutCounts, Speaker
from gpuinfer.rollouts.concurrency import ConcurrencyController, GroupFeed
from gpuinfer.rollouts.files import Writer
from gpuinfer.rollouts.gameplay import GroupPlayer, PlayPlan
from gpuinfer.rollouts.guarded_environment import open_environment
from gpuinfer.rollouts.reference_model import ReferenceModel, check_tokens
from gpuinfer.rollouts.rollout_loop import RolloutLoop, RolloutTally, report_facts
from gpuinfer.rollouts.steps import StepsFile
from gpuinfer.rollouts.trainer import Consumer, SimulatedTrainer
from gpuinfer.rollouts.trainer_server import TrainerServer
from gpuinfer.rollouts.training import Training, slots_of
from gpuinfer.serving.openai.model_options import (
    TEXT_MODELS,
    arithmetic,
    check_model,
    check_with_model,
    model_fingerprint,
    prepare_model,
    rendering_of,
    sampling_of,
    text_model,
)
from gpuinfer.text import text_options
from gpuinfer.workloads.rollouts.options import (
    START,
    RoleOpponent,
    Roles,
    RolloutsOptions,
    TrainingOptions,
    check_training,
    server_plan,
    training_plan,
)
from gpuinfer.workloads.rollouts.rollouts_division import (
    FeedKeeper,
    RangeGroupFeed,
    RolloutsDivision,
    pack_groups,
    set_late,
)

log = logging.getLogger(__name__)


@dataclass
class RolloutStage:
    """What a run has ready before its first game."""

    chat: ChatEncoder
    writer: Writer | None = None
    reference: ReferenceModel | None = None
    opponents: dict[str, Speaker] = field(default_factory=dict)  # by role
    chats: dict[str, ChatEncoder] = field(default_factory=dict)  # of other models, by name

    async def close(self) -> None:
        for chat in (self.chat, *self.chats.values()):
            chat.close()
        if self.writer is not None:
            await self.writer.close()


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
        if own.ref_model is not None and own.reference == "none":
            raise UsageError(f"--ref-model {own.ref_model} has nothing to do. Add --reference inline, or deferred.")
        self.environment = open_environment(own.env, own.env_option, own.horizon)
        raw = None if own.reference == "none" else 0  # what the reference's are compared with
        self.sampling = sampling_of(own, logprobs=raw, processed_logprobs=True)
        self.rendering = rendering_of(own)
        self.cast = Roles.of(own.opponent, own.role_temperature, own.adapter)
        for model in (own.ref_model, *(one.model for one in self.cast.opponents.values())):
            if model is not None:  # before the run's own is loaded
                prepare_model(model, own.download, own.trust_remote_code)
                text_options.refuse_absent(model, TEXT_MODELS)
        check_training(own)
        self.consumer: Consumer | None = None  # a trainer in this process
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
        return text_model(self.options, self.options.batch_size)

    def plan(self, opponents: Mapping[str, Speaker]) -> PlayPlan:
        own = self.options
        return PlayPlan(
            samples=own.samples_per_group,
            seed=self.setup.seed,
            horizon=own.horizon,
            max_turns=own.max_turns,
            step_seconds=own.step_seconds,
            attempts=own.attempts,
            constrain=own.constrain,
            sampling=self.sampling,
            model=self.cast.policy or self.model().name,
            adapter=self.cast.policy,
            temperatures=self.cast.temperatures,
            opponents=opponents,
        )

    async def run(self, infer: Infer) -> AsyncIterator[Progress]:
        preparing = asyncio.create_task(self._prepare(infer, self._writer))
        async for _ in follow_task(preparing, infer.stopping):
            yield Progress(0, note="loading the model", setup=True)
        if preparing.cancelled():
            return
        stage = preparing.result()
        async with contextlib.AsyncExitStack() as open_here:
            open_here.push_async_callback(stage.close)
            policy = self.cast.adapters.get(self.cast.policy) if self.cast.policy else None
            training = await open_here.enter_async_context(
                open_training(self.options, infer, consumer=self.consumer, resume=self.options.resume, policy=policy)
            )
            done = frozenset[int]() if stage.writer is None else stage.writer.done
            if training is not None:
                training.go_on(self.options.out, done)
                if (reference := stage.reference) is not None:
                    training.meter.reference_s = lambda: reference.seconds
            player = self._player(infer, stage, training)
            numbers = itertools.count() if self._groups is None else iter(range(self._groups))
            limit = self.options.groups_in_flight
            feed = GroupFeed((number for number in numbers if number not in done), player.controller, limit, training)
            loop = RolloutLoop(feed, player, reference=stage.reference, keeper=stage.writer, training=training)
            yield self._progress(loop.tally, player, training)  # the run's clock starts
            running = asyncio.create_task(loop.run())
            try:
                async for _ in follow_task(running, infer.stopping):
                    yield self._progress(loop.tally, player, training)
            except BaseExceptionGroup as group:
                raise errors.unwrap(group) from group
        if running.cancelled() and self.options.out is not None:
            log.warning("stopped; what was played is in %s. Run it again with --resume to go on.", self.options.out)
        _say_failed(loop.tally)
        yield self._progress(loop.tally, player, training)

    def _player(self, infer: Infer, stage: RolloutStage, training: Training | None = None) -> GroupPlayer:
        ask, make = infer, self.environment
        if training is not None:
            ask, make = training.infer, training.meter.environments(make)
        if isinstance(self.environment.factory, type):
            infer.watch(self.environment.factory)
        limit = self.options.groups_in_flight
        controller = ConcurrencyController(RolloutCounts(), slots_of(infer) if limit is None else None)
        return GroupPlayer(ask, make, self.plan(stage.opponents), stage.chat, controller)

    # Over many machines

    def node_options(self) -> Mapping[str, Any]:
        """Without the record, which the coordinator alone writes."""
        options = self.options.model_dump(mode="json", exclude_unset=True)
        return {name: one for name, one in options.items() if name not in ("out", "format", "resume", "groups")}

    def division(self) -> Division:
        own = self.options
        if own.listen is not None or own.trainer_seconds is not None or own.steps is not None:
            raise UsageError(
                "--listen, --trainer-seconds and --steps: a trainer takes groups from one process, and gives weights "
                "to it alone. Leave --launcher out, or leave these out and train on the record in --out."
            )
        return RolloutsDivision(own.groups, self.deciding, None if own.out is None else self._writer, own.out)

    def deciding(self, arithmetic: str) -> Mapping[str, Any]:
        check_with_model(self.model(), self.sampling)
        return self.deciding_settings(arithmetic)

    async def run_ranges(self, infer: Infer, feed: RangeFeed) -> AsyncIterator[Progress]:
        preparing = asyncio.create_task(self._prepare(infer))
        async for _ in follow_task(preparing, infer.stopping):
            yield Progress(0, note="loading the model", setup=True)
        if preparing.cancelled():
            return
        stage, self._groups = preparing.result(), None
        async with contextlib.AsyncExitStack() as open_here:
            open_here.push_async_callback(stage.close)
            player = self._player(infer, stage)
            groups = RangeGroupFeed(feed, player.controller, self.options.groups_in_flight, infer.stopping)
            loop = RolloutLoop(groups, player, reference=stage.reference, keeper=FeedKeeper(feed))
            yield self._progress(loop.tally, player)  # the run's clock starts
            running, late = asyncio.create_task(loop.run()), asyncio.Event()
            timing = asyncio.create_task(set_late(infer.stopping, late))
            open_here.callback(timing.cancel)
            try:
                async for _ in follow_task(running, late):
                    yield self._progress(loop.tally, player)
            except BaseExceptionGroup as group:
                raise errors.unwrap(group) from group
        _say_failed(loop.tally)
        yield self._progress(loop.tally, player)

    def pack_records(self, records: Sequence[Any]) -> bytes:
        return pack_groups(records)

    def _writer(self, settings: Mapping[str, Any]) -> Writer:
        own = self.options
        assert own.out is not None
        return Writer(own.out, own.format, settings, resume=own.resume)

    async def _prepare(
        self, infer: Infer, open_writer: Callable[[Mapping[str, Any]], Writer] | None = None
    ) -> RolloutStage:
        """Everything that may take a while before the first game."""
        own, spec = self.options, self.model()
        await asyncio.to_thread(check_with_model, spec, self.sampling)
        async with contextlib.AsyncExitStack() as if_refused:
            stage = RolloutStage(await asyncio.to_thread(self._chat, spec))
            if_refused.push_async_callback(stage.close)
            if own.out is not None and open_writer is not None:
                settings = await asyncio.to_thread(self.deciding_settings, infer.arithmetic)
                stage.writer = open_writer(settings)
            await infer.ready()
            for name, folder in self.cast.adapters.items():
                await infer.update(START, str(folder), adapter=name, drain=False)
            for role, opponent in self.cast.opponents.items():
                stage.opponents[role] = await self._speaker(infer, role, opponent, stage)
            if own.reference != "none":
                other = None if own.ref_model is None else replace(spec, name=own.ref_model, weights=None)
                if other is not None:
                    await asyncio.to_thread(check_tokens, spec, other)
                stage.reference = ReferenceModel(infer, inline=own.reference == "inline", model=other)
                await stage.reference.ready()
            if_refused.pop_all()
        return stage

    async def _speaker(self, infer: Infer, role: str, opponent: RoleOpponent, stage: RolloutStage) -> Speaker:
        """Who is no part of what learns."""
        temperature = self.cast.temperatures.get(role, self.sampling.temperature)
        sampling = msgspec.structs.replace(self.sampling, temperature=temperature)
        if opponent.model is None:
            return Speaker(infer, stage.chat, sampling, opponent.name, opponent.adapter, trainable=False)
        spec = replace(self.model(), name=opponent.model, weights=None)
        if opponent.model not in stage.chats:
            stage.chats[opponent.model] = await asyncio.to_thread(self._chat, spec)
        other = infer.beside(spec)
        await other.ready()
        return Speaker(other, stage.chats[opponent.model], sampling, opponent.name, trainable=False)

    def _chat(self, spec: ModelSpec) -> ChatEncoder:
        from gpuinfer.text.language.transformers_tokenizer import open_model_language

        return ChatEncoder(open_model_language(spec), self.rendering, plain=self.options.plain)

    def deciding_settings(self, backend_arithmetic: str) -> dict[str, Any]:
        """All that decides what is played: a record is gone on with by a run with the same alone.
        `backend_arithmetic`: see `Backend.arithmetic`.
        """
        own = self.options
        names = ("env", "samples_per_group", "horizon", "max_turns", "constrain", "plain", "context", "deterministic")
        return {
            **{name: getattr(own, name) for name in names},
            "env_options": {name: str(value) for name, value in self.environment.options.items()},
            "sampling": msgspec.to_builtins(self.sampling),
            "chat_template_kwargs": dict(self.rendering.variables),
            **self.cast.deciding(),
            "seed": self.setup.seed,
            "dtype": self.setup.dtype,
            "computes_in": arithmetic(self.setup, backend_arithmetic),
            "model": model_fingerprint(self.model()),
            "reference": None if own.reference == "none" else own.ref_model or "the base",
        }

    def _progress(self, tally: RolloutTally, player: GroupPlayer, training: Training | None = None) -> Progress:
        counts = player.counts
        figures = [] if training is None else training.recorder.take_figures()
        if of_groups := tally.take_figures():
            figures.append((tally.done, of_groups))
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
            facts={
                **report_facts(tally, player, self.options.groups_in_flight),
                **(training.facts() if training else {}),
            },
            note=f"{tally.failed} games played again" if tally.failed else "",
            before=tally.before,
            figures=figures,
        )


def _say_failed(tally: RolloutTally) -> None:
    if tally.failed:
        log.warning("%d games ended in an error and were played again; the record has them as failed.", tally.failed)


@contextlib.asynccontextmanager
async def open_training(
    own: TrainingOptions,
    infer: Infer,
    *,
    consumer: Consumer | None = None,
    resume: bool = False,
    policy: Path | None = None,
) -> AsyncIterator[Training | None]:
    """What the flags ask for, None without a trainer; `consumer`: a trainer in this process, which comes before them.

    `policy`: the folder of the adapter that learns; a simulated trainer hands it over again at each step. Raises
    `UsageError` for an address or a file that cannot be had.
    """
    listening = server_plan(own)
    if consumer is None and listening is None and own.trainer_seconds is None:
        if own.steps is not None:
            raise UsageError(
                "--steps tells of training, and there is no trainer. Add --trainer-seconds 1, or --listen."
            )
        yield None
        return
    async with contextlib.AsyncExitStack() as stack:
        steps = None
        if own.steps is not None:
            steps = StepsFile(own.steps, resume=resume)
            stack.callback(steps.close)
        last = steps.before[-1] if steps is not None and steps.before else None
        plan = training_plan(own, last)
        if consumer is None and listening is not None:
            consumer = TrainerServer(listening, own.batch_groups)
        elif consumer is None:
            weights, name = (None, None) if policy is None else (str(policy), POLICY)
            consumer = SimulatedTrainer(own.trainer_seconds or 0.0, own.batch_groups, plan.version, weights, name)
        training = Training(infer, consumer, plan, steps)
        stack.callback(training.close)
        if last is not None and last.weights is not None:
            await training.restore(last.weights)
        stack.push_async_callback(consumer.close)
        await consumer.meet(training)
        yield training
