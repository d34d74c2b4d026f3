"""The training side of a run: groups wait in the buffer, the trainer takes them and gives weights, each step is told.

It is the gate of the loop, which admits groups by the capacity rule, and its trainer, which takes them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gpuinfer.api import Infer
from gpuinfer.errors import Closed, UsageError
from gpuinfer.rollouts import kl
from gpuinfer.rollouts.buffer import Buffer
from gpuinfer.rollouts.capacity import Capacity, Gate
from gpuinfer.rollouts.record import Group
from gpuinfer.rollouts.steps import Handed, StepsFile
from gpuinfer.rollouts.trainer import Consumer
from gpuinfer.rollouts.versions import name_of
from gpuinfer.workloads.rollouts.accounting import Books, Judge, Step
from gpuinfer.workloads.rollouts.measuring import Meter

ANY = 1 << 30  # groups under way, where only the feed bounds them


@dataclass(frozen=True)
class TrainingPlan:
    """How groups wait, and how old they may become."""

    depth: int = 2  # groups that wait for the trainer
    batch: int = 1  # groups of one step
    prefill: int = 0  # groups that must wait before the first step
    max_staleness: int | None = None  # η, in versions; None: as many as the buffer holds batches
    concurrency: int = ANY
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
    """One run's. All methods belong to its event loop.

    `judge` completes each step's record with its verdict.
    """

    def __init__(
        self,
        infer: Infer,
        consumer: Consumer,
        plan: TrainingPlan,
        meter: Meter,
        steps: StepsFile | None = None,
        judge: Judge = lambda record: record,
    ) -> None:
        plan.check()
        self.plan, self.meter, self.consumer = plan, meter, consumer
        self.version, self.step = plan.version, plan.step
        self.gate = Gate(
            Capacity(concurrency=plan.concurrency, batch=plan.batch, staleness=plan.staleness, first=plan.version)
        )
        self.buffer = Buffer(plan.depth, plan.prefill, plan.staleness, plan.version, on_drop=self._drop)
        self.controller = kl.AdaptiveKl(plan.kl_target, plan.kl_coefficient, plan.kl_horizon)
        self.books = Books(infer, meter, self.controller, steps, judge)
        self.first = asyncio.Event()  # what goes to the trainer before anything new has been put
        self.first.set()
        self._infer = infer
        self._gone = set[int]()  # of the batch that is out
        self.weights: Handed | None = None  # that the backend has been given last
        self._updating = asyncio.Lock()

    # The gate of the loop

    async def admitted(self) -> None:
        with self.meter.gated.during():
            await self.first.wait()
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
        """Wait for room in the buffer. When the trainer has left, nobody wants it."""
        self.books.came(group)
        try:
            await self.buffer.put(group)
        except Closed:
            self.books.went(group)

    async def put_again(self, group: Group) -> None:
        """One that an earlier run has played, and nobody has trained on; it counts as if this run had."""
        await self.gate.admitted()
        self.gate.started()
        self.gate.accepted()
        await self.put(group)

    def all_begun(self) -> None:
        """No more groups will be begun."""
        self.books.all_begun()

    def end(self) -> None:
        """No more groups will come."""
        self.buffer.end()

    def close(self) -> None:
        """Nothing is admitted, put or taken any more."""
        self.first.set()
        self.gate.close()
        self.buffer.close()

    async def run(self) -> None:
        """Step after step, until there are no more groups or the trainer wants none. Raises what the trainer does."""
        await self.books.open()
        try:
            while await self._one_step():
                pass
            await self.books.close()
        finally:
            self.books.abandon()
            self.close()

    async def _one_step(self) -> bool:
        """Whether there was one."""
        wanted = await self.consumer.asks()
        asked, before = time.monotonic(), len(self.buffer)
        if wanted is None:
            return False
        groups = await self.buffer.take(wanted)
        if not groups:
            return False
        taken, version, loaded_s = time.monotonic(), self.version, self.books.loading_s
        try:
            trained = await self.consumer.train(groups, self.step)
        except Closed:  # it has left with them
            return False
        done, loading_s = time.monotonic(), self.books.loading_s - loaded_s
        groups = [group for group in groups if group.number not in self._gone]
        self._gone.clear()
        if trained.version > self.version:
            await self.update(trained.version, trained.weights, trained.adapter)
        await self.books.ended(
            Step(
                number=self.step,
                version=version,
                version_after=self.version,
                weights=self.weights,
                groups=groups,
                trained=trained,
                asked=asked,
                taken=taken,
                done=done,
                loading_s=loading_s,
                waiting=before,
                left=len(self.buffer),
                running=self.gate.capacity.running,
                dropped=self.buffer.shelf.dropped,
            )
        )
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
                await self._infer.update(name_of(version), weights, adapter=adapter, drain=False)
                self.books.loaded(time.monotonic() - began)
                self.weights = Handed(version=version, weights=weights, adapter=adapter)
            self.version = version
            self.gate.advance(version)
            self.buffer.advance(version)

    async def restore(self, handed: Handed) -> None:
        """Begin with the weights that an earlier run had from its trainer last. Raises `UsageError`."""
        try:
            await self._infer.update(name_of(handed.version), handed.weights, adapter=handed.adapter, drain=False)
        except UsageError as error:
            raise UsageError(
                f"version {handed.version}, which the trainer made last, cannot be gone on with: {error}"
            ) from error
        self.weights = handed

    def too_old(self, groups: Sequence[Group]) -> list[Group]:
        """Those of a batch that was given out which are dropped, as it is to be given again to a newer trainer."""
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

    def asked_with(self) -> str | None:
        """The name of the weights that an answer is drawn by which is asked for now, where the backend has not been
        told of one.
        """
        return name_of(self.version) if self.version and self.weights is None else None

    def _drop(self, group: Group) -> None:
        """It was too old for the trainer; another is begun in its place."""
        self.books.went(group)
        self.gate.dropped()

    # What it says

    def facts(self) -> dict[str, float]:
        """For the report: totals of all steps, and where the buffer is now."""
        return {
            **self.books.totals.facts(),
            "buffer_depth": self.plan.depth,
            "buffer_batch": self.plan.batch,
            "buffer_waiting": len(self.buffer),
            "groups_dropped": self.buffer.shelf.dropped,
            "policy_version": self.version,
            "max_staleness": self.plan.staleness,
            "kl_coefficient": self.controller.coefficient,
        }
