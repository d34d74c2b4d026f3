"""A model in stages as it lies in one memory: those of its stages that are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from gpuinfer.memory.parts import Parts, StageParts, added


class Staged(Protocol):
    """A model in stages that can be tried at several batch sizes. A batch counts what a run asks for at once."""

    first: int  # as of `parts.Subject`
    most: int
    usual: int
    timed: bool
    places: Sequence[str]  # the device of each stage

    def warm_up(self) -> None:
        """As `parts.Subject.warm_up`."""
        ...

    def describe(self) -> None:
        """As `parts.Subject.describe`. Asked again, it knows already."""
        ...

    def layers(self) -> Sequence[tuple[int, int]]:
        """The first and the last one of each stage, once it is described."""
        ...

    def parts(self, batch: int) -> Sequence[Parts]:
        """What a batch of so many should take in each stage, without the process."""
        ...

    def pages(self, free: int) -> Mapping[str, int] | None:
        """As `parts.Subject.pages`."""
        ...

    def run(self, batch: int) -> float:
        """As `parts.Subject.run`: with as many batches in flight as a run has."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """As `parts.Subject.facts`."""
        ...


class StagesHere:
    """Those on one device. Implements `parts.Subject`: they are tried with all the others, and measured here."""

    def __init__(self, model: Staged, device: str) -> None:
        self._model, self._device = model, device
        self.process = 0
        self.first, self.most, self.usual, self.timed = model.first, model.most, model.usual, model.timed
        self.warm_up, self.describe, self.run, self.facts = model.warm_up, model.describe, model.run, model.facts
        self.pages = model.pages

    def parts(self, batch: int) -> Parts:
        return replace(added(one.parts for one in self.stages(batch)), process=self.process)

    def stages(self, batch: int) -> Sequence[StageParts]:
        each = zip(self._model.places, self._model.layers(), self._model.parts(batch), strict=True)
        return [
            StageParts(number, layers, parts)
            for number, (place, layers, parts) in enumerate(each)
            if place == self._device
        ]
