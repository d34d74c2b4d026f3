"""Blocks of rows on their way in and out: read as if they lay end to end, answered block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.answers import like, tensors_of

Block = NDArray[Any]
"""Features [rows, F] in uint8, int8 or float32."""


class Blocks:
    """Several blocks of the same width and dtype, as one long run of rows."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = [as_tensor(block) for block in blocks]
        self.starts = [0, *accumulate(len(block) for block in blocks)]
        self.rows = self.starts[-1]

    def pieces(self, start: int, stop: int) -> Iterator[Tensor]:
        """Rows `start` to `stop`, in order, a view for each block that has some of them."""
        for block, offset in zip(self.blocks, self.starts, strict=False):
            low, high = max(start - offset, 0), min(stop - offset, len(block))
            if low < high:
                yield block[low:high]

    def copy(self, start: int, stop: int, target: Tensor) -> None:
        """Cast rows `start` to `stop` into the first rows of `target`."""
        at = 0
        for piece in self.pieces(start, stop):
            target[at : at + len(piece)].copy_(piece)
            at += len(piece)

    def split(self, answers: Any) -> list[Any]:
        """One result for each block, views of the joint `answers`: float32 arrays alone, in a tuple or in a dict."""
        arrays = [tensor.numpy() for tensor in tensors_of(answers)]
        bounds = list(zip(self.starts, self.starts[1:], strict=False))
        return [like(answers, [array[start:stop] for array in arrays]) for start, stop in bounds]


def as_tensor(block: Block) -> Tensor:
    """A view where torch can have one: it wants neither read-only arrays nor negative strides."""
    usable = block.flags.c_contiguous and block.flags.writeable
    return torch.from_numpy(block if usable else np.array(block, order="C"))


def taken(answers: Any, rows: int, inputs: Tensor) -> Any:
    """The first `rows` rows of a module's answers: contiguous float32 tensors that share no memory with `inputs`."""
    return like(answers, [own(tensor[:rows].float().contiguous(), inputs) for tensor in tensors_of(answers)])


def own(tensor: Tensor, inputs: Tensor) -> Tensor:
    """`tensor`, copied if the module handed its inputs back: the next chunk overwrites them."""
    shared = tensor.untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr()
    return tensor.clone() if shared else tensor


def joined(chunks: Sequence[Any]) -> Any:
    """The answers to consecutive chunks as one."""
    if len(chunks) == 1:
        return chunks[0]
    return like(chunks[0], [torch.cat(parts) for parts in zip(*map(tensors_of, chunks), strict=True)])
