"""The training side of a run: groups wait in the buffer, the trainer takes them and gives weights, and each step is
recorded, from what was measured and what the engine has counted.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from gpuinfer.api import Infer
from gpuinfer.errors import Closed, UsageError
from gpuinfer.rollouts import files, kl
from gpuinfer.rollouts.buffer import Capacity, CapacityGate, GroupBuffer
from gpuinfer.rollouts.meter import EngineCounts, MeteredInfer, RolloutMeter
from gpuinfer.rollouts.record import Group, version_lags, version_name
from gpuinfer.rollouts.steps import Handed, StepRecord, StepsFile, figures_of, stall_of
from gpuinfer.rollouts.trainer import Consumer, Trained, facts_of

log = logging.getLogger(__name__)


class StepRecorder:
    """Records the steps of one run. A step is recorded while the next one is under way: asking a far engine takes time.

    `depth`: batches that may be played ahead of the trainer, for the verdict on each step.
    """

    def __init__(
        self, infer: Infer, meter: RolloutMeter, controller: kl.AdaptiveKl, steps: StepsFile | None, depth: float
    ) -> None:
        self.meter, self.controller, self.totals = meter, controller, StepTotals()
        self._infer, self._steps, self._depth = infer, steps, depth
        self._ready: dict[int, float] = {}  # group's number → when it came
        self._began = self._ended = time.monotonic()
        self._engine = EngineCounts()
        self.loading_s = 0.0  # in the present step, until now
        self._dropped = 0  # before it
        self.tail_from: float | None = None  # since when no more groups are begun
        self.recording: asyncio.Task[None] | None = None
        self._unreported: list[StepRecord] = []  # that `take_figures` has not had

    async def open(self) -> None:
        self._began = self._ended = self.meter.began = time.monotonic()
        self.meter.take()
        self._engine = EngineCounts.of(await self._infer.counted())

    async def close(self) -> None:
        """Wait until the last step is recorded. Raises what the recording did."""
        if self.recording is not None:
            await self.recording
            self.recording = None

    # What happens in between

    def buffered(self, group: Group) -> None:
        self._ready[group.number] = time.monotonic()

    def discarded(self, group: Group) -> None:
        self._ready.pop(group.number, None)

    def loaded(self, seconds: float) -> None:
        """New weights are in force, after `seconds`."""
        self.loading_s += seconds
        self.totals.adapter_loads += 1

    async def end_step(self, record: StepRecord, groups: Sequence[Group], trained: Trained, requested: float) -> None:
        """The step ends now. `record`: what the training knows, with all groups dropped so far; `requested`: when the
        trainer asked, on the monotonic clock. Raises what recording the step before raised.
        """
        await self.close()
        now = time.monotonic()
        wall_s, absent_s = now - self._ended, max(0.0, requested - self._ended)
        dropped, self._dropped = record.dropped - self._dropped, record.dropped
        loading_s, self.loading_s, self._ended = self.loading_s, 0.0, now
        policy: dict[str, Any] = {"kl_coefficient": self.controller.coefficient}
        found = kl.from_reference(groups)
        if found is not None:
            coefficient = self.controller.update(found.k3, sum(len(group.games) for group in groups))
            policy = {"kl": found.k3, "kl_k1": found.k1, "kl_coefficient": coefficient}
        if trained.logprobs and (moved := kl.from_trainer(groups, trained.logprobs)) is not None:
            policy |= {"ratio_mean": moved.mean, "ratio_max": moved.largest, "effective": moved.effective}
        record = msgspec.structs.replace(
            record,
            at_s=now - self._began,
            wall_s=wall_s,
            absent_s=absent_s,
            adapter_load_s=loading_s,
            **self._of_batch(groups, record.version),
            **policy,
            dropped=dropped,
            tail_s=0.0 if self.tail_from is None else min(wall_s, now - self.tail_from),
        )
        self.recording = asyncio.create_task(self._record(record, self.meter.take()))

    async def _record(self, record: StepRecord, measured: Mapping[str, float]) -> None:
        counted = EngineCounts.of(await self._infer.counted())
        engine, self._engine = counted.since(self._engine), counted
        found = engine_fields(engine, measured, record.wall_s, engine.slots or slots_of(self._infer))
        record = msgspec.structs.replace(record, **found)
        record = msgspec.structs.replace(record, verdict=stall_of(record, self._depth).plain())
        self.totals.add(record)
        self._unreported.append(record)
        if self._steps is not None:
            self._steps.add(record)

    def take_figures(self) -> list[tuple[int, dict[str, float]]]:
        """Of the steps that were recorded since the last call, each with its number (`steps.figures_of`)."""
        records, self._unreported = self._unreported, []
        return [(record.step, figures_of(record)) for record in records]

    def _of_batch(self, groups: Sequence[Group], version: int) -> dict[str, Any]:
        facts, behind = facts_of(groups), version_lags(groups, version)
        ready = [self._ready.pop(group.number, self._ended) for group in groups]
        lasted = [(group.seconds + group.reference_s, group.reference_s) for group in groups]
        begun = [came - seconds for came, (seconds, _) in zip(ready, lasted, strict=True)]
        return {
            "groups": facts["groups"],
            "games": facts["games"],
            "numbers": tuple(group.number for group in groups),
            "tokens_per_game": facts["drawn_tokens"] / max(1, facts["games"]),
            "tokens_per_call": facts["drawn_tokens"] / max(1, facts["calls"]),
            "staleness_mean": sum(behind) / max(1, len(behind)),
            "staleness_max": max(behind, default=0),
            "reference_share": sum(own / seconds for seconds, own in lasted if seconds) / max(1, len(groups)),
            "step_rollout_s": max(ready, default=0.0) - min(begun, default=0.0),
        }


def slots_of(infer: Infer) -> int:
    """Rows that may be under way at once."""
    limits = infer.limits
    return limits.max_rows * limits.in_flight if limits.slots is None else limits.slots


def engine_fields(engine: EngineCounts, measured: Mapping[str, float], wall_s: float, slots: int) -> dict[str, Any]:
    """The fields of a step on the engine's time and requests."""
    inference_s = min(engine.inference_s, wall_s)
    room = slots * wall_s
    given, drawn = engine.input_tokens, engine.output_tokens
    if not engine.counts:  # the backend counts none: those of the answers that have come
        given, drawn = int(measured["input_tokens"]), int(measured["output_tokens"])
    games_s = max(measured["environment_share"] * wall_s, min(wall_s, measured["blocked_s"]))
    return {
        "input_tokens": given,
        "output_tokens": drawn,
        "calls": int(measured["calls"]),
        "slots": slots,
        "inference_s": inference_s,
        "tokens_per_s_wall": drawn / wall_s if wall_s else 0.0,
        "tokens_per_s_inference": drawn / inference_s if inference_s else 0.0,
        "occupancy": engine.row_s / (slots * engine.step_s) if slots and engine.step_s else 0.0,
        "busy": engine.row_s / room if room else 0.0,
        "offered": measured["rows_s"] / room if room else 0.0,
        "offered_working": measured["rows_s"] / (slots * measured["working_s"])
        if slots and measured["working_s"]
        else 0.0,
        "working_s": measured["working_s"],
        "gated_s": measured["gated_s"],
        "reference_s": measured["reference_s"],
        "constraint_s": min(engine.constraint_s, wall_s),
        "environment_s": games_s,
        "cold_start_s": min(measured["cold_start_s"], wall_s),
    }


class StepTotals:
    """The totals over all steps, for the report."""

    def __init__(self) -> None:
        self.steps = self.adapter_loads = self.staleness_max = 0
        self._sums: dict[str, float] = dict.fromkeys(SUMMED, 0.0)
        self._staleness_groups = 0.0
        self._groups = 0
        self._kl: float | None = None
        self._stalls: dict[str, float] = {}  # seconds, by kind

    def add(self, record: StepRecord) -> None:
        self.steps += 1
        self.staleness_max = max(self.staleness_max, record.staleness_max)
        self._staleness_groups += record.staleness_mean * record.groups
        self._groups += record.groups
        self._kl = record.kl if record.kl is not None else self._kl
        fields = msgspec.structs.asdict(record)
        for name in SUMMED:
            self._sums[name] += fields[name]
        verdict = record.verdict or {"kind": "healthy"}
        for kind, share in verdict["shares"].items() if verdict["kind"] != "healthy" else ():
            self._stalls[kind] = self._stalls.get(kind, 0.0) + share * record.wall_s

    def facts(self) -> dict[str, float]:
        fields: dict[str, float] = {
            "steps": self.steps,
            "trained_groups": self._groups,
            "staleness_max": self.staleness_max,
            "staleness_mean": self._staleness_groups / self._groups if self._groups else 0.0,
            "adapter_loads": self.adapter_loads,
            **self._sums,
            **{f"stall: {kind}": seconds for kind, seconds in self._stalls.items()},
        }
        return fields if self._kl is None else {**fields, "kl": self._kl}


SUMMED = (
    *("wait_s", "train_s", "absent_s", "adapter_load_s", "step_rollout_s"),
    *("reference_s", "constraint_s", "environment_s", "gated_s"),
)


ANY_STALENESS = 1 << 30  # groups under way, where only the feed bounds them


@dataclass(frozen=True)
class TrainingPlan:
    """How groups wait, and how old they may become."""

    depth: int = 2  # groups that wait for the trainer
    batch: int = 1  # groups of one step
    prefill: int = 0  # groups that must wait before the first step
    max_staleness: int | None = None  # η, in versions; None: as many as the buffer holds batches
    concurrency: int = ANY_STALENESS
    version: int = 0  # to begin with
    step: int = 0
    kl_target: float | None = None
    kl_coefficient: float = 0.0
    kl_horizon: float = 10_000.0  # games

    @property
    def staleness(self) -> int:
        """A buffer of so many batches keeps the engine busy for so many steps of the trainer ahead."""
        return -(-self.depth // self.batch) if self.max_staleness is None else self.max_staleness

    def check(self) -> None:
        """Raises `UsageError` where the first step could never begin."""
        most = (self.staleness + 1) * self.batch
        if self.prefill > most:
            raise UsageError(
                f"--prefill {self.prefill} groups cannot wait before the first step: with --batch-groups {self.batch} "
                f"and {self.staleness} versions of staleness no more than {most} are begun. "
                f"Use --prefill {most}, or a greater --buffer-depth."
            )


class Training:
    """The training of one run: the gate before each group, the buffer, and the trainer. All methods belong to the run's
    event loop.
    """

    def __init__(self, infer: Infer, consumer: Consumer, plan: TrainingPlan, steps: StepsFile | None = None) -> None:
        plan.check()
        self.plan, self.consumer = plan, consumer
        self.version, self.step = plan.version, plan.step
        self.meter = RolloutMeter()
        self.infer = cast(
            Infer, MeteredInfer(infer, self.meter, self.version_of_answers)
        )  # what games ask in the place of `infer`
        self.gate = CapacityGate(
            Capacity(concurrency=plan.concurrency, batch=plan.batch, staleness=plan.staleness, first=plan.version)
        )
        self.buffer = GroupBuffer(plan.depth, plan.prefill, plan.staleness, plan.version, on_drop=self._drop)
        self.controller = kl.AdaptiveKl(plan.kl_target, plan.kl_coefficient, plan.kl_horizon)
        depth = min(plan.depth / plan.batch, plan.staleness)
        self.recorder = StepRecorder(infer, self.meter, self.controller, steps, depth)
        self.weights: Handed | None = None  # that the backend has been given last
        self._infer, self._steps = infer, steps
        self._again: Iterator[Group] = iter(())  # groups of an earlier run that no step has had
        self._given_again = asyncio.Event()
        self._ended = False  # no more groups will be played
        self._gone = set[int]()  # of the batch that is out
        self._updating = asyncio.Lock()

    def go_on(self, folder: Path | None, done: frozenset[int]) -> None:
        """These groups are in the folder already: those that no recorded step has had go to the trainer first."""
        if folder is None or self._steps is None or not done:
            return
        if left := done - {number for record in self._steps.before for number in record.numbers}:
            self._again = (group for group in files.read(folder) if group.number in left)
            log.warning("%d groups of %s that no step has trained on go to the trainer first.", len(left), folder)

    # The gate of the loop

    async def admitted(self) -> None:
        with self.meter.gated.during():
            await self._given_again.wait()
            await self.gate.admitted()

    def started(self) -> None:
        self.gate.started()
        self.meter.groups.add(1)

    def accepted(self) -> None:
        self.gate.accepted()
        self.meter.groups.add(-1)

    def failed(self) -> None:
        self.gate.failed()
        self.meter.groups.add(-1)

    # The trainer of the loop

    async def put(self, group: Group) -> None:
        """Wait for room in the buffer. When the trainer has left, the group is discarded."""
        self.recorder.buffered(group)
        try:
            await self.buffer.put(group)
        except Closed:
            self.recorder.discarded(group)

    def end(self) -> None:
        """No more groups will come from play."""
        self._ended = True
        if self._given_again.is_set():
            self.buffer.end()

    def close(self) -> None:
        """Nothing is admitted, put or taken any more."""
        self._given_again.set()
        self.gate.close()
        self.buffer.close()

    async def run(self) -> None:
        """Step after step, until there are no more groups or the trainer wants none. Raises what the trainer does, as
        an exception group.
        """

        async def give_again() -> None:
            """Groups of an earlier run count as if this run had played them."""
            with contextlib.suppress(Closed):
                while (group := await asyncio.to_thread(next, self._again, None)) is not None:
                    await self.gate.admitted()
                    self.gate.started()
                    self.gate.accepted()
                    await self.put(group)
            self._given_again.set()
            if self._ended:
                self.buffer.end()

        try:
            async with asyncio.TaskGroup() as tasks:
                giving = tasks.create_task(give_again())
                try:
                    await self.recorder.open()
                    while await self._one_step():
                        pass
                    await self.recorder.close()
                finally:
                    if self.recorder.recording is not None:  # a step that is being recorded is left out
                        self.recorder.recording.cancel()
                    self.close()
                giving.cancel()
            await self.consumer.drain()
        finally:
            self.consumer.end()

    async def _one_step(self) -> bool:
        """One step of the trainer. False when there was none."""
        wanted = await self.consumer.wait_for_request()
        requested, before = time.monotonic(), len(self.buffer)
        if wanted is None:
            return False
        groups = await self.buffer.take(wanted)
        if not groups:
            return False
        taken, version, loaded_s = time.monotonic(), self.version, self.recorder.loading_s
        try:
            trained = await self.consumer.train(groups, self.step)
        except Closed:  # it has left with them
            return False
        # What new weights took on their way is no training; the trainer's own clock counts, if it says so: a loop that
        # was busy heard of the end late.
        busy_s = max(0.0, time.monotonic() - taken - (self.recorder.loading_s - loaded_s))
        train_s = min(busy_s, trained.seconds) if trained.seconds else busy_s
        groups = [group for group in groups if group.number not in self._gone]
        self._gone.clear()
        if trained.version > self.version:
            await self.update(trained.version, trained.weights, trained.adapter)
        record = StepRecord(
            step=self.step,
            version=version,
            version_after=self.version,
            weights=self.weights,
            at_s=0.0,
            wall_s=0.0,
            wait_s=taken - requested + busy_s - train_s,
            train_s=train_s,
            buffer_before=before,
            buffer_after=len(self.buffer),
            running=self.gate.capacity.running,
            dropped=self.buffer.shelf.dropped,
            metrics=trained.metrics,
        )
        await self.recorder.end_step(record, groups, trained, requested)
        self.step += 1
        return True

    async def update(self, version: int, weights: str | None = None, adapter: str | None = None) -> None:
        """The trainer's weights are of this version now; the one it has, or the next. With `weights` the backend
        computes with them from now on, and answers under way go on.

        Raises `UsageError` for another version, and for weights that the backend cannot take, with the old ones in
        force.
        """
        async with self._updating:
            if version == self.version:
                return
            if version != self.version + 1:
                raise UsageError(
                    f"version {version} cannot come after {self.version}. Count versions one by one: "
                    f"send {self.version + 1}."
                )
            if weights is not None:
                began = time.monotonic()
                await self._infer.update(version_name(version), weights, adapter=adapter, drain=False)
                self.recorder.loaded(time.monotonic() - began)
                self.weights = Handed(version=version, weights=weights, adapter=adapter)
            self.version = version
            self.gate.advance(version)
            self.buffer.advance(version)

    async def restore(self, handed: Handed) -> None:
        """Begin with the weights that an earlier run had from its trainer last. Raises `UsageError`."""
        try:
            await self._infer.update(version_name(handed.version), handed.weights, adapter=handed.adapter, drain=False)
        except UsageError as error:
            raise UsageError(
                f"version {handed.version}, which the trainer made last, cannot be gone on with: {error}"
            ) from error
        self.weights = handed

    def too_old(self, groups: Sequence[Group]) -> list[Group]:
        """The groups of a batch to be given again that have become too old meanwhile, and are dropped."""
        gone = [group for group in groups if self.buffer.shelf.stale(group)]
        self._gone |= {group.number for group in gone}
        self.buffer.shelf.dropped += len(gone)
        self.buffer.shelf.given -= len(gone)
        for group in gone:
            self._drop(group)
        return gone

    @property
    def starved_of(self) -> str:
        """What a trainer waits for: "rollouts", or "version": no more groups are begun before its weights are newer."""
        return "version" if self.gate.waiting and not self.gate.capacity.running else "rollouts"

    def version_of_answers(self) -> str | None:
        """The version by which answers that are requested now are drawn, unless the backend itself names versions."""
        return version_name(self.version) if self.version and self.weights is None else None

    def _drop(self, group: Group) -> None:
        """The group was too old for the trainer; another is begun in its place."""
        self.recorder.discarded(group)
        self.gate.dropped()

    # What it says

    def facts(self) -> dict[str, float]:
        """For the report: totals of all steps, and where the buffer is now."""
        return {
            **self.recorder.totals.facts(),
            "buffer_depth": self.plan.depth,
            "buffer_batch": self.plan.batch,
            "buffer_waiting": len(self.buffer),
            "groups_dropped": self.buffer.shelf.dropped,
            "policy_version": self.version,
            "max_staleness": self.plan.staleness,
            "kl_coefficient": self.controller.coefficient,
        }
