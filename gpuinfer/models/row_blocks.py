"""Blocks of rows on their way in and out: read as if they lay end to end, answered block by block.

A module may answer with one tensor, or a tuple, list or dict of tensors, all with the same rows. Rows that arrive as
bits, eight features in a byte, are unpacked to zeros and ones of the run's dtype.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.row_format import AnswerLayout


def tensors_of(answer: Any) -> list[Tensor]:
    """The tensors of an answer, in order. Raises `TypeError` for anything else in it."""
    parts = list(answer.values()) if isinstance(answer, Mapping) else answer
    parts = list(parts) if isinstance(parts, tuple | list) else [parts]
    for part in parts:
        if not isinstance(part, Tensor):
            raise TypeError(f"{type(part).__name__} among the answers")
    return parts


def layout_of(answer: Any) -> AnswerLayout:
    """The kind of an answer, and the shape of one row of each tensor. Raises `TypeError` for anything else."""
    shapes = tuple(tuple(tensor.shape[1:]) for tensor in tensors_of(answer))
    if isinstance(answer, Mapping):
        if odd := [key for key in answer if not isinstance(key, str)]:
            raise TypeError(f"a dict in which {odd[0]!r} is a key where strings should be")
        return AnswerLayout("dict", shapes, tuple(answer))
    return AnswerLayout("tuple" if isinstance(answer, tuple | list) else "tensor", shapes)


def rearranged(answer: Any, parts: list[Any]) -> Any:
    """`parts` arranged as the tensors of `answer` are: alone, in a tuple, or in a dict with the same keys."""
    if isinstance(answer, Mapping):
        return dict(zip(answer, parts, strict=True))
    return tuple(parts) if isinstance(answer, tuple | list) else parts[0]


WORTH_A_CALL = 256  # rows: a call of torch costs as much as copying about so many

Block = NDArray[Any]
"""Features [rows, F] in uint8, int8 or float32, or as bits in uint8 [rows, ceil(F / 8)]."""


class RowBlocks:
    """Several blocks of the same width and dtype as one sequence of rows."""

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
        return [rearranged(answers, [array[start:stop] for array in arrays]) for start, stop in bounds]


def cast(pieces: Sequence[Block], target: Tensor) -> None:
    """Copy rows into a tensor of as many rows, casting; few rows are joined first."""
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
    """Join small arrays of rows: NumPy joins dozens in the time that torch takes for two."""
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)


def as_tensor(block: Block) -> Tensor:
    """A tensor on the array's memory where possible: torch takes neither read-only arrays nor negative strides."""
    usable = block.flags.c_contiguous and block.flags.writeable
    return torch.from_numpy(block if usable else np.array(block, order="C"))


def sound_rows(parts: Sequence[Tensor], rows: int) -> Tensor:
    """For each row whether its answers hold neither NaN nor +inf: bool [rows], computed on the device of `parts`, as
    `find_fault` checks on the host. -inf is allowed.
    """
    most: Tensor | None = None
    for part in parts:
        values = part.reshape(len(part), -1) if part.numel() else part.new_zeros(rows, 1)
        largest = values.squeeze(1) if values.shape[1] == 1 else values.amax(1)  # a NaN wins
        most = largest if most is None else torch.maximum(most, largest)
    assert most is not None
    return most < math.inf


def first_rows(answers: Any, rows: int, inputs: Tensor) -> Any:
    """The first `rows` rows of a module's answers: contiguous float32 tensors that share no memory with `inputs`."""
    parts = [tensor if len(tensor) == rows else tensor[:rows] for tensor in tensors_of(answers)]
    return rearranged(answers, [unshared(part.float().contiguous(), inputs) for part in parts])


def unshared(tensor: Tensor, inputs: Tensor) -> Tensor:
    """`tensor`, copied if it shares memory with the inputs, which the next chunk overwrites."""
    shared = tensor.untyped_storage().data_ptr() == inputs.untyped_storage().data_ptr()
    return tensor.clone() if shared else tensor


def concatenated(chunks: Sequence[Any]) -> Any:
    """The answers to consecutive chunks as one."""
    if len(chunks) == 1:
        return chunks[0]
    return rearranged(chunks[0], [torch.cat(parts) for parts in zip(*map(tensors_of, chunks), strict=True)])


def table_of(dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """The eight features of each byte: [256, 8] in `dtype`."""
    every_byte = np.arange(256, dtype=np.uint8)[:, None]
    return torch.from_numpy(np.unpackbits(every_byte, axis=1, bitorder="little")).to(device, dtype)


class BitCast:
    """Unpacks bits on the CPU while casting. Threads may share one."""

    def __init__(self, features: int, dtype: torch.dtype) -> None:
        self.features, self.dtype = features, dtype
        self._table = bytes_of(table_of(dtype))  # NumPy moves eight features at once, and knows no bfloat16

    def __call__(self, pieces: Sequence[Block], target: Tensor) -> None:
        """Rows of bytes into `target` [as many rows, features], which must be contiguous."""
        packed = in_one(pieces)
        if self.features % 8 == 0:
            self._unpack(packed, target)
        else:
            wide = torch.empty(len(packed), packed.shape[1] * 8, dtype=self.dtype)
            self._unpack(packed, wide)
            target.copy_(wide[:, : self.features])

    def _unpack(self, packed: Block, target: Tensor) -> None:
        # A byte is always in the table, and looking whether it is would cost a copy of everything.
        np.take(self._table, packed, axis=0, out=bytes_of(target).reshape(*packed.shape, -1), mode="clip")


def bytes_of(tensor: Tensor) -> Block:
    return tensor.view(torch.uint8).numpy()


def unpacked(packed: Tensor, features: int, table: Tensor) -> Tensor:
    """Bytes [rows, width] as features [rows, features], contiguous, on the device where both tensors are."""
    wide = table.index_select(0, packed.reshape(-1).int()).view(len(packed), -1)
    return wide[:, :features].contiguous()
