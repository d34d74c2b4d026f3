"""Chooses the decoder for a checkpoint, a device and a number format, and finds its slots."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch

from gpuinfer.models.text.decoder.null import NullDecoder
from gpuinfer.models.text.decoder.sizing import Sizing, estimate, free_memory, open_and_try
from gpuinfer.models.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.models.text.step import Decoder

if TYPE_CHECKING:
    from gpuinfer.models.text.checkpoint import Checkpoint

STEP_TOKENS = 2048
NULL_SLOTS = 1024


def open_sized(
    checkpoint: Checkpoint,
    weights_dtype: torch.dtype,
    device: torch.device,
    *,
    slots: int | None,
    length: int,
    threads: int,
    deterministic: bool,
    compile: bool,
    graphs: bool,
    step_tokens: int = STEP_TOKENS,
) -> tuple[Decoder, Sizing]:
    """A decoder, and how its number of slots was found: `slots`, or None for as many as are worth while and fit.

    `step_tokens` is the most tokens that one step will bring. On the CPU float32 and bfloat16 have compiled kernels of
    our own where the processor can run them; `threads` is how many take part. Raises `UsageError` when the model does
    not fit, or the slots that were asked for do not.
    """
    if device.type == "cpu":
        torch.set_num_threads(threads)  # of this process: torch knows no other way
    shape = checkpoint.shape
    if shape.family == "null":
        count = slots or NULL_SLOTS
        return NullDecoder(shape, slots=count, length=length), Sizing(count, 0, 0, free_memory(device))
    weights = checkpoint.weights(weights_dtype)
    find = partial(estimate, shape, weights_dtype, device, slots=slots, length=length, step_tokens=step_tokens)
    if device.type == "cpu" and not compile and kernels_for(weights_dtype):
        from gpuinfer.models.text.decoder.cpu import CpuDecoder

        sizing = find(free_memory(device))
        found = partial(CpuDecoder, shape, weights, weights_dtype, length=length, threads=threads)
        return found(slots=sizing.slots, deterministic=deterministic), sizing
    open_with = partial(TorchDecoder, shape, weights, device, weights_dtype, length=length, deterministic=deterministic)
    if device.type != "cuda":
        sizing = find(free_memory(device))
        return open_with(slots=sizing.slots, compile=compile, graphs=False), sizing
    decoder = open_with(slots=1, compile=compile, graphs=graphs)  # the weights are over there before room is counted
    sizing = find(free_memory(device))
    return open_and_try(decoder, sizing, step_tokens)


def kernels_for(dtype: torch.dtype) -> bool:
    """Whether our own kernels can run here."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    from gpuinfer.models.text.decoder.cpu import available

    return available(dtype)
