"""A model of text, whole or in stages, tried at numbers of rows that fill their context.

Each stage has its layers' share of the cache.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.lab.memory.batch_trials import HEAVY, MemoryParts, StageParts, Stopwatch, at_once
from gpuinfer.models.device import resolve_dtype
from gpuinfer.models.model_options import stage_shares
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
from gpuinfer.text.decoder.open_decoder import CPU_SLOTS, CUDA_SLOTS, estimate
from gpuinfer.text.generator import open_generator
from gpuinfer.text.generator.draft_model import draft_memory
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
from gpuinfer.text.text_options import TorchModelOptions
from gpuinfer.text.transformer import PAGE, Shape

MOST = 65_536  # slots, as the backend has it
WARM_UP, MASKED_WARM_UP = "tiny", "tiny-llada"
NEW_TOKENS = 2
TUNED = set(TorchModelOptions.model_fields) - {"adapters"}  # which are not loaded here


class TextModelMemory:
    """What a model of text, whole or in stages, says before anything is tried. `options` are a backend's."""

    timed, first = False, 1

    def __init__(
        self,
        spec: ModelSpec,
        setup: Setup,
        options: Mapping[str, Any],
        devices: Sequence[torch.device],
        context: int | None,
    ) -> None:
        """Raises `UsageError` for a model that is not there, a context that is longer than its own, and pages that do
        not hold it.
        """
        self._spec, self._setup, self._device = spec, setup, devices[0]
        self._checkpoint = open_checkpoint(spec, options.get("decoder"))
        self._dtype, self._shape = resolve_dtype(setup.dtype), self._checkpoint.shape
        if not self._shape.layers and options.get("parallel", "data") == "data":  # else stages say what is wrong
            raise UsageError(f"model '{spec.name}' computes nothing and keeps nothing. Name a model that does.")
        self._given = TorchModelOptions.model_construct(
            **{name: options[name] for name in TUNED if options.get(name) is not None}
        )
        tuning = resolved_tuning(spec, self._given, setup, self._device, self._shape)
        self._step_tokens = tuning.step_tokens or 1
        self.length = checked_context(self._shape, context or tuning.context)
        refuse_short(tuning.pages, self.length)
        self._tuning = tuning.model_copy(update={"context": self.length})
        self.most = min(MOST, tuning.pages or MOST)
        usual = CUDA_SLOTS if self._device.type == "cuda" else CPU_SLOTS
        self.usual = min(self.most, tuning.slots or usual)

    def _cache_bytes(self, shape: Shape, rows: int, own: bool) -> int:
        """Of the pages that -B pages names, else of those that so many full rows take, as these layers keep them."""
        return (self._pages(rows) + (0 if own else SPARE_PAGES)) * page_bytes(shape, self._dtype, own)

    def _pages(self, rows: int) -> int:
        return self._tuning.pages or rows * row_pages(self.length)

    def _sizing(self, left: int, own: bool) -> Mapping[str, int] | None:
        """The rows at once and the pages that a run has by itself; None where there is no room for those of one row."""
        try:
            sizing = estimate(
                self._shape,
                self._dtype,
                self._device,
                left,
                slots=self._tuning.slots,
                pages=self._tuning.pages,
                length=self.length,
                step_tokens=self._step_tokens,
                own=own,
            )
        except UsageError:
            return None
        return {"slots": sizing.slots, "pages": sizing.pages, "cache_bytes": sizing.cache_bytes}

    def _answered(self, tuning: TorchModelOptions, batch: int, copies: int = 1) -> float:
        """So many prompts that take as much memory as there may be: a chunk as long as a step takes, beside rows of one
        token; of a diffusion model whole canvases, as many as a step takes.
        """
        longest = max(1, self.length - NEW_TOKENS)
        if self._shape.masking is None:
            lengths = [min(longest, self._step_tokens), *[1] * (batch - 1)]
        else:
            lengths = [longest] * min(batch, self._step_tokens // self.length + 1)
        tuning = tuning.model_copy(update={"slots": batch, "pages": self._pages(batch), "context": self.length})
        return answered(self._spec, self._setup, tuning, lengths, copies)

    def _facts(self, size: int) -> Mapping[str, Any]:
        """`size`: bytes of a page."""
        pages = row_pages(self.length)
        return {
            "family": self._shape.family,
            "context": self.length,
            "step_tokens": self._tuning.step_tokens,
            "page_tokens": PAGE,
            "page_bytes": size,
            "row_pages": pages,
            "row_bytes": pages * size,
            "asked_pages": self._tuning.pages,
        }


class TextSubject(TextModelMemory):
    """Implements `MemorySubject`."""

    def __init__(
        self,
        spec: ModelSpec,
        setup: Setup,
        options: Mapping[str, Any],
        device: torch.device,
        copies: int,
        context: int | None,
    ) -> None:
        super().__init__(spec, setup, options, [device], context)
        self._copies = copies
        self._own = own_kernels(self._shape, self._dtype, device, self._tuning.compile)
        weights_bytes = self._checkpoint.weight_bytes(self._dtype, self._tuning.weights, self._own)
        of_draft, self._draft_cache = 0, 0
        if self._tuning.draft is not None:
            asked = (self._tuning, device, self._dtype, self.length)
            of_draft, self._draft_cache = draft_memory(self._tuning.draft, *asked)
        self.process, self._weights = 0, weights_bytes + of_draft

    def warm_up(self) -> None:
        warm_up_text(self._shape, self._setup, self._tuning, self._copies)

    def describe(self) -> None:
        """There is nothing that the checkpoint does not say."""

    def parts(self, batch: int) -> MemoryParts:
        cache, rows = self._cache_bytes(self._shape, batch, self._own), max(batch, self._step_tokens)
        step = working(self._shape, rows, batch, self.length, self._dtype, self._own, most_copied(self._device))
        return MemoryParts(self.process, self._weights, cache + self._draft_cache, step.activations, step.copies)

    def stages(self, batch: int) -> Sequence[StageParts]:
        return ()

    def pages(self, free: int) -> Mapping[str, int] | None:
        return self._sizing(free // self._copies - self._weights - self._draft_cache, self._own)

    def run(self, batch: int) -> float:
        return self._answered(self._tuning, batch, self._copies)

    def facts(self) -> Mapping[str, Any]:
        return self._facts(page_bytes(self._shape, self._dtype, self._own))


def warm_up_text(shape: Shape, setup: Setup, tuning: TorchModelOptions, copies: int = 1) -> None:
    """A small model like this one answers a prompt."""
    spec = ModelSpec(WARM_UP if shape.masking is None else MASKED_WARM_UP, kind="text")
    context = checked_context(open_checkpoint(spec).shape, None)
    answered(
        spec, setup, tuning.model_copy(update={"slots": 2, "pages": 4, "context": min(context, 64)}), [8, 1], copies
    )


def answered(
    spec: ModelSpec, setup: Setup, tuning: TorchModelOptions, lengths: Sequence[int], copies: int = 1
) -> float:
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


class StagedText(TextModelMemory):
    """The stages of `StagesHere`."""

    def __init__(
        self,
        spec: ModelSpec,
        setup: Setup,
        options: Mapping[str, Any],
        devices: Sequence[torch.device],
        context: int | None,
        loaded: bool,
    ) -> None:
        """`loaded`: the weights may be read. Raises `UsageError` for stages that its layers do not allow."""
        super().__init__(spec, setup, options, devices, context)
        self._loaded = loaded
        self._places = places_for(self._checkpoint, setup, self._given)
        self._cutter = cutter_of(self._given, self._places)
        self._cut: TextCut | None = None
        self._weights: Sequence[int] = ()  # of each stage
        self._split_by = ""

    def warm_up(self) -> None:
        options = TorchModelOptions(step_tokens=self._step_tokens, threads=self._given.threads)
        for device in dict.fromkeys(self._places):
            warm_up_text(self._shape, replace(self._setup, devices=(str(device),)), options)

    def describe(self) -> None:
        if self._cut is not None:
            return
        known, checkpoint = empty_weights(self._checkpoint.layout, self._dtype), self._checkpoint
        sizes = list(layer_bytes(known))
        heavy = model_weight_bytes(checkpoint.layout, self._dtype) > HEAVY  # which is not read just to time its layers
        shares = stage_shares(self._given.stages)
        configured = self._given.split_points is not None or shares is not None
        if not configured and self._loaded and not heavy:
            self._split_by = "time"
            making = PortionSettings(self._shape, checkpoint.weights(self._dtype), self._dtype, self.length, False)
            cut = split_by_measured_times(making, checkpoint, self._places, self._setup, self._given)
        else:
            self._split_by = "given" if configured else "weights"
            cut = split_by_times([sizes] * len(self._places), checkpoint, known, self._places, self._setup, self._given)
        points = tuple(start for start, _ in cut.split[1:])
        self._cut = cut
        if shares is None:
            self._given = self._given.model_copy(update={"split_points": points})  # the same one whenever it is opened
        self._weights = [sum(sizes[start:stop]) for start, stop in cut.split]

    @property
    def _known(self) -> TextCut:
        assert self._cut is not None, "describe() comes first"
        return self._cut

    def stages(self, batch: int) -> Sequence[StageParts]:
        """Some vectors of micro-batches lie between one stage and the next."""
        most = max(batch, self._step_tokens)  # tokens of a step
        pieces = self._cutter.count(most)
        tokens, found = math.ceil(most / pieces), []
        each = zip(self._known.portions, self._places, self._known.split, strict=True)
        for number, (portion, place, (start, stop)) in enumerate(each):
            shape, own = portion.shape, self._own(number)
            cache = self._cache_bytes(shape, batch, own)
            step = working(shape, tokens, batch, self.length, self._dtype, own, most_copied(place))
            last = number == len(self._places) - 1
            waiting = 0 if last else min(pieces, ROOM + 1) * tokens * shape.hidden * FLOAT
            parts = MemoryParts(0, self._weights[number], cache, step.activations, step.copies + waiting)
            found.append(StageParts(number, str(place), (start, stop - 1), parts))
        return found

    def _own(self, number: int) -> bool:
        return own_kernels(self._known.portions[number].shape, self._dtype, self._places[number], compile=False)

    def pages(self, free: int) -> Mapping[str, int] | None:
        if self._device.type != "cpu":  # each device has stages of its own, and the fullest decides
            return None
        own = own_kernels(self._shape, self._dtype, self._device, compile=False)
        return self._sizing(free - sum(self._weights), own)

    def run(self, batch: int) -> float:
        return self._answered(self._given.model_copy(update={"step_tokens": self._step_tokens}), batch)

    def facts(self) -> Mapping[str, Any]:
        portions = enumerate(self._known.portions)
        return {
            **self._facts(sum(page_bytes(one.shape, self._dtype, self._own(number)) for number, one in portions)),
            "step_tokens": self._step_tokens,
            "parallel": self._given.parallel,
            "stages": len(self._places),
            "split": self._split_by,
            "micro_batches": self._cutter.count(max(self.usual, self._step_tokens)),
        }
