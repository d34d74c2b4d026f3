"""How many slots the memory has room for: estimated first, then tried."""

from __future__ import annotations

import gc
import logging
from dataclasses import dataclass, replace

import numpy as np
import torch

from gpuinfer.errors import UsageError
from gpuinfer.host.machine import memory_available
from gpuinfer.models.memory import first_line, is_out_of_memory
from gpuinfer.text.checkpoint.estimate import SAMPLING_COPIES, SCORED_ROWS, most_outputs, slot_bytes, working_bytes
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import Step

logger = logging.getLogger("gpuinfer")

CPU_SLOTS, CUDA_SLOTS = 64, 1024  # beyond them a step takes longer and no more rows come out of it in the same time
CPU_SHARE, CUDA_SHARE = 0.5, 0.9  # of the free memory
SHRINK = 0.8
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Sizing:
    """How the number of slots was found. Bytes; `cache_bytes` and `working_bytes` are what was expected."""

    slots: int
    slot_bytes: int
    working_bytes: int  # of the largest step
    free_bytes: int  # beside the weights, before there was a cache
    measured_bytes: int | None = None  # cache and largest step together; None: not tried, as on the CPU

    @property
    def cache_bytes(self) -> int:
        return self.slots * self.slot_bytes

    @property
    def estimated_bytes(self) -> int:
        """What `measured_bytes` should be."""
        return self.cache_bytes + self.working_bytes


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken there."""
    if device.type != "cuda":
        return memory_available()
    gc.collect()
    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def estimate(
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    free: int,
    *,
    slots: int | None,
    length: int,
    step_tokens: int,
    lanes: int = 0,
) -> Sizing:
    """How many slots of `length` positions there is room for in `free` bytes; `slots` is what the user wants. `lanes`
    are those of our own kernels (see `checkpoint/estimate.py`).

    Raises `UsageError`, with the numbers, when there is no room for those, or not even for one.
    """
    share, most = (CUDA_SHARE, CUDA_SLOTS) if device.type == "cuda" else (CPU_SHARE, CPU_SLOTS)
    each = slot_bytes(shape, length, dtype, lanes)

    def sizing(count: int) -> Sizing:
        return Sizing(count, each, working_bytes(shape, max(count, step_tokens), count, length, dtype, lanes), free)

    if slots is not None:
        if sizing(slots).estimated_bytes > free:
            raise too_large(sizing(slots), length)
        return sizing(slots)
    room = int(free * share)
    fitting = [count for count in range(1, most + 1) if sizing(count).estimated_bytes <= room]
    if not fitting:
        raise too_large(sizing(1), length)
    return sizing(fitting[-1])


def too_large(sizing: Sizing, length: int) -> UsageError:
    mebibytes = [round(size / MEBIBYTE) for size in (sizing.estimated_bytes, sizing.slot_bytes, sizing.free_bytes)]
    return UsageError(
        f"{sizing.slots} slots of {length} positions need {mebibytes[0]:,} MiB ({mebibytes[1]:,} MiB each), but only "
        f"{mebibytes[2]:,} MiB are free beside the model. Use a smaller --batch-size, a shorter context, or --dtype "
        "bfloat16."
    )


def open_and_try(decoder: TorchDecoder, sizing: Sizing, step_tokens: int) -> tuple[TorchDecoder, Sizing]:
    """`decoder` with as many slots as `sizing` says, after the largest step that it may see; with fewer when there is
    no room for that. Raises `UsageError` when there is none for a single slot.
    """
    while True:
        try:
            decoder.resize(sizing.slots)
            return decoder, replace(sizing, measured_bytes=largest_step_bytes(decoder, step_tokens))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            failure = error.with_traceback(None)  # its frames hold on to the memory
        if sizing.slots == 1:
            raise too_large(sizing, decoder.length) from failure
        sizing = fewer(sizing, failure)


def fewer(sizing: Sizing, failure: BaseException) -> Sizing:
    slots = max(1, int(sizing.slots * SHRINK))
    logger.warning(
        "no room for %d slots (%s): going on with %d. Set --batch-size %d to start there.",
        sizing.slots,
        first_line(failure),
        slots,
        slots,
    )
    return replace(sizing, slots=slots, working_bytes=sizing.working_bytes * slots // sizing.slots)


def largest_step_bytes(decoder: TorchDecoder, step_tokens: int) -> int:
    """Take the steps that need most memory, and tell what cache and steps took at the most."""
    cuda = decoder.device.type == "cuda"
    before = torch.cuda.memory_allocated(decoder.device) - decoder.held_bytes() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats(decoder.device)
    # each twice: what is captured as a graph is captured the second time
    for step in 2 * largest_steps(decoder.shape, decoder.slots, decoder.length, step_tokens):
        logits = decoder.forward(step)
        copies = scratch(decoder.shape, logits)
        del copies, logits
    decoder.empty()
    if not cuda:
        return decoder.held_bytes()
    torch.cuda.synchronize(decoder.device)
    return torch.cuda.max_memory_allocated(decoder.device) - before


def scratch(shape: Shape, logits: torch.Tensor) -> list[torch.Tensor]:
    """As much memory as there is taken to go from logits to tokens."""
    if shape.masking is None:
        return [torch.empty_like(logits) for _ in range(SAMPLING_COPIES - 1)]
    return [torch.empty_like(logits[:SCORED_ROWS], dtype=torch.float64) for _ in range(SAMPLING_COPIES)]


def largest_steps(shape: Shape, slots: int, length: int, step_tokens: int) -> list[Step]:
    """One token in each full slot; and the same but for one slot, which takes as long a chunk of a prompt as can be.

    Of a diffusion model as many whole canvases as there may be, one at least, and logits for as many of their tokens.
    """
    if shape.masking is not None:
        return [_canvases(max(1, min(slots, step_tokens // length)), length, most_outputs(shape))]
    chunk = max(1, min(length, step_tokens - (slots - 1)))
    steps = []
    for last in sorted({1, chunk}):
        lengths = np.array([1] * (slots - 1) + [last], np.int32)
        wanted = np.cumsum(lengths, dtype=np.int32) - 1
        tokens = np.zeros(int(lengths.sum()), np.int32)
        steps.append(Step(tokens, np.arange(slots, dtype=np.int32), np.int32(length) - lengths, lengths, wanted))
    return steps


def _canvases(count: int, length: int, outputs: int) -> Step:
    tokens, starts = np.zeros(count * length, np.int32), np.zeros(count, np.int32)
    wanted = np.arange(min(len(tokens), max(outputs, length)), dtype=np.int32)
    slots, lengths = np.arange(count, dtype=np.int32), np.full(count, length, np.int32)
    return Step(tokens, slots, starts, lengths, wanted, sees=np.full(len(tokens), length, np.int32))
