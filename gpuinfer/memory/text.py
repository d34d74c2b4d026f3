"""A model of text, tried at numbers of rows that fill their context."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.memory.parts import Parts, StageParts, Stopwatch, at_once
from gpuinfer.models.device import resolve_dtype
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.estimate import (
    SPARE_PAGES,
    most_copied,
    page_bytes,
    refuse_short,
    row_pages,
    weight_bytes,
    working,
)
from gpuinfer.text.decoder import own_kernels
from gpuinfer.text.decoder.sizing import CPU_SLOTS, CUDA_SLOTS, Sizing, estimate
from gpuinfer.text.generator import Tuning, open_generator
from gpuinfer.text.generator.prepared import Prepared
from gpuinfer.text.generator.setup import asked, checked_context
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import PAGE

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
        self._tuning = asked(spec, tuning_of(options), setup, device, self._shape)
        if not self._shape.layers:
            raise UsageError(f"model '{spec.name}' computes nothing and keeps nothing. Name a model that does.")
        self.length = checked_context(self._shape, context or self._tuning.context)
        refuse_short(self._tuning.pages, self.length)
        self._own = own_kernels(self._shape, self._dtype, device, self._tuning.compile)
        self.most, self.first = min(MOST, self._tuning.pages or MOST), 1
        self.usual = min(self.most, self._tuning.slots or usual_slots(device))
        self.process, self._weights = 0, weight_bytes(self._checkpoint.layout, self._dtype)

    def warm_up(self) -> None:
        warm_up(self._shape, self._setup, self._tuning, self._copies)

    def describe(self) -> None:
        """There is nothing that the checkpoint does not say."""

    def parts(self, batch: int) -> Parts:
        cache = cache_bytes(self._shape, cache_pages(self._tuning, batch, self.length), self._dtype, self._own)
        rows = max(batch, self._tuning.step_tokens or 1)
        step = working(self._shape, rows, batch, self.length, self._dtype, self._own, most_copied(self._device))
        return Parts(self.process, self._weights, cache, step.activations, step.copies)

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


def tuning_of(options: Mapping[str, Any]) -> Tuning:
    """What a backend's options say of generation."""
    return Tuning(**{name: options[name] for name in TUNED if options.get(name) is not None})


def cache_pages(tuning: Tuning, rows: int, length: int) -> int:
    """As many as are asked for, however many rows there are; where none are, what so many full rows take."""
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
    """Where nobody says."""
    return CUDA_SLOTS if device.type == "cuda" else CPU_SLOTS


def warm_up(shape: Shape, setup: Setup, tuning: Tuning, copies: int = 1) -> None:
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
