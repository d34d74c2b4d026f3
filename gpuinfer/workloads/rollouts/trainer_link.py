"""The trainer's end of a run's loop: none, a simulated trainer, one over HTTP, or one in this process."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import cast

import msgspec

from gpuinfer.api import Infer
from gpuinfer.errors import Closed, UsageError
from gpuinfer.rollouts import files
from gpuinfer.rollouts.concurrency import Admission, OpenAdmission
from gpuinfer.rollouts.guarded_environment import EnvironmentMaker
from gpuinfer.rollouts.meter import MeteredInfer, RolloutMeter
from gpuinfer.rollouts.record import Group
from gpuinfer.rollouts.rollout_loop import NoTrainer, Reference, Trainer
from gpuinfer.rollouts.steps import StepRecord, StepsFile, stall_of
from gpuinfer.rollouts.trainer import BatchHandoff, Consumer, SimulatedTrainer
from gpuinfer.rollouts.trainer_server import TrainerServer, TrainerServerPlan
from gpuinfer.rollouts.training import Training, TrainingPlan
from gpuinfer.workloads.rollouts.options import TrainingOptions

log = logging.getLogger(__name__)


class TrainerLink:
    """Nobody: groups are written, and that is all."""

    def __init__(self, infer: Infer) -> None:
        self.infer = infer  # to be asked in the run's place
        self.gate: Admission = OpenAdmission()
        self.trainer: Trainer = NoTrainer()

    def environments(self, make: EnvironmentMaker) -> EnvironmentMaker:
        """To be used in the run's place."""
        return make

    def facts(self) -> Mapping[str, float]:
        """For the report."""
        return {}

    def watch(self, reference: Reference) -> None:
        """Its time counts."""

    def go_on(self, folder: Path | None, done: frozenset[int]) -> None:
        """These groups are in the folder already."""


class BufferedTrainerLink(TrainerLink):
    """A trainer, and the buffer before it."""

    def __init__(self, infer: Infer, consumer: Consumer, plan: TrainingPlan, steps: StepsFile | None) -> None:
        meter = RolloutMeter()
        self.training = Training(infer, consumer, plan, meter, steps, judged_records(plan))
        self.infer = cast(Infer, MeteredInfer(infer, meter, self.training.asked_with))
        self.gate = self.training
        self.trainer = ResumedTrainer(self.training, consumer)
        self._steps = steps

    def environments(self, make: EnvironmentMaker) -> EnvironmentMaker:
        return self.training.meter.environments(make)

    def facts(self) -> Mapping[str, float]:
        return self.training.facts()

    def watch(self, reference: Reference) -> None:
        self.training.meter.reference_s = lambda: reference.seconds

    def go_on(self, folder: Path | None, done: frozenset[int]) -> None:
        """Those that no step of the file of steps has had are given to the trainer before others."""
        if folder is None or self._steps is None or not done:
            return
        had = {number for record in self._steps.before for number in record.numbers}
        if left := done - had:
            self.trainer.again = (group for group in files.read(folder) if group.number in left)
            self.training.first.clear()
            log.warning("%d groups of %s that nobody has trained on go to the trainer first.", len(left), folder)

    trainer: ResumedTrainer


class ResumedTrainer:
    """The loop's `Trainer`: what an earlier run has left comes before what this one plays."""

    def __init__(self, training: Training, consumer: Consumer) -> None:
        self._training, self._consumer = training, consumer
        self.again: Iterator[Group] = iter(())
        self._given_again, self._ended = False, False

    async def put(self, group: Group) -> None:
        await self._training.put(group)

    async def run(self) -> None:
        try:
            async with asyncio.TaskGroup() as tasks:
                giving = tasks.create_task(self._give_again())
                await self._training.run()
                giving.cancel()
            if isinstance(self._consumer, TrainerServer):
                await self._consumer.over_and_out()
        finally:
            if isinstance(self._consumer, BatchHandoff):
                self._consumer.end()

    def all_begun(self) -> None:
        self._training.all_begun()

    def end(self) -> None:
        self._ended = True
        self._look_for_end()

    async def _give_again(self) -> None:
        with contextlib.suppress(Closed):
            while (group := await asyncio.to_thread(next, self.again, None)) is not None:
                await self._training.put_again(group)
        self._training.first.set()
        self._given_again = True
        self._look_for_end()

    def _look_for_end(self) -> None:
        if self._ended and self._given_again:
            self._training.end()


def judged_records(plan: TrainingPlan) -> StallJudge:
    return StallJudge(min(plan.depth / plan.batch, plan.staleness))


class StallJudge:
    """Completes a step's record with what kept it. `depth`: batches that may be played ahead of the trainer."""

    def __init__(self, depth: float) -> None:
        self.depth = depth

    def __call__(self, record: StepRecord) -> StepRecord:
        return msgspec.structs.replace(record, verdict=stall_of(record, self.depth).plain())


def check_training(own: TrainingOptions) -> None:
    """Raises `UsageError` for flags that do not go together, before anything is started."""
    if own.listen is not None and own.trainer_seconds is not None:
        raise UsageError("--listen waits for a trainer and --trainer-seconds stands in for one. Give one of them.")
    training_plan(own).check()
    server_plan(own)


def training_plan(own: TrainingOptions, before: StepRecord | None = None) -> TrainingPlan:
    """`before`: the last step of an earlier run that this one goes on with."""
    return TrainingPlan(
        depth=own.buffer_depth,
        batch=own.batch_groups,
        prefill=own.prefill,
        max_staleness=own.max_staleness,
        version=before.version_after if before else 0,
        step=before.step + 1 if before else 0,
        kl_target=own.kl_target,
        kl_coefficient=own.kl_coef if before is None or before.kl_coefficient is None else before.kl_coefficient,
        kl_horizon=own.kl_horizon,
    )


def server_plan(own: TrainingOptions) -> TrainerServerPlan | None:
    """Raises `UsageError`."""
    if own.listen is None:
        return None
    return TrainerServerPlan.of(own.listen, own.api_key_file, own.admin_key_file, own.insecure, own.trainer_patience)


@contextlib.asynccontextmanager
async def open_trainer_link(
    own: TrainingOptions,
    infer: Infer,
    *,
    consumer: Consumer | None = None,
    resume: bool = False,
    policy: Path | None = None,
    adapter: str = "policy",
) -> AsyncIterator[TrainerLink]:
    """What the flags ask for; `consumer`: a trainer in this process, which comes before them.

    `policy`: the folder of the adapter that learns; a simulated trainer hands it over again at each step. Raises
    `UsageError` for an address or a file that cannot be had.
    """
    listening = server_plan(own)
    if consumer is None and listening is None and own.trainer_seconds is None:
        if own.steps is not None:
            raise UsageError(
                "--steps tells of training, and there is no trainer. Add --trainer-seconds 1, or --listen."
            )
        yield TrainerLink(infer)
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
            weights = None if policy is None else str(policy)
            name = None if policy is None else adapter
            consumer = SimulatedTrainer(own.trainer_seconds or 0.0, own.batch_groups, plan.version, weights, name)
        found = BufferedTrainerLink(infer, consumer, plan, steps)
        stack.callback(found.training.close)
        if last is not None and last.weights is not None:
            await found.training.restore(last.weights)
        if isinstance(consumer, BatchHandoff):
            await consumer.meet(found.training)
        if isinstance(consumer, TrainerServer):
            stack.push_async_callback(consumer.close)
            log.warning("a trainer can take groups at %s/v1/rollouts", consumer.url)
        yield found
