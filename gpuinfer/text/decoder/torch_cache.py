"""Keys and values of every slot, in memory that is taken once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpuinfer.text.checkpoint.estimate import rounded
from gpuinfer.text.decoder.segments import ends_of
from gpuinfer.text.shape import Shape
from gpuinfer.text.step import Step


class SlotCache:
    """`keys` and `values` [layers, slots + 1, positions, kv_heads, head_dim]. The last slot is nobody's: rows that only
    pad a batch write there.

    What lies behind a row's last position is always zero. Attention multiplies it with zero, and zero times the NaN of
    an earlier row would be NaN.
    """

    def __init__(self, shape: Shape, slots: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.slots, self.room, self.spare = slots, rounded(length), slots
        self.sharing = shape.heads // shape.kv_heads  # heads that have their keys in common
        form = (shape.layers, slots + 1, self.room, shape.kv_heads, shape.head_dim)
        self.keys = torch.zeros(form, device=device, dtype=dtype)
        self.values = torch.zeros(form, device=device, dtype=dtype)
        flat = (shape.layers, (slots + 1) * self.room, shape.kv_heads, shape.head_dim)
        self._flat_keys, self._flat_values = self.keys.view(flat), self.values.view(flat)
        self._ends = np.zeros(slots, np.int64)  # of each slot: positions before it may hold something

    def begin(self, step: Step) -> None:
        """Forget what the slots of `step` hold from its starts on: a row before, or one that was taken back. If it says
        what is seen, only what lies behind that: all that it brings is written over before any of it is read.
        """
        ends, kept = self._ends[step.slots], ends_of(step)
        gone = step.starts if step.sees is None else kept
        for i in np.flatnonzero(gone < ends).tolist():
            self._clear(int(step.slots[i]), int(gone[i]), int(ends[i]))
        self._ends[step.slots] = kept

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values` [rows, kv_heads, head_dim] at `places` [rows]: slot × room + position."""
        self._flat_keys[layer].index_copy_(0, places, keys)
        self._flat_values[layer].index_copy_(0, places, values)

    def copy(self, source: int, targets: Sequence[int], length: int) -> None:
        for target in targets:
            for held in (self.keys, self.values):
                held[:, target, :length].copy_(held[:, source, :length])
            if self._ends[target] > length:
                self._clear(target, length, int(self._ends[target]))
            self._ends[target] = length

    def empty(self) -> None:
        """Forget everything."""
        self.keys.zero_()
        self.values.zero_()
        self._ends[:] = 0

    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def _clear(self, slot: int, start: int, end: int) -> None:
        self.keys[:, slot, start:end] = 0
        self.values[:, slot, start:end] = 0
