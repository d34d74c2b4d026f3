"""Trainers: they take batches of groups and report new weights. `BatchHandoff` keeps batches for a trainer that asks at
any time, and may die and come back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from gpuinfer.errors import Closed
from gpuinfer.rollouts.buffer import ChangeEvent
from gpuinfer.rollouts.record import Group


class Trained(Struct, frozen=True, kw_only=True):
    """The result of training on one batch."""

    version: int  # of the trainer's weights now; the same as before: nothing has changed
    weights: str | None = None  # a folder or safetensors file that the backend can read; None: none are handed over
    adapter: str | None = None  # the weights are those of the adapter that prompts call so
    seconds: float = 0.0  # that it trained, by its own clock; 0: it does not say
    logprobs: Mapping[str, Sequence[Sequence[float]]] | None = None
    """Of each trajectory, by its id: of each turn's completion tokens, under the trainer's weights before this step.
    What the sampler's are held against (`kl.drift`)."""
    metrics: Mapping[str, float] = {}  # the trainer's own, such as its loss: they stand in the step's record


class HandoffTraining(Protocol):
    """The part of a run's training that its trainer uses."""

    version: int
    step: int

    async def update(self, version: int, weights: str | None = None, adapter: str | None = None) -> None: ...
    def facts(self) -> dict[str, float]: ...
    def too_old(self, groups: Sequence[Group]) -> list[Group]: ...
    @property
    def starved_of(self) -> str: ...


class Consumer:
    """A trainer, in this process or in another. `wait_for_request` and `train` alternate and never overlap."""

    async def meet(self, training: HandoffTraining) -> None:
        """The run is ready, and this is its training. Called once, before anything else. Raises `UsageError`."""

    async def wait_for_request(self) -> int | None:
        """Wait until the trainer wants a batch; of how many groups. None: the trainer wants no more.

        From the return on, until the batch is there, the trainer waits for rollouts.
        """
        raise NotImplementedError

    async def train(self, groups: Sequence[Group], step: int) -> Trained:
        """Train on them, and return what came of it. Fewer groups than were asked for are the last ones."""
        raise NotImplementedError

    async def drain(self) -> None:
        """No more batches will come: wait until the trainer can have heard of it."""

    def end(self) -> None:
        """No more batches will come."""

    async def close(self) -> None:
        """The run is over."""


class SimulatedTrainer(Consumer):
    """Waits for `seconds` and learns nothing: each step makes a new version, with `weights` if there are any.

    With `weights` each step hands over the same ones under its new version: what a swap costs is then real.
    """

    def __init__(
        self,
        seconds: float,
        batch: int = 1,
        version: int = 0,
        weights: str | None = None,
        adapter: str | None = None,
    ) -> None:
        if seconds < 0 or batch < 1:
            raise ValueError("seconds of at least 0, and a batch of at least 1")
        self.seconds, self.batch, self.version = seconds, batch, version
        self.weights, self.adapter = weights, adapter

    async def wait_for_request(self) -> int | None:
        return self.batch

    async def train(self, groups: Sequence[Group], step: int) -> Trained:
        await asyncio.sleep(self.seconds)
        self.version += 1
        return Trained(version=self.version, weights=self.weights, adapter=self.adapter, seconds=self.seconds)


class TrainerBatch(Struct, frozen=True, kw_only=True):
    """Groups that a trainer behind a line was given, and has not told of yet."""

    number: int  # counts from 1; the trainer reports it when it is done
    step: int
    version: int  # of the trainer's weights when it was given
    groups: tuple[Group, ...]


def facts_of(groups: Sequence[Group]) -> dict[str, Any]:
    """What a batch holds: groups, games, turns, and the tokens that were given and drawn."""
    turns = [turn for group in groups for turn in group.turns()]
    return {
        "groups": len(groups),
        "games": sum(len(group.games) for group in groups),
        "calls": len(turns),
        "given_tokens": sum(len(turn.prompt_tokens) for turn in turns),
        "drawn_tokens": sum(len(turn.completion_tokens) for turn in turns),
    }


class UnknownBatch(ValueError):
    """No batch of this number was given."""


class BatchHandoff(Consumer):
    """A consumer on the side of the run; on the trainer's side `want`, `next` and `done`.

    One batch is out at a time, and is given again until the trainer reports it as done: a trainer that dies loses
    nothing, and a trainer that did not get the answer asks again. All methods belong to one event loop.
    """

    training: HandoffTraining  # the run's side, from `meet` on

    def __init__(self) -> None:
        self.batch: TrainerBatch | None = None  # that is out
        self.times = 0  # that it has been given
        self.last = 0  # the number of the newest batch
        self.wanted: int | None = None
        self.over = False  # no more batches will come
        self._left = False
        self._trained: asyncio.Future[Trained] | None = None
        self._changed = ChangeEvent()

    # The run's side

    async def meet(self, training: HandoffTraining) -> None:
        self.training, self.last = training, training.step  # of a run that is gone on with, batches are counted on

    async def wait_for_request(self) -> int | None:
        while self.wanted is None and not self._left:
            await self._changed.wait()
        return None if self._left else self.wanted

    async def train(self, groups: Sequence[Group], step: int) -> Trained:
        """Until it is done. Raises `Closed` when the trainer has left for good."""
        self.last += 1
        self.wanted, self.times = None, 0
        self.batch = TrainerBatch(number=self.last, step=step, version=self.training.version, groups=tuple(groups))
        self._trained = asyncio.get_running_loop().create_future()
        self._changed.notify()
        try:
            return await self._trained
        finally:
            self.batch = self._trained = None

    def end(self) -> None:
        """No more batches will come."""
        self.over = True
        self._changed.notify()

    # The trainer's side

    def want(self, groups: int) -> None:
        """The trainer waits for a batch of so many groups from now on; no effect while a batch is out."""
        if self.batch is None and not self.over:
            self.wanted = groups
            self._changed.notify()

    async def next(self, within_s: float | None) -> TrainerBatch | None:
        """The batch that is out, once there is one; None after the timeout, and when no more will come."""
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
        """That batch is trained on; a repeated report has no effect. Raises `UnknownBatch`."""
        if number > self.last or number < 1:
            raise UnknownBatch(f"batch {number} was never given: the newest is {self.last}.")
        if self.batch is None or self._trained is None or self.batch.number != number or self._trained.done():
            return
        self._trained.set_result(
            Trained(version=self.training.version, seconds=seconds, logprobs=logprobs, metrics=dict(metrics or {}))
        )
        self.batch = None  # the next request is for the next batch

    def leave(self) -> None:
        """The trainer wants no more batches: `train` raises `Closed`."""
        self._left = True
        if self._trained is not None and not self._trained.done():
            self._trained.set_exception(Closed("the trainer has left."))
        self._changed.notify()

    def without(self, gone: Sequence[Group]) -> None:
        """These groups of the batch that is out have become too old: the batch is given again without them."""
        if self.batch is not None and gone:
            numbers = {group.number for group in gone}
            left = tuple(group for group in self.batch.groups if group.number not in numbers)
            self.batch = msgspec.structs.replace(self.batch, groups=left)
