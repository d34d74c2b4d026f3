"""Rows to the first stage's device, answers from the last one's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpuinfer.api import ModelSpec
from gpuinfer.models.layouts import BITS, row_dtype, row_shape
from gpuinfer.models.stages.stage import Load
from gpuinfer.models.staging import BitCast, Block, cast, like, table_of, tensors_of, unpacked


def loader(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Load:
    """Makes features of rows, in memory that is nobody else's: they may be needed until the last stage."""
    return _to_cuda(spec, device, dtype) if device.type == "cuda" else _to_cpu(spec, dtype)


def _to_cpu(spec: ModelSpec, dtype: torch.dtype) -> Load:
    fill = BitCast(spec.inputs, dtype) if spec.input_dtype == BITS else cast

    def load(pieces: Sequence[Block], shape: int) -> torch.Tensor:
        rows, features = sum(map(len, pieces)), torch.empty(shape, spec.inputs, dtype=dtype)
        fill(pieces, features[:rows])
        features[rows:].zero_()
        return features

    return load


def _to_cuda(spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> Load:
    """As they came, one byte a feature or one bit, by way of pinned memory; cast over there."""
    table = table_of(dtype, device) if spec.input_dtype == BITS else None
    own = getattr(torch, row_dtype(spec).name)

    def load(pieces: Sequence[Block], shape: int) -> torch.Tensor:
        rows, staging = sum(map(len, pieces)), torch.empty((shape, *row_shape(spec)), dtype=own, pin_memory=True)
        cast(pieces, staging[:rows])
        staging[rows:].zero_()
        there = staging.to(device, non_blocking=True)
        return there.to(dtype) if table is None else unpacked(there, spec.inputs, table)

    return load


def unloader(device: torch.device) -> Callable[[Any], Any]:
    """Makes contiguous float32 tensors on the CPU of what the model answers, arranged as it does."""
    return _from_cuda if device.type == "cuda" else _from_cpu


def _from_cpu(answer: Any) -> Any:
    return like(answer, [tensor.float().contiguous() for tensor in tensors_of(answer)])


def _from_cuda(answer: Any) -> Any:
    """There once the stream is."""
    found = []
    for tensor in tensors_of(answer):
        room = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=True)
        found.append(room.copy_(tensor.float(), non_blocking=True))
    return like(answer, found)
