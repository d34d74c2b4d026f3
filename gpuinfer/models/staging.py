"""Blocks of rows on their way in and out: read as if they lay end to end, answered block by block."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.answers import like, tensors_of

WORTH_A_CALL = 256  # rows: a call of torch costs as much as copying about so many

Block = NDArray[Any]
"""Features [rows, F] in uint8, int8 or float32, or as bits in uint8 [rows, ceil(F / 8)]."""


class Blocks:
    """Several blocks of the same width and dtype, as one long run of rows."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self.blocks = blocks
        self.starts = [0, *accumulate(len(block) for block in blocks)]
        self.rows = self.starts[-1]

    def pieces(self, start: int, stop: int) -> list[Block]:
        """Rows `start` to `stop`, in order, a view for each block that has some of them."""
        pieces, number = [], bisect_right(self.starts, start) - 1
        while start < stop:
            low, high = start - self.starts[number], min(stop, self.starts[number + 1]) - self.starts[number]
            if low < high:
                pieces.append(self.blocks[number][low:high])
            start, number = self.starts[number] + high, number + 1
        return pieces

    def split(self, answers: Any) -> list[Any]:
        """One result for each block, views of the joint `answers`: float32 arrays alone, in a tuple or in a dict."""
        arrays = [tensor.numpy() for tensor in tensors_of(answers)]
        bounds = list(zip(self.starts, self.starts[1:], strict=False))
        return [like(answers, [array[start:stop] for array in arrays]) for start, stop in bounds]


def cast(pieces: Sequence[Block], target: Tensor) -> None:
    """Copy rows into a tensor of exactly as many, in its dtype: each once, unless they are too few for that to pay."""
    if len(target) >= WORTH_A_CALL * len(pieces):
        at = 0
        for piece in pieces:
            target[at : at + len(piece)].copy_(as_tensor(piece))
            at += len(piece)
    elif target.dtype == torch.float32:
        np.concatenate(pieces, out=target.numpy(), casting="unsafe")
    else:
        target.copy_(as_tensor(in_one(pieces)))


def in_one(pieces: Sequence[Block]) -> Block:
    """Rows that lie apart, together: NumPy joins dozens of small arrays in the time that torch takes for two."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def as_tensor(block: Block) -> Tensor:
    """A view where torch can have one: it wants neither read-only arrays nor negative strides."""
    usable = block.flags.c_contiguous and block.flags.writeable
    return torch.from_numpy(block if usable else np.array(block, order="C"))


def taken(answers: Any, rows: int, inputs: Tensor) -> Any:
    """The first `rows` rows of a module's answers: contiguous float32 tensors that share no memory with `inputs`."""
    parts = [tensor if len(tensor) == rows else tensor[:rows] for tensor in tensors_of(answers)]
    return like(answers, [own(part.float().contiguous(), inputs) for part in parts])


def own(tensor: Tensor, inputs: Tensor) -> Tensor:
    """`tensor`, copied if the module handed its inputs back: the next chunk overwrites them."""
    shared = tensor.untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr()
    return tensor.clone() if shared else tensor


def joined(chunks: Sequence[Any]) -> Any:
    """The answers to consecutive chunks as one."""
    if len(chunks) == 1:
        return chunks[0]
    return like(chunks[0], [torch.cat(parts) for parts in zip(*map(tensors_of, chunks), strict=True)])
