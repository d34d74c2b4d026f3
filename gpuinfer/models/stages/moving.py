"""Rows to the first stage, answers from the last one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from gpuinfer.api import ModelSpec
from gpuinfer.models.layouts import BITS, row_dtype, row_shape
from gpuinfer.models.staging import BitCast, Block, cast, like, table_of, tensors_of, unpacked


class Moving(Protocol):
    """In the threads that ask, while the stages are at work."""

    def load(self, pieces: Sequence[Block], shape: int) -> Any:
        """What the first stage takes: the rows that lie in these blocks, made up to `shape` rows with zeros, in memory
        that is nobody else's: it may be needed until the last stage.
        """
        ...

    def unload(self, answer: Any) -> Any:
        """Contiguous float32 tensors on the CPU, arranged as the model's answer."""
        ...


class OnCpu:
    """Rows become features [rows, inputs] at once."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._inputs, self._dtype = spec.inputs, dtype
        self._cast = BitCast(spec.inputs, dtype) if spec.input_dtype == BITS else cast

    def load(self, pieces: Sequence[Block], shape: int) -> torch.Tensor:
        return filled(pieces, torch.empty(shape, self._inputs, dtype=self._dtype), self._cast)

    def unload(self, answer: Any) -> Any:
        return like(answer, [tensor.float().contiguous() for tensor in tensors_of(answer)])


class OnCuda:
    """Rows cross the bus as they came, a byte or a bit each feature, from pinned memory; the first stage casts them."""

    def __init__(self, spec: ModelSpec) -> None:
        self._shape, self._dtype = row_shape(spec), getattr(torch, row_dtype(spec).name)

    def load(self, pieces: Sequence[Block], shape: int) -> torch.Tensor:
        return filled(pieces, torch.empty((shape, *self._shape), dtype=self._dtype, pin_memory=True), cast)

    def unload(self, answer: Any) -> Any:
        """The last stage has copied it (`from_cuda`)."""
        return answer


def filled(pieces: Sequence[Block], room: torch.Tensor, fill: Any) -> torch.Tensor:
    """`room`, with these rows in it and zeros behind them."""
    rows = sum(map(len, pieces))
    fill(pieces, room if rows == len(room) else room[:rows])
    if rows < len(room):
        room[rows:].zero_()
    return room


class ToCuda:
    """What the first stage there does first, on its stream: pinned rows as features [rows, inputs]."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype, self._inputs = device, dtype, spec.inputs
        self._table = table_of(dtype, device) if spec.input_dtype == BITS else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        there = rows.to(self._device, non_blocking=True)
        return there.to(self._dtype) if self._table is None else unpacked(there, self._inputs, self._table)


def from_cuda(answer: Any) -> Any:
    """What the last stage there does last: float32 tensors in pinned memory, complete once its stream has got there."""
    found = []
    for tensor in tensors_of(answer):
        room = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=True)
        found.append(room.copy_(tensor.float(), non_blocking=True))
    return like(answer, found)
