"""Between a run that has batches and a trainer that comes for them when it likes, dies, and comes again."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from gpuinfer.errors import Closed
from gpuinfer.rollouts.record import Group
from gpuinfer.rollouts.trainer import Batch, Trained
from gpuinfer.rollouts.waking import Changes


class NotGiven(ValueError):
    """A batch that never was, or that somebody else has been given since."""


class Trains(Protocol):
    """Of a run's training, what its trainer asks."""

    version: int
    step: int

    async def update(self, version: int, weights: str | None = None, adapter: str | None = None) -> None: ...
    def facts(self) -> dict[str, float]: ...
    def too_old(self, groups: Sequence[Group]) -> list[Group]: ...
    @property
    def starved_of(self) -> str: ...


class Handover:
    """A `Consumer` on the side of the run; on the trainer's `want`, `next` and `done`.

    One batch is out at a time. Until it is told of as done it is given to whoever comes: so a trainer that dies loses
    nothing, and one that did not hear the answer asks again. All methods belong to one event loop.
    """

    trains: Trains  # the run's side, from `meet` on

    def __init__(self) -> None:
        self.batch: Batch | None = None  # that is out
        self.times = 0  # that it has been given
        self.last = 0  # the number of the newest batch
        self.wanted: int | None = None
        self.over = False  # no more batches will come
        self._left = False
        self._trained: asyncio.Future[Trained] | None = None
        self._changed = Changes()

    # The run's side

    async def meet(self, trains: Trains) -> None:
        """The run is ready, and this is its training. Called once, before anything else of this side."""
        self.trains, self.last = trains, trains.step  # of a run that is gone on with, batches are counted on

    async def asks(self) -> int | None:
        while self.wanted is None and not self._left:
            await self._changed.wait()
        return None if self._left else self.wanted

    async def train(self, groups: Sequence[Group], step: int) -> Trained:
        """Until it is done. Raises `Closed` when the trainer has left for good."""
        self.last += 1
        self.wanted, self.times = None, 0
        self.batch = Batch(number=self.last, step=step, version=self.trains.version, groups=tuple(groups))
        self._trained = asyncio.get_running_loop().create_future()
        self._changed.tell()
        try:
            return await self._trained
        finally:
            self.batch = self._trained = None

    def end(self) -> None:
        """No more batches will come."""
        self.over = True
        self._changed.tell()

    # The trainer's side

    def want(self, groups: int) -> None:
        """It waits for a batch of so many groups from now on; not, where one is out."""
        if self.batch is None and not self.over:
            self.wanted = groups
            self._changed.tell()

    async def next(self, within_s: float | None) -> Batch | None:
        """The batch that is out, once there is one; None: there was none in that time, or no more will come."""
        try:
            async with asyncio.timeout(within_s):
                while self.batch is None and not self.over:
                    await self._changed.wait()
        except TimeoutError:
            return None
        self.times += self.batch is not None
        return self.batch

    def done(
        self,
        number: int,
        *,
        seconds: float = 0.0,
        logprobs: Mapping[str, Sequence[Sequence[float]]] | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """That batch is trained on. Said twice it means nothing more. Raises `NotGiven` for one that never was."""
        if number > self.last or number < 1:
            raise NotGiven(f"batch {number} was never given: the newest is {self.last}.")
        if self.batch is None or self._trained is None or self.batch.number != number or self._trained.done():
            return
        self._trained.set_result(
            Trained(version=self.trains.version, seconds=seconds, logprobs=logprobs, metrics=dict(metrics or {}))
        )
        self.batch = None  # whoever asks from now on wants the next

    def leave(self) -> None:
        """It wants no more: what is out comes back to the run as `Closed`."""
        self._left = True
        if self._trained is not None and not self._trained.done():
            self._trained.set_exception(Closed("the trainer has left."))
        self._changed.tell()

    def without(self, gone: Sequence[Group]) -> None:
        """These groups of the batch that is out have become too old: whoever is given it again gets the others."""
        if self.batch is not None and gone:
            numbers = {group.number for group in gone}
            left = tuple(group for group in self.batch.groups if group.number not in numbers)
            self.batch = msgspec.structs.replace(self.batch, groups=left)
