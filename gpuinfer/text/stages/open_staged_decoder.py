"""From a checkpoint to a decoder in stages: how long each layer takes is measured, layers are split, and each stage is
opened at its place with its share of the cache.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from gpuinfer.api import Lane, Setup
from gpuinfer.errors import UsageError
from gpuinfer.models.cuda_graphs import wait_for_device
from gpuinfer.models.device import resolve_devices
from gpuinfer.models.load import title
from gpuinfer.models.model_options import CutOptions
from gpuinfer.models.pipeline.open_pipeline import parallel_facts, placed, readings_of, threads_of
from gpuinfer.models.pipeline.schedule import Pipeline
from gpuinfer.models.pipeline.stage_plan import Split, fits_one, in_thread, places_of, split_for, starts_of, times_on
from gpuinfer.text.decoder.open_decoder import Sizing, estimate, free_memory, kernels_for, open_and_try, own_kernels
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.stages.staged_decoder import MicroBatchCutter, Portion, PortionDecoder, PortionSegment, StagedDecoder
from gpuinfer.text.transformer import Shape, Step, Weights

if TYPE_CHECKING:
    from gpuinfer.text.checkpoint import Checkpoint

ROWS = 16  # that are one token further: a usual step
PASSES = 5
MakePortion = Callable[[Portion, int, int], PortionDecoder]
"""A decoder of some layers with so many slots and pages."""


def layer_seconds(shape: Shape, make: MakePortion, threads: int) -> list[float]:
    """Of each layer, the embedding with the first and the head with the last: the least of several passes. Layers that
    are alike are measured once.
    """
    rows, zeros = np.arange(ROWS, dtype=np.int32), np.zeros(ROWS, np.int32)
    step = Step(zeros, rows[:, None].copy(), zeros, np.ones(ROWS, np.int32), rows)

    def measure(portion: Portion) -> float:
        taken = []
        with contextlib.closing(make(portion, ROWS, ROWS)) as decoder, torch.no_grad():
            compute = decoder.forward if portion.last else decoder.hidden
            for _ in range(1 + PASSES):  # the first compiles, and finds its memory
                before = time.perf_counter()
                compute(step)
                if decoder.device.type == "cuda":
                    wait_for_device(decoder.device)
                taken.append(time.perf_counter() - before)
        return min(taken[1:])

    known: dict[Hashable, float] = {}
    found = []
    for layer in range(shape.layers):
        portion = Portion(shape, layer, layer + 1)
        alike = portion.first, portion.last, shape.mixed(layer), shape.windows[layer : layer + 1]
        if alike not in known:
            known[alike] = in_thread(partial(measure, portion), threads)
        found.append(known[alike])
    return found


CPU_LEAST, CUDA_LEAST = 8, 64  # tokens of a micro-batch: with fewer a stage is mostly reading its weights
FILLED = 2  # micro-batches of a step for each stage: 2 s / (3 s - 1) of the time is work


class TextStageTuning(CutOptions, Protocol):
    """The user's options of cutting and running."""

    @property
    def threads(self) -> int | None: ...


@dataclass(frozen=True)
class PortionSettings:
    """What all portions' decoders have in common."""

    shape: Shape
    weights: Weights
    dtype: torch.dtype
    length: int
    deterministic: bool

    def decoder(self, portion: Portion, slots: int, pages: int, place: torch.device, threads: int) -> PortionDecoder:
        shape, weights = portion.shape, portion.weights(self.weights)
        common: dict[str, Any] = {"slots": slots, "pages": pages, "length": self.length}
        common["deterministic"] = self.deterministic
        if place.type == "cpu" and kernels_for(self.dtype):
            from gpuinfer.text.decoder.compiled_decoder import CpuDecoder

            return CpuDecoder(shape, weights, self.dtype, threads=threads, **common)
        return TorchDecoder(shape, weights, place, self.dtype, graphs=False, **common)


@dataclass(frozen=True)
class TextCut:
    """The layers of each stage of a text model, and its threads on a CPU."""

    places: Sequence[torch.device]  # of each stage
    split: Split
    sizes: Sequence[int]  # bytes of each layer's weights
    threads: Sequence[int]
    portions: Sequence[Portion]


def places_for(checkpoint: Checkpoint, setup: Setup, tuning: CutOptions) -> list[torch.device]:
    """Of each stage. Raises `UsageError` for a model that cannot be cut into so many."""
    if checkpoint.shape.decoder == "transformers":
        raise UsageError(
            f"{title(checkpoint.name)} is computed by transformers' own code, which is not cut into stages. Leave -B "
            "parallel out."
        )
    if not checkpoint.shape.layers:
        raise UsageError(f"{title(checkpoint.name)} has no layers to cut. Leave -B parallel out.")
    return places_of(tuning, resolve_devices(setup.devices), checkpoint_layer_paths(checkpoint), checkpoint.name)


def checkpoint_layer_paths(checkpoint: Checkpoint) -> list[list[str]]:
    """As the checkpoint's tensors call each layer, with and without what precedes all names (`model.layers.4`,
    `layers.4`).
    """
    named = (checkpoint.layout.layer_path(number) for number in range(checkpoint.shape.layers))
    return [list(dict.fromkeys([path, ".".join(path.split(".")[-2:])])) for path in named]


def split_by_times(
    times: Sequence[Sequence[float]],
    checkpoint: Checkpoint,
    weights: Weights,
    places: Sequence[torch.device],
    setup: Setup,
    tuning: TextStageTuning,
) -> TextCut:
    """By how long each layer takes at each stage's place, in any unit; of the weights only their sizes count. Raises
    `UsageError` where the devices have no room for them.
    """
    sizes = list(layer_bytes(weights))
    starts = starts_of(tuning, checkpoint_layer_paths(checkpoint), checkpoint.name)
    split = split_for(starts, places, sizes, times, checkpoint.name)
    seconds = [sum(times[number][start:stop]) for number, (start, stop) in enumerate(split)]
    portions = [Portion(checkpoint.shape, start, stop) for start, stop in split]
    return TextCut(places, split, sizes, threads_of(seconds, setup, tuning.threads), portions)


def split_by_measured_times(
    making: PortionSettings,
    checkpoint: Checkpoint,
    places: Sequence[torch.device],
    setup: Setup,
    tuning: TextStageTuning,
) -> TextCut:
    """By how long each layer takes where a stage would run, which is measured. Raises as `cut_by` does."""
    short = replace(making, length=1)

    def measure(place: torch.device, threads: int) -> list[float]:
        return layer_seconds(short.shape, partial(short.decoder, place=place, threads=threads), threads)

    times = times_on(places, setup, tuning.threads, measure)
    return split_by_times(times, checkpoint, making.weights, places, setup, tuning)


def open_in_stages(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    setup: Setup,
    tuning: TextStageTuning,
    *,
    slots: int | None,
    pages: int | None,
    length: int,
    step_tokens: int,
    sharing: int = 1,
    lane: Callable[[str], Lane],
) -> tuple[StagedDecoder, Sizing]:
    """As `decoder.open_sized`, on `setup.devices`. `lane` gives a lane of the ledger for each stage.

    Raises `UsageError` when the model cannot be cut so, or does not fit.
    """
    shape = checkpoint.shape
    places = places_for(checkpoint, setup, tuning)
    making = PortionSettings(shape, checkpoint.weights(dtype), dtype, length, setup.deterministic)
    cut = split_by_measured_times(making, checkpoint, places, setup, tuning)
    whole_fits = fits_one(places, sum(cut.sizes))
    portions, threads = cut.portions, cut.threads

    def find(shape: Shape, place: torch.device, free: int) -> Sizing:
        own = own_kernels(shape, dtype, place, compile=False)
        wanted: dict[str, Any] = {"slots": slots, "pages": pages, "length": length, "step_tokens": step_tokens}
        return estimate(shape, dtype, place, free, **wanted, own=own, sharing=sharing)

    on_cpu = places[0].type == "cpu"
    # On other devices the weights are there before room is counted.
    sizing = find(shape, places[0], free_memory(places[0])) if on_cpu else None
    room = (1, 1) if sizing is None else (sizing.slots, sizing.pages)
    each = zip(portions, places, threads, strict=True)
    decoders = [making.decoder(portion, *room, place, count) for portion, place, count in each]
    sizing = sizing or fill_devices(decoders, places, find, step_tokens)
    segments = [
        [PortionSegment(number, portion, decoder)]
        for number, (portion, decoder) in enumerate(zip(portions, decoders, strict=True))
    ]
    # The first stage's step comes from no other stage: it enters as it is.
    stages = placed(places, cut.split, segments, threads, setup, lambda value: value, None, mode=torch.no_grad)
    facts = parallel_facts(tuning.parallel, whole_fits, stages, cut.split, cut.sizes)
    reading = readings_of(stages)
    staged = StagedDecoder(
        shape,
        portions,
        decoders,
        Pipeline(stages, lane),
        cutter_of(tuning, places),
        alone=tuning.parallel == "layers",
        described=lambda: {**reading(), "parallel": facts},
        in_force={"threads": max(threads), "stages": len(stages)},
    )
    return staged, sizing


def cutter_of(tuning: CutOptions, places: Sequence[torch.device]) -> MicroBatchCutter:
    """How a step becomes micro-batches."""
    least = CPU_LEAST if places[0].type == "cpu" else CUDA_LEAST
    return MicroBatchCutter(tuning.micro_batch_rows, least, 1 if tuning.parallel == "layers" else FILLED * len(places))


def layer_bytes(weights: Weights) -> Iterator[int]:
    """Of each layer, the embedding with the first and the norm and head with the last."""
    last = len(weights.layers) - 1
    for number, layer in enumerate(weights.layers):
        size = _bytes(layer)
        if number == 0:
            size += weights.embedding.nbytes + _bytes(weights.positions)
        if number == last:
            size += _bytes(weights.norm) + _bytes(weights.head)
        yield size


def _bytes(part: Any) -> int:
    if isinstance(part, Tensor):
        return part.nbytes
    return 0 if part is None else sum(map(_bytes, vars(part).values()))


def fill_devices(
    decoders: Sequence[PortionDecoder],
    places: Sequence[torch.device],
    find: Callable[[Shape, torch.device, int], Sizing],
    step_tokens: int,
) -> Sizing:
    """Give all of them as many slots and pages as there is room for on the fullest device, tried with the largest step.
    Raises `UsageError` where there is room for those of no row.
    """
    sharing = {place: places.count(place) for place in places}
    found = [
        find(decoder.shape, place, free_memory(place) // sharing[place])
        for decoder, place in zip(decoders, places, strict=True)
    ]
    slots, pages = min(sizing.slots for sizing in found), min(sizing.pages for sizing in found)
    tried: list[Sizing] = []
    for decoder, sizing in zip(decoders, found, strict=True):
        assert isinstance(decoder, TorchDecoder)
        _, own = open_and_try(decoder, replace(sizing, slots=slots, pages=pages), step_tokens)
        slots, pages = own.slots, own.pages
        tried.append(own)
    for decoder in decoders:
        if (decoder.slots, decoder.pages) != (slots, pages):
            assert isinstance(decoder, TorchDecoder)
            decoder.resize(slots, pages)
    return Sizing(
        slots,
        pages,
        sum(own.page_bytes for own in tried),
        max(own.working_bytes for own in tried),
        min(own.free_bytes for own in tried),
        sum(own.measured_bytes or 0 for own in tried),
    )
