"""A model of text, whole or in stages, tried at numbers of rows that fill their context.

Each stage has its layers' share of the cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.lab.memory.batch_trials import HEAVY, MemoryParts, StageParts, Stopwatch, at_once
from gpuinfer.models.device import resolve_dtype
from gpuinfer.models.pipeline.schedule import ROOM
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.memory_estimate import (
    SPARE_PAGES,
    empty_weights,
    model_weight_bytes,
    most_copied,
    page_bytes,
    refuse_short,
    row_pages,
    working,
)
from gpuinfer.text.decoder import own_kernels
from gpuinfer.text.decoder.open_decoder import CPU_SLOTS, CUDA_SLOTS, Sizing, estimate
from gpuinfer.text.generator import Tuning, open_generator
from gpuinfer.text.generator.prompts import Prepared
from gpuinfer.text.generator.setup import checked_context, resolved_tuning
from gpuinfer.text.stages.open_staged_decoder import (
    PortionSettings,
    TextCut,
    cutter_of,
    layer_bytes,
    places_for,
    split_by_measured_times,
    split_by_times,
)
from gpuinfer.text.transformer import PAGE, Shape

MOST = 65_536  # slots, as the backend has it
WARM_UP, MASKED_WARM_UP = "tiny", "tiny-llada"
NEW_TOKENS = 2
TUNED = {field.name for field in fields(Tuning)} - {"adapters"}  # which are not loaded here


class TextSubject:
    """Implements `parts.Subject`."""

    timed = False

    def __init__(
        self,
        spec: ModelSpec,
        setup: Setup,
        options: Mapping[str, Any],
        device: torch.device,
        copies: int,
        context: int | None,
    ) -> None:
        """Raises `UsageError` for a model that is not there, a context that is longer than its own, and pages that do
        not hold it.
        """
        self._spec, self._setup, self._device, self._copies = spec, setup, device, copies
        self._checkpoint = open_checkpoint(spec)
        self._dtype, self._shape = resolve_dtype(setup.dtype), self._checkpoint.shape
        self._tuning = resolved_tuning(spec, generator_tuning(options), setup, device, self._shape)
        if not self._shape.layers:
            raise UsageError(f"model '{spec.name}' computes nothing and keeps nothing. Name a model that does.")
        self.length = checked_context(self._shape, context or self._tuning.context)
        refuse_short(self._tuning.pages, self.length)
        self._own = own_kernels(self._shape, self._dtype, device, self._tuning.compile)
        self.most, self.first = min(MOST, self._tuning.pages or MOST), 1
        self.usual = min(self.most, self._tuning.slots or usual_slots(device))
        self.process, self._weights = 0, model_weight_bytes(self._checkpoint.layout, self._dtype)

    def warm_up(self) -> None:
        warm_up_text(self._shape, self._setup, self._tuning, self._copies)

    def describe(self) -> None:
        """There is nothing that the checkpoint does not say."""

    def parts(self, batch: int) -> MemoryParts:
        cache = cache_bytes(self._shape, cache_pages(self._tuning, batch, self.length), self._dtype, self._own)
        rows = max(batch, self._tuning.step_tokens or 1)
        step = working(self._shape, rows, batch, self.length, self._dtype, self._own, most_copied(self._device))
        return MemoryParts(self.process, self._weights, cache, step.activations, step.copies)

    def stages(self, batch: int) -> Sequence[StageParts]:
        return ()

    def pages(self, free: int) -> Mapping[str, int] | None:
        left, tuning = free // self._copies - self._weights, self._tuning
        return pages_of(
            lambda: estimate(
                self._shape,
                self._dtype,
                self._device,
                left,
                slots=tuning.slots,
                pages=tuning.pages,
                length=self.length,
                step_tokens=tuning.step_tokens or 1,
                own=self._own,
            )
        )

    def run(self, batch: int) -> float:
        pages = cache_pages(self._tuning, batch, self.length)
        tuning = replace(self._tuning, slots=batch, pages=pages, context=self.length)
        lengths = lengths_of(self._shape, batch, self.length, self._tuning.step_tokens or 1)
        return answered(self._spec, self._setup, tuning, lengths, self._copies)

    def facts(self) -> Mapping[str, Any]:
        return {
            "family": self._shape.family,
            "context": self.length,
            "step_tokens": self._tuning.step_tokens,
            **facts_of_pages(page_bytes(self._shape, self._dtype, self._own), self.length, self._tuning.pages),
        }


def generator_tuning(options: Mapping[str, Any]) -> Tuning:
    """What a backend's options say of generation."""
    return Tuning(**{name: options[name] for name in TUNED if options.get(name) is not None})


def cache_pages(tuning: Tuning, rows: int, length: int) -> int:
    """The pages that -B pages names, else those that so many full rows take."""
    return tuning.pages or rows * row_pages(length)


def cache_bytes(shape: Shape, pages: int, dtype: torch.dtype, own: bool) -> int:
    """Of the keys and values in so many pages, as these layers keep them."""
    return (pages + (0 if own else SPARE_PAGES)) * page_bytes(shape, dtype, own)


def facts_of_pages(size: int, length: int, asked: int | None) -> Mapping[str, int | None]:
    """Of pages of so many bytes: their tokens, what a row of `length` tokens takes, and how many are `asked` for."""
    pages = row_pages(length)
    return {
        "page_tokens": PAGE,
        "page_bytes": size,
        "row_pages": pages,
        "row_bytes": pages * size,
        "asked_pages": asked,
    }


def pages_of(find: Callable[[], Sizing]) -> Mapping[str, int] | None:
    """The rows at once and the pages that a run has by itself; None where there is no room for those of one row."""
    try:
        sizing = find()
    except UsageError:
        return None
    return {"slots": sizing.slots, "pages": sizing.pages, "cache_bytes": sizing.cache_bytes}


def usual_slots(device: torch.device) -> int:
    """The slots of a generator unless an option says otherwise."""
    return CUDA_SLOTS if device.type == "cuda" else CPU_SLOTS


def warm_up_text(shape: Shape, setup: Setup, tuning: Tuning, copies: int = 1) -> None:
    """A small model like this one answers a prompt."""
    spec = ModelSpec(WARM_UP if shape.masking is None else MASKED_WARM_UP, kind="text")
    context = checked_context(open_checkpoint(spec).shape, None)
    answered(spec, setup, replace(tuning, slots=2, pages=4, context=min(context, 64)), [8, 1], copies)


def lengths_of(shape: Shape, rows: int, length: int, step_tokens: int) -> list[int]:
    """Of prompts that take as much memory as there may be: a chunk as long as a step takes, beside rows of one token;
    of a diffusion model whole canvases, as many as a step takes.
    """
    longest = max(1, length - NEW_TOKENS)
    if shape.masking is None:
        return [min(longest, step_tokens), *[1] * (rows - 1)]
    return [longest] * min(rows, step_tokens // length + 1)


def answered(spec: ModelSpec, setup: Setup, tuning: Tuning, lengths: Sequence[int], copies: int = 1) -> float:
    """Answer prompts of so many tokens at once in each copy, every page of the cache taken: the seconds it took."""
    with contextlib.ExitStack() as opened:
        calls = []
        for _ in range(copies):
            generator = open_generator(spec, replace(setup, model=spec), tuning)
            opened.callback(generator.close)
            calls.append(partial(_answer, generator, lengths))
        return at_once(calls)


def _answer(generator: Any, lengths: Sequence[int]) -> float:
    generator.decoder.empty()  # which has every page of the cache resident
    watch = Stopwatch()
    sampling = Sampling(max_tokens=min(NEW_TOKENS, generator.decoder.length - 1), top_p=0.9, ignore_eos=True)
    prompts = [Prompt(tokens=(0,) * length, sampling=sampling) for length in lengths]
    for number, prepared in enumerate(generator.prepare(prompts)):
        if not isinstance(prepared, Prepared):
            raise prepared
        generator.add(number, prepared)
    while generator.busy:
        generator.step()
    return watch.seconds()


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
        self._given = generator_tuning(options)
        tuning = resolved_tuning(spec, self._given, setup, devices[0], self._shape)
        self._step_tokens = tuning.step_tokens or 1
        self._places = places_for(self._checkpoint, setup, self._given)
        self.places: Sequence[str] = [str(place) for place in self._places]
        self.length = checked_context(self._shape, context or tuning.context)
        refuse_short(tuning.pages, self.length)
        self.most, self.first = min(MOST, tuning.pages or MOST), 1
        self.usual = min(self.most, tuning.slots or usual_slots(devices[0]))
        self._cutter = cutter_of(self._given, self._places)
        self._cut: TextCut | None = None
        self._weights: Sequence[int] = ()  # of each stage
        self._split_by = ""

    def warm_up(self) -> None:
        for device in dict.fromkeys(self.places):
            setup = replace(self._setup, devices=(device,))
            warm_up_text(self._shape, setup, Tuning(step_tokens=self._step_tokens, threads=self._given.threads))

    def describe(self) -> None:
        if self._cut is not None:
            return
        known, checkpoint = empty_weights(self._checkpoint.layout, self._dtype), self._checkpoint
        sizes = list(layer_bytes(known))
        heavy = model_weight_bytes(checkpoint.layout, self._dtype) > HEAVY  # which is not read just to time its layers
        if self._given.split_points is None and self._loaded and not heavy:
            self._split_by = "time"
            making = PortionSettings(self._shape, checkpoint.weights(self._dtype), self._dtype, self.length, False)
            cut = split_by_measured_times(making, checkpoint, self._places, self._setup, self._given)
        else:
            self._split_by = "weights" if self._given.split_points is None else "given"
            cut = split_by_times([sizes] * len(self._places), checkpoint, known, self._places, self._setup, self._given)
        points = tuple(start for start, _ in cut.split[1:])
        self._cut, self._given = cut, replace(self._given, split_points=points)  # the same one whenever it is opened
        self._weights = [sum(sizes[start:stop]) for start, stop in cut.split]

    def layers(self) -> Sequence[tuple[int, int]]:
        return [(start, stop - 1) for start, stop in self._known.split]

    @property
    def _known(self) -> TextCut:
        assert self._cut is not None, "describe() comes first"
        return self._cut

    def parts(self, batch: int) -> Sequence[MemoryParts]:
        tokens = max(batch, self._step_tokens)  # of a step
        pieces = self._cutter.count(tokens)
        return [self._of_stage(number, batch, math.ceil(tokens / pieces), pieces) for number in range(len(self.places))]

    def _of_stage(self, number: int, batch: int, tokens: int, pieces: int) -> MemoryParts:
        """At micro-batches of so many tokens, of which the largest step has so many; some of them, as vectors, lie
        between this stage and the next.
        """
        shape, own = self._known.portions[number].shape, self._own(number)
        cache = cache_bytes(shape, cache_pages(self._given, batch, self.length), self._dtype, own)
        copied = most_copied(self._places[number])
        step = working(shape, tokens, batch, self.length, self._dtype, own, copied)
        last = number == len(self.places) - 1
        waiting = 0 if last else min(pieces, ROOM + 1) * tokens * shape.hidden * FLOAT
        return MemoryParts(0, self._weights[number], cache, step.activations, step.copies + waiting)

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
