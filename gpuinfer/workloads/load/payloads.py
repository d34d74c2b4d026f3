"""What the requests of a load carry: random rows of the model's kind, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import ModelSpec
from gpuinfer.models.layouts import BITS, row_dtype

LEAST_POOL = 1024  # rows, drawn once: drawing anew for each request would cost more than sending it


class Payloads:
    """Hands out blocks of rows [rows, ...], views of one pool that is walked round and round.

    Features of whole numbers are zeros and ones, others normally distributed. Without a
    model there is nothing to carry.
    """

    def __init__(self, spec: ModelSpec | None, most_rows: int, seed: int) -> None:
        self._pool = None if spec is None else _pool(spec, most_rows + max(LEAST_POOL, most_rows), seed)
        self._last = 0 if self._pool is None else len(self._pool) - most_rows  # where a block may begin
        self._at = 0

    def take(self, rows: int) -> Any:
        if self._pool is None:
            return None
        begin = self._at
        self._at = (begin + rows) % self._last
        return self._pool[begin : begin + rows]


def _pool(spec: ModelSpec, rows: int, seed: int) -> NDArray[Any]:
    random = np.random.default_rng(seed)
    if row_dtype(spec).kind == "f":
        return random.standard_normal((rows, spec.inputs)).astype(row_dtype(spec))
    drawn = random.integers(0, 2, (rows, spec.inputs), dtype=np.uint8)
    return np.packbits(drawn, axis=1, bitorder="little") if spec.input_dtype == BITS else drawn.astype(row_dtype(spec))
