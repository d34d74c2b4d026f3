"""A model of text in stages, tried at numbers of rows that fill their context. Each stage has its layers' share of the
cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.memory.examining import HEAVY
from gpuinfer.memory.parts import Parts
from gpuinfer.memory.text import (
    MOST,
    answered,
    cache_bytes,
    cache_pages,
    facts_of_pages,
    lengths_of,
    pages_of,
    tuning_of,
    usual_slots,
    warm_up,
)
from gpuinfer.models.device import resolve_dtype
from gpuinfer.models.stages.pipeline import ROOM
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.estimate import (
    empty_weights,
    most_copied,
    page_bytes,
    refuse_short,
    weight_bytes,
    working,
)
from gpuinfer.text.decoder import own_kernels
from gpuinfer.text.decoder.sizing import estimate
from gpuinfer.text.generator import Tuning
from gpuinfer.text.generator.setup import asked, checked_context
from gpuinfer.text.stages.open_staged import Cut, Making, cut_by, cut_by_time, cutter_of, layer_bytes, places_for

FLOAT = 4  # bytes of a number that a stage hands on


class StagedText:
    """Implements `stages.Staged`."""

    timed = False

    def __init__(
        self,
        spec: ModelSpec,
        setup: Setup,
        options: Mapping[str, Any],
        devices: Sequence[torch.device],
        context: int | None,
        loaded: bool,
    ) -> None:
        """`loaded`: the weights may be read. Raises `UsageError` for a model that is not there, for a context that is
        longer than its own, for pages that do not hold it, and for stages that its layers do not allow.
        """
        self._spec, self._setup, self._loaded = spec, setup, loaded
        self._checkpoint = open_checkpoint(spec)
        self._shape, self._dtype = self._checkpoint.shape, resolve_dtype(setup.dtype)
        self._given = tuning_of(options)
        tuning = asked(spec, self._given, setup, devices[0], self._shape)
        self._step_tokens = tuning.step_tokens or 1
        self._places = places_for(self._checkpoint, setup, self._given)
        self.places: Sequence[str] = [str(place) for place in self._places]
        self.length = checked_context(self._shape, context or tuning.context)
        refuse_short(tuning.pages, self.length)
        self.most, self.first = min(MOST, tuning.pages or MOST), 1
        self.usual = min(self.most, tuning.slots or usual_slots(devices[0]))
        self._cutter = cutter_of(self._given, self._places)
        self._cut: Cut | None = None
        self._weights: Sequence[int] = ()  # of each stage
        self._split_by = ""

    def warm_up(self) -> None:
        for device in dict.fromkeys(self.places):
            setup = replace(self._setup, devices=(device,))
            warm_up(self._shape, setup, Tuning(step_tokens=self._step_tokens, threads=self._given.threads))

    def describe(self) -> None:
        if self._cut is not None:
            return
        known, checkpoint = empty_weights(self._checkpoint.layout, self._dtype), self._checkpoint
        sizes = list(layer_bytes(known))
        heavy = weight_bytes(checkpoint.layout, self._dtype) > HEAVY  # which is not read just to time its layers
        if self._given.split_points is None and self._loaded and not heavy:
            self._split_by = "time"
            making = Making(self._shape, checkpoint.weights(self._dtype), self._dtype, self.length, False)
            cut = cut_by_time(making, checkpoint, self._places, self._setup, self._given)
        else:
            self._split_by = "weights" if self._given.split_points is None else "given"
            cut = cut_by([sizes] * len(self._places), checkpoint, known, self._places, self._setup, self._given)
        points = tuple(start for start, _ in cut.split[1:])
        self._cut, self._given = cut, replace(self._given, split_points=points)  # the same one whenever it is opened
        self._weights = [sum(sizes[start:stop]) for start, stop in cut.split]

    def layers(self) -> Sequence[tuple[int, int]]:
        return [(start, stop - 1) for start, stop in self._known.split]

    @property
    def _known(self) -> Cut:
        assert self._cut is not None, "describe() comes first"
        return self._cut

    def parts(self, batch: int) -> Sequence[Parts]:
        tokens = max(batch, self._step_tokens)  # of a step
        pieces = self._cutter.count(tokens)
        return [self._of_stage(number, batch, math.ceil(tokens / pieces), pieces) for number in range(len(self.places))]

    def _of_stage(self, number: int, batch: int, tokens: int, pieces: int) -> Parts:
        """At micro-batches of so many tokens, of which the largest step has so many; some of them, as vectors, lie
        between this stage and the next.
        """
        shape, own = self._known.portions[number].shape, self._own(number)
        cache = cache_bytes(shape, cache_pages(self._given, batch, self.length), self._dtype, own)
        copied = most_copied(self._places[number])
        step = working(shape, tokens, batch, self.length, self._dtype, own, copied)
        last = number == len(self.places) - 1
        waiting = 0 if last else min(pieces, ROOM + 1) * tokens * shape.hidden * FLOAT
        return Parts(0, self._weights[number], cache, step.activations, step.copies + waiting)

    def _own(self, number: int) -> bool:
        return own_kernels(self._known.portions[number].shape, self._dtype, self._places[number], compile=False)

    def pages(self, free: int) -> Mapping[str, int] | None:
        given, place = self._given, self._places[0]
        if place.type != "cpu":  # each device has stages of its own, and the fullest decides
            return None
        return pages_of(
            lambda: estimate(
                self._shape,
                self._dtype,
                place,
                free - sum(self._weights),
                slots=given.slots,
                pages=given.pages,
                length=self.length,
                step_tokens=self._step_tokens,
                own=own_kernels(self._shape, self._dtype, place, compile=False),
            )
        )

    def run(self, batch: int) -> float:
        pages = cache_pages(self._given, batch, self.length)
        tuning = replace(self._given, slots=batch, pages=pages, context=self.length, step_tokens=self._step_tokens)
        lengths = lengths_of(self._shape, batch, self.length, self._step_tokens)
        return answered(self._spec, self._setup, tuning, lengths)

    def facts(self) -> Mapping[str, Any]:
        each = (
            page_bytes(portion.shape, self._dtype, self._own(number))
            for number, portion in enumerate(self._known.portions)
        )
        return {
            "family": self._shape.family,
            "context": self.length,
            "step_tokens": self._step_tokens,
            **facts_of_pages(sum(each), self.length, self._given.pages),
            "parallel": self._given.parallel,
            "stages": len(self.places),
            "split": self._split_by,
            "micro_batches": self._cutter.count(max(self.usual, self._step_tokens)),
        }
