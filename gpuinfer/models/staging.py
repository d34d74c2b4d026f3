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
        # torch cannot look at read-only or oddly strided arrays; the copies that this takes are rare and small.
        self.blocks = [torch.from_numpy(np.require(block, requirements=["C", "W"])) for block in blocks]
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


def room_for(answers: Any, rows: int, *, pinned: bool = False) -> Any:
    """Uninitialised float32 host tensors for `rows` rows of answers shaped like `answers`."""
    shapes = [(rows, *tensor.shape[1:]) for tensor in tensors_of(answers)]
    return like(answers, [torch.empty(shape, dtype=torch.float32, pin_memory=pinned) for shape in shapes])


def store(answers: Any, room: Any, start: int, rows: int, *, non_blocking: bool = False) -> None:
    """Copy the first `rows` rows of `answers` to place `start` of `room`."""
    for source, target in zip(tensors_of(answers), tensors_of(room), strict=True):
        target[start : start + rows].copy_(source[:rows], non_blocking=non_blocking)
