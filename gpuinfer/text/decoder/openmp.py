"""Compiled functions in the threads of torch's own OpenMP, so that they and torch's operators take turns in the same
threads.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array


@functools.cache
def _parallel() -> Any:
    """`GOMP_parallel(function, data, threads, flags)` of the OpenMP that torch is linked with, which GNU's, LLVM's and
    Intel's all have; None where there is none.
    """
    try:
        function = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).GOMP_parallel
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
    function.restype = None
    return function


def in_torch_threads(function: Any, job: int, threads: int) -> None:
    """Run `function`, compiled for C, with the address `job`, in up to so many threads at once, and wait for them."""
    parallel = _parallel() if threads > 1 else None
    if parallel is None:
        function.ctypes(job)
    else:
        parallel(function.address, job, threads, 0)


def _views(kind: Any, width: ir.Type, dimensions: int) -> Any:
    """For compiled functions: an array of what lies somewhere, `view(address, count)` or (address, rows, columns)."""
    made = types.Array(kind, dimensions, "C", aligned=True)
    size = width.width // 8 if isinstance(width, ir.IntType) else 4

    def array(context, builder, values):  # type: ignore[no-untyped-def]
        found = context.make_array(made)(context, builder)
        number = ir.IntType(64)
        each = [ir.Constant(number, size)]
        for count in reversed(values[2:]):
            each.insert(0, builder.mul(each[0], count))
        data = builder.inttoptr(values[0], ir.PointerType(width))
        populate_array(found, data, list(values[1:]), each, ir.Constant(number, size), None)
        return found._getvalue()

    @intrinsic  # type: ignore[untyped-decorator]
    def line(typing, address, count):  # type: ignore[no-untyped-def]
        return made(types.int64, types.int64), lambda context, builder, _, values: array(context, builder, values)

    @intrinsic  # type: ignore[untyped-decorator]
    def table(typing, address, rows, columns):  # type: ignore[no-untyped-def]
        return made(*[types.int64] * 3), lambda context, builder, _, values: array(context, builder, values)

    return line if dimensions == 1 else table


floats_at, float_rows_at = (_views(types.float32, ir.FloatType(), dimensions) for dimensions in (1, 2))
halves_at, half_rows_at = (_views(types.uint16, ir.IntType(16), dimensions) for dimensions in (1, 2))
integers_at, integer_rows_at = (_views(types.int32, ir.IntType(32), dimensions) for dimensions in (1, 2))
numbers_at, number_rows_at = (_views(types.int64, ir.IntType(64), dimensions) for dimensions in (1, 2))
