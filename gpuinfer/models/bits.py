"""Rows that arrive as bits, eight features in a byte, unpacked to zeros and ones of the run's dtype."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gpuinfer.models.staging import Block, in_one


def table_of(dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """The eight features that each byte stands for, [256, 8] in `dtype`."""
    every_byte = np.arange(256, dtype=np.uint8)[:, None]
    return torch.from_numpy(np.unpackbits(every_byte, axis=1, bitorder="little")).to(device, dtype)


class BitCast:
    """Unpacks on the CPU in one pass, as `staging.cast` casts. Threads may share one."""

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
