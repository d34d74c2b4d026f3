"""Chooses the decoder for a checkpoint, a device and a number format, and finds its slots and pages.

A decoder that computes nothing, to measure all that goes on around one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from gpuinfer.text.checkpoint.estimate import row_pages
from gpuinfer.text.decoder.sizing import Sizing, estimate, free_memory, open_and_try
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import Decoder, Step
from gpuinfer.text.weights import Adapter, Weights

if TYPE_CHECKING:
    from gpuinfer.text.checkpoint import Checkpoint

LETTER = ord("a")


class NullDecoder:
    """`step.Decoder` that answers every token with the same logits: 1 for one letter, 0 for all else."""

    def __init__(
        self, shape: Shape, *, slots: int, pages: int, length: int, dtype: torch.dtype = torch.float32
    ) -> None:
        self.computes_in = str(dtype).removeprefix("torch.")
        self.reads_drawn = False
        self.shape, self.slots, self.pages, self.length = shape, slots, pages, length
        self.device = torch.device("cpu")
        self.token = next(token for token in (LETTER, *range(shape.vocabulary)) if self._suits(token))
        self._logits = torch.zeros((0, shape.vocabulary))

    def forward(self, step: Step) -> Tensor:
        """See `step.Decoder.forward`."""
        rows = len(step.wanted)
        if rows > len(self._logits):  # whoever draws from them leaves them as they are
            self._logits = torch.zeros((rows, self.shape.vocabulary))
            self._logits[:, self.token] = 1
        return self._logits[:rows]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
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

    def _suits(self, token: int) -> bool:
        return token < self.shape.vocabulary and token not in self.shape.end_tokens


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
    compile: bool,
    graphs: bool,
    step_tokens: int = STEP_TOKENS,
    sharing: int = 1,
) -> tuple[Decoder, Sizing]:
    """A decoder, and how its slots and pages were found: `slots` rows in a step, or None for as many as are worth
    while, and `pages` in the cache, or None for as many as these rows need at full length and there is memory for.

    `step_tokens` is the most tokens that one step will bring; `sharing` the models that have the CPU's memory together.
    On the CPU float32 and bfloat16 have compiled kernels of our own where the processor can run them; `threads` is how
    many take part. Raises `UsageError` when the model does not fit, or the pages that were asked for do not.
    """
    if device.type == "cpu":
        torch.set_num_threads(threads)  # of this process: torch knows no other way
    shape = checkpoint.shape
    if shape.family == "null":
        count = slots or NULL_SLOTS
        of_all = pages or count * row_pages(length)
        decoder = NullDecoder(shape, slots=min(count, of_all), pages=of_all, length=length, dtype=weights_dtype)
        return decoder, Sizing(decoder.slots, of_all, 0, 0, free_memory(device))
    own = own_kernels(shape, weights_dtype, device, compile)
    weights = checkpoint.weights(weights_dtype, by_layer=True)  # so they are never in memory twice

    def find(free: int) -> Sizing:
        wanted: dict[str, Any] = {"slots": slots, "pages": pages, "length": length, "step_tokens": step_tokens}
        return estimate(shape, weights_dtype, device, free, **wanted, own=own, sharing=sharing)

    open_with = partial(TorchDecoder, shape, weights, device, weights_dtype, length=length, deterministic=deterministic)
    if device.type == "cuda":
        # Free memory is counted once the weights are on the device.
        whole = open_with(slots=1, pages=1, compile=compile, graphs=graphs)
        return open_and_try(whole, find(free_memory(device)), step_tokens)
    sizing = find(free_memory(device) - checkpoint.estimate(1, 1, length, weights_dtype).weights_bytes)
    if not own:
        return open_with(slots=sizing.slots, pages=sizing.pages, compile=compile, graphs=False), sizing
    from gpuinfer.text.decoder.cpu import CpuDecoder

    counts = {"slots": sizing.slots, "pages": sizing.pages, "length": length, "threads": threads}
    return CpuDecoder(shape, weights, weights_dtype, **counts, deterministic=deterministic), sizing


def own_kernels(shape: Shape, dtype: torch.dtype, device: torch.device, compile: bool) -> bool:
    """Whether our own kernels compute a step; else torch does."""
    return device.type == "cpu" and not compile and shape.layers > 0 and kernels_for(dtype)


def kernels_for(dtype: torch.dtype) -> bool:
    """Whether our own kernels can run here."""
    if dtype not in (torch.float32, torch.bfloat16):
        return False
    from gpuinfer.text.decoder.cpu import available

    return available(dtype)
