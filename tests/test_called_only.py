"""What only compiled code calls is compiled for it alone, and computes the same."""

from __future__ import annotations

import numba
import numpy as np
import pytest

from gpuinfer.models.kernel_cache import called_only


def squares(values, out):
    total = 0.0
    for i in range(len(values)):
        out[i] = values[i] * values[i]
        total += out[i]
    return total


@pytest.mark.parametrize("options", [{}, {"forceinline": True}], ids=["called", "inlined"])
def test_compiled_code_and_python_call_it(options):
    inner = called_only(**options)(squares)

    @numba.njit
    def twice(values, out):
        return inner(values, out) + inner(values, out)

    for dtype in (np.float32, np.float64):
        for function, sum_of_squares in ((twice, 60.0), (inner, 30.0)):
            out = np.zeros(5, dtype)
            assert function(np.arange(5, dtype=dtype), out) == sum_of_squares
            assert out.tolist() == [0.0, 1.0, 4.0, 9.0, 16.0]


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
