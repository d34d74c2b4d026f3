"""Weights as our own products read them, and memory for their rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuinfer.models.text.decoder.cpu_vectors import TILE

ALIGNED = 64


def panels_of(weight: torch.Tensor) -> NDArray[Any]:
    """A weight [out, in], float32 or bfloat16, as products read it: [out / 16, in, 16], with zeros behind the last row.

    It begins where a cache line does; bfloat16 as its bits in uint16.
    """
    out, inner = weight.shape
    count = -(-out // TILE)
    half = weight.dtype == torch.bfloat16
    panels = aligned((count, inner, TILE), np.uint16 if half else np.float32)
    given = torch.from_numpy(panels.view(np.int16) if half else panels)
    whole, rest = out // TILE, out % TILE
    source = weight.detach().view(torch.int16) if half else weight.detach()
    given[:whole] = source[: whole * TILE].reshape(whole, TILE, inner).transpose(1, 2)
    if rest:
        given[whole, :, :rest] = source[whole * TILE :].T
        given[whole, :, rest:] = 0
    return panels


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array, its values as they come, that begins where a cache line does."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.empty(size + ALIGNED, np.uint8)
    start = -room.ctypes.data % ALIGNED
    found: NDArray[Any] = room[start : start + size].view(dtype).reshape(shape)
    return found
