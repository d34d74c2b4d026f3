"""What a trainer is to a run: it takes batches of groups, and now and then says that its weights have changed."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from gpuinfer.rollouts.record import Group


class Trained(Struct, frozen=True, kw_only=True):
    """What came of one batch."""

    version: int  # of the trainer's weights now; the same as before: nothing has changed
    weights: str | None = None  # a folder or safetensors file that the backend can read; None: none are handed over
    adapter: str | None = None  # the weights are those of the adapter that prompts call so
    seconds: float = 0.0  # that it trained, by its own clock; 0: it does not say
    logprobs: Mapping[str, Sequence[Sequence[float]]] | None = None
    """Of each trajectory, by its id: of each turn's completion tokens, under the trainer's weights before this step.
    What the sampler's are held against (`kl.drift`)."""
    metrics: Mapping[str, float] = {}  # the trainer's own, such as its loss: they stand in the step's record


class Consumer(Protocol):
    """A trainer, in this process or behind a line. Its methods are called in turns, never both at once."""

    async def asks(self) -> int | None:
        """Wait until it wants a batch; of how many groups. None: it wants no more.

        From the return on, until the batch is there, it waits for rollouts.
        """
        ...

    async def train(self, groups: Sequence[Group], step: int) -> Trained:
        """Train on them, and say what came of it. Fewer groups than were asked for are the last ones."""
        ...


class SimulatedTrainer:
    """Takes its time and learns nothing: each step makes another version, and no weights, unless it is given some.

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

    async def asks(self) -> int | None:
        return self.batch

    async def train(self, groups: Sequence[Group], step: int) -> Trained:
        await asyncio.sleep(self.seconds)
        self.version += 1
        return Trained(version=self.version, weights=self.weights, adapter=self.adapter, seconds=self.seconds)


class Batch(Struct, frozen=True, kw_only=True):
    """Groups that a trainer behind a line was given, and has not told of yet."""

    number: int  # counts from 1; said again when it is done
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
