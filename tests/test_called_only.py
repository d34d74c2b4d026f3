"""What only compiled code calls is compiled for it alone, and computes the same."""

from __future__ import annotations

import numba
import numpy as np

from gpuinfer.models.kernel_cache import called_only


def squares(values, out):
    total = 0.0
    for i in range(len(values)):
        out[i] = values[i] * values[i]
        total += out[i]
    return total


def test_nothing_is_compiled_that_nobody_calls():
    inner = called_only(forceinline=True)(squares)

    @numba.njit
    def caller(values, out):
        return inner(values, out)

    caller(np.arange(5.0), np.zeros(5))
    (code,) = caller.inspect_llvm().values()
    assert "squares" in code
    assert "cpython" in code  # of the one that Python does call
    assert not [
        line for line in code.splitlines() if line.startswith("define") and "squares" in line and "cpython" in line
    ]
