"""Chooses the decoder for a checkpoint, a device and a number format, and how many slots and pages it has: estimated
first, then tried. `NullDecoder` computes nothing, to measure everything around a decoder.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.host.machine import memory_available
from gpuinfer.models.cuda_graphs import release_cached_memory, wait_for_device
from gpuinfer.models.model_options import CompileMode
from gpuinfer.models.out_of_memory import first_line, is_out_of_memory
from gpuinfer.text.checkpoint.memory_estimate import (
    SAMPLING_COPIES,
    SCORED_ROWS,
    most_copied,
    most_outputs,
    page_bytes,
    row_pages,
    working,
)
from gpuinfer.text.checkpoint.transformers_folder import TransformersCheckpoint
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.text_options import WeightFormat
from gpuinfer.text.transformer import PAGE, Adapter, Decoder, Shape, Step, Weights

if TYPE_CHECKING:
    from gpuinfer.text.checkpoint import Checkpoint
    from gpuinfer.text.decoder.transformers_decoder import TransformersDecoder

logger = logging.getLogger("gpuinfer")
Sizeable = TypeVar("Sizeable", "TorchDecoder", "TransformersDecoder")

CPU_SLOTS, CUDA_SLOTS = 64, 1024  # beyond them a step takes longer and no more rows come out of it in the same time
CPU_SHARE, CUDA_SHARE = 0.5, 0.9  # of the free memory
SLOTS_SHARE = 0.25  # of these: for what slots beyond the first add to a step, such as logits; the rest is for pages
SHRINK = 0.8
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Sizing:
    """How slots and pages were found. Bytes; `cache_bytes` and `working_bytes` are what was expected."""

    slots: int
    pages: int
    page_bytes: int
    working_bytes: int  # of the largest step
    free_bytes: int  # beside the weights, before there was a cache
    measured_bytes: int | None = None  # cache and largest step together; None: not tried, as on the CPU

    @property
    def cache_bytes(self) -> int:
        return self.pages * self.page_bytes

    @property
    def estimated_bytes(self) -> int:
        """What `measured_bytes` should be."""
        return self.cache_bytes + self.working_bytes


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated there."""
    if device.type != "cuda":
        return memory_available()
    gc.collect()
    release_cached_memory()
    return int(torch.cuda.mem_get_info(device)[0])


def estimate(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    free: int,
    *,
    slots: int | None,
    pages: int | None,
    length: int,
    step_tokens: int,
    own: bool = False,
    sharing: int = 1,
) -> Sizing:
    """How many rows at once, and pages for rows of up to `length` positions, there is room for in `free` bytes; `slots`
    and `pages` are what the user wants. `own`: our own kernels compute (`checkpoint/memory_estimate.py`); `sharing`:
    models that find the same memory free and fill it later.

    Raises `UsageError`, with the numbers, when there is no room for those pages, or not even for one row's.
    """
    share, most = (CUDA_SHARE, CUDA_SLOTS) if device.type == "cuda" else (CPU_SHARE, CPU_SLOTS)
    each, of_a_row, room = page_bytes(shape, dtype, own), row_pages(length), int(free * share) // sharing

    def step_bytes(count: int) -> int:
        return working(shape, max(count, step_tokens), count, length, dtype, own, most_copied(device)).total

    if slots is None:
        few = step_bytes(1)
        bound = few + SLOTS_SHARE * max(0, room - few)
        slots = next(count for count in range(most, 0, -1) if count == 1 or step_bytes(count) <= bound)
    least = Sizing(min(slots, pages or slots), pages or of_a_row, each, step_bytes(slots), free)
    if least.estimated_bytes > free:
        raise too_large(least, length)
    if pages is not None:
        return least
    fitting = (room - least.working_bytes) // max(1, each)
    pages = max(of_a_row, min(slots * of_a_row, fitting))
    return replace(least, slots=min(slots, pages), pages=pages)


def too_large(sizing: Sizing, length: int) -> UsageError:
    sizes = (sizing.cache_bytes, sizing.working_bytes, sizing.free_bytes)
    pages, step, free = (f"{round(size / MEBIBYTE):,} MiB" for size in sizes)
    return UsageError(
        f"{sizing.pages:,} pages of {PAGE} tokens need {pages} and a step of {sizing.slots:,} rows {step}, but only "
        f"{free} are free beside the model; one row of {length:,} tokens takes {row_pages(length):,} pages. Use a "
        "shorter --context, fewer -B pages, a smaller --batch-size, or --dtype bfloat16."
    )


def open_and_try(decoder: Sizeable, sizing: Sizing, step_tokens: int) -> tuple[Sizeable, Sizing]:
    """`decoder` with the slots and pages that `sizing` says, after the largest step that it may see; with fewer pages
    when there is no room for that. Raises `UsageError` when there is none for those of one row.
    """
    while True:
        try:
            decoder.resize(sizing.slots, sizing.pages)
            return decoder, replace(sizing, measured_bytes=largest_step_bytes(decoder, step_tokens))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # its frames hold on to the memory
        of_a_row = row_pages(decoder.length)
        if sizing.pages == of_a_row and sizing.slots == 1:
            raise too_large(sizing, decoder.length) from failure
        # Fewer pages, and where there are only those of one row fewer slots.
        pages = max(of_a_row, int(sizing.pages * SHRINK))
        slots = min(sizing.slots, pages) if pages < sizing.pages else max(1, int(sizing.slots * SHRINK))
        flags = f"-B pages={pages}" if slots == sizing.slots else f"--batch-size {slots} -B pages={pages}"
        logger.warning(
            "no room for %d pages and steps of %d rows (%s): going on with %d and %d. Set %s to start there.",
            sizing.pages,
            sizing.slots,
            first_line(failure),
            pages,
            slots,
            flags,
        )
        working_bytes = sizing.working_bytes * slots // sizing.slots
        sizing = replace(sizing, slots=slots, pages=pages, working_bytes=working_bytes)


def largest_step_bytes(decoder: TorchDecoder | TransformersDecoder, step_tokens: int) -> int:
    """Compute the steps that need most memory. Returns the peak of cache and steps, in bytes."""
    cuda = decoder.device.type == "cuda"
    before = torch.cuda.memory_allocated(decoder.device) - decoder.held_bytes() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(decoder.device)
    # First those of graphs, which keep what they work in while the largest is taken.
    sizes = sorted({min(step_tokens, decoder.most_prompt_tokens), step_tokens} - {0})
    steps = [
        step
        for size in sizes
        for step in largest_steps(decoder.shape, decoder.slots, decoder.pages, decoder.length, size)
    ]
    for step in 2 * steps:  # what is captured as a graph is captured the second time
        logits = decoder.forward(step)
        if decoder.shape.masking is None:  # as much memory as sampling takes for these logits
            copies = [torch.empty_like(logits) for _ in range(SAMPLING_COPIES - 1)]
        else:
            scored = logits[:SCORED_ROWS]
            copies = [torch.empty_like(scored, dtype=torch.float64) for _ in range(SAMPLING_COPIES)]
            del scored
        del copies, logits
    decoder.empty()
    if not cuda:
        return decoder.held_bytes()
    wait_for_device(decoder.device)
    return torch.cuda.max_memory_allocated(decoder.device) - before


def largest_steps(shape: Shape, slots: int, pages: int, length: int, step_tokens: int) -> list[Step]:
    """One token in each full row; and the same but for one row, which takes as long a chunk of a prompt as can be.
    Where there are fewer pages than full rows need the rows share some: the results mean nothing.

    Of a diffusion model as many whole canvases as there may be, one at least, and logits for as many of their tokens.
    """
    if shape.masking is not None:
        count = max(1, min(slots, step_tokens // length))
        tokens, starts = np.zeros(count * length, np.int32), np.zeros(count, np.int32)
        wanted = np.arange(min(len(tokens), max(most_outputs(shape), length)), dtype=np.int32)
        lengths, sees = np.full(count, length, np.int32), np.full(len(tokens), length, np.int32)
        return [Step(tokens, _table(count, pages, length), starts, lengths, wanted, sees=sees)]
    chunk = max(1, min(length, step_tokens - (slots - 1)))
    steps = []
    for last in sorted({1, chunk}):
        lengths = np.array([1] * (slots - 1) + [last], np.int32)
        wanted = np.cumsum(lengths, dtype=np.int32) - 1
        tokens = np.zeros(int(lengths.sum()), np.int32)
        steps.append(Step(tokens, _table(slots, pages, length), np.int32(length) - lengths, lengths, wanted))
    return steps


def _table(rows: int, pages: int, length: int) -> NDArray[np.int32]:
    count = rows * row_pages(length)
    return (np.arange(count, dtype=np.int32) % pages).reshape(rows, -1)


LETTER = ord("a")


class NullDecoder:
    """`step.Decoder` that answers every token with the same logits: 1 for one letter, 0 for all else."""

    def __init__(
        self, shape: Shape, *, slots: int, pages: int, length: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.computes_in = str(dtype).removeprefix("torch.")
        self.reads_drawn, self.pages_go_back = False, True
        self.shape, self.slots, self.pages, self.length = shape, slots, pages, length
        self.device = torch.device("cpu")
        tokens = (LETTER, *range(shape.vocabulary))
        self.token = next(token for token in tokens if token < shape.vocabulary and token not in shape.end_tokens)
        self._logits = torch.zeros((0, shape.vocabulary))

    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        rows = len(step.wanted)
        if rows > len(self._logits):  # the sampler leaves them as they are
            self._logits = torch.zeros((rows, self.shape.vocabulary))
            self._logits[:, self.token] = 1
        return self._logits[:rows]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        pass

    def give_back(self, pages: Sequence[int]) -> None:
        pass

    def resize(self, slots: int, pages: int) -> None:
        self.slots, self.pages = slots, pages

    def drop_graphs(self) -> None:
        pass

    def embedding(self) -> Tensor:
        return torch.zeros((self.shape.vocabulary, 0))

    def weight_tensors(self) -> Sequence[Tensor]:
        return []

    def pack(self, weights: Weights) -> object:
        return weights

    def swap(self, packed: object) -> None:
        pass

    def pack_adapter(self, adapter: Adapter) -> object:
        return adapter

    def load(self, number: int, packed: object) -> None:
        pass

    def unload(self, number: int) -> None:
        pass

    def cache_bytes(self) -> int:
        return 0

    def use(self, threads: int) -> None:
        pass

    def rest(self) -> None:
        pass

    def close(self) -> None:
        pass


STEP_TOKENS = 2048
NULL_SLOTS = 1024


def open_sized(
    checkpoint: Checkpoint,
    weights_dtype: torch.dtype,
    device: torch.device,
    *,
    slots: int | None,
    pages: int | None,
    length: int,
    threads: int,
    deterministic: bool,
    compile: CompileMode,
    graphs: bool,
    step_tokens: int = STEP_TOKENS,
    sharing: int = 1,
    quantised: WeightFormat | None = None,
    kernels: bool = True,
) -> tuple[Decoder, Sizing]:
    """A decoder, and how its slots and pages were found: `slots` rows in a step, or None for as many as are worth
    while, and `pages` in the cache, or None for as many as these rows need at full length and there is memory for.

    `step_tokens` is the most tokens that one step will bring; `sharing` the models that have the CPU's memory together.
    On the CPU float32 and bfloat16 have compiled kernels of our own where the processor can run them; `threads` is how
    many take part. `quantised`: what matrices are rounded to; `kernels`: false for torch's operations alone. Raises
    `UsageError` when the model does not fit, or the requested pages do not.
    """
    if device.type == "cpu":
        torch.set_num_threads(threads)  # of this process: torch knows no other way
    shape = checkpoint.shape
    if shape.family == "null":
        count = slots or NULL_SLOTS
        of_all = pages or count * row_pages(length)
        decoder = NullDecoder(shape, slots=min(count, of_all), pages=of_all, length=length, dtype=weights_dtype)
        return decoder, Sizing(decoder.slots, of_all, 0, 0, free_memory(device))
    if isinstance(checkpoint, TransformersCheckpoint):
        if compile:
            raise UsageError(
                "-B compile is for our own decoders, and transformers' code computes this model. Leave it out."
            )
        if quantised is not None:
            raise UsageError(
                f"-B weights={quantised} is for the decoder native, and transformers' own code computes this model. "
                "Leave weights out, or give a folder that is quantised."
            )
        return open_traced(
            checkpoint,
            weights_dtype,
            device,
            {"slots": slots, "pages": pages, "length": length, "step_tokens": step_tokens},
            threads=threads,
            deterministic=deterministic,
            sharing=sharing,
        )
    own = kernels and own_kernels(shape, weights_dtype, device, compile)
    bits = {None: None, "int8": 8, "int4": 4}[quantised]
    if bits and shape.experts and not own:
        raise UsageError(
            f"-B weights={quantised}: experts are quantised on a CPU by our own kernels alone. Use --device cpu "
            "without compile, or leave weights out."
        )
    weights = checkpoint.weights(weights_dtype, by_layer=True)  # so they are never in memory twice

    def find(free: int) -> Sizing:
        wanted: dict[str, Any] = {"slots": slots, "pages": pages, "length": length, "step_tokens": step_tokens}
        return estimate(shape, weights_dtype, device, free, **wanted, own=own, sharing=sharing)

    how: dict[str, Any] = {"length": length, "deterministic": deterministic, "bits": bits}
    open_with = partial(TorchDecoder, shape, weights, device, weights_dtype, **how, kernels=None if kernels else False)
    if device.type == "cuda":
        # Free memory is counted once the weights are on the device.
        whole = open_with(slots=1, pages=1, compile=compile, graphs=graphs)
        return open_and_try(whole, find(free_memory(device)), step_tokens)
    sizing = find(free_memory(device) - checkpoint.weight_bytes(weights_dtype, quantised, own))
    if not own:
        return open_with(slots=sizing.slots, pages=sizing.pages, compile=compile, graphs=False), sizing
    from gpuinfer.text.decoder.compiled_decoder import CpuDecoder

    counts: dict[str, Any] = {"slots": sizing.slots, "pages": sizing.pages, "threads": threads}
    return CpuDecoder(shape, weights, weights_dtype, **counts, **how), sizing


def open_traced(
    checkpoint: TransformersCheckpoint,
    dtype: torch.dtype,
    device: torch.device,
    wanted: Mapping[str, Any],
    *,
    threads: int,
    deterministic: bool,
    sharing: int,
) -> tuple[Decoder, Sizing]:
    """As `open_sized`, of a model that transformers' own code computes."""
    from gpuinfer.text.decoder.transformers_decoder import TransformersDecoder

    shape, length, traced = checkpoint.shape, wanted["length"], checkpoint.traced
    kernels = device.type == "cpu" and kernels_for(dtype)
    sized, twice = shape, 0
    if kernels:
        from gpuinfer.text.decoder.traced_attention import panel_page_bytes

        sized = replace(shape, cached_values=panel_page_bytes(traced.calls, dtype) // (PAGE * dtype.itemsize))
        twice = shape.vocabulary * shape.hidden * dtype.itemsize if shape.tied else 0  # head and embedding

    def find(free: int) -> Sizing:
        return estimate(sized, dtype, device, free, **wanted, sharing=sharing)

    opened = partial(
        TransformersDecoder,
        shape,
        traced,
        length=length,
        threads=threads,
        kernels=kernels,
        deterministic=deterministic,
    )
    if device.type == "cuda":
        whole = opened(checkpoint.model(dtype), device, dtype, slots=1, pages=1)
        return open_and_try(whole, find(free_memory(device)), wanted["step_tokens"])
    sizing = find(free_memory(device) - checkpoint.weight_bytes(dtype) - twice)
    return opened(checkpoint.model(dtype), device, dtype, slots=sizing.slots, pages=sizing.pages), sizing


def own_kernels(shape: Shape, dtype: torch.dtype, device: torch.device, compile: CompileMode) -> bool:
    """Whether our own kernels compute a step; else torch does."""
    native = shape.decoder == "native" and shape.layers > 0
    return device.type == "cpu" and not compile and native and kernels_for(dtype)


def kernels_for(dtype: torch.dtype) -> bool:
    """Whether our own kernels can run here."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    from gpuinfer.text.decoder.compiled_decoder import cpu_available

    return cpu_available(dtype)
