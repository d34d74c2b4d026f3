"""How fast threads read memory here: what a step with a single row cannot do without."""

from __future__ import annotations

import functools
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from gpuinfer.models.kernel_cache import c_compiler
from gpuinfer.text.decoder.cpu_block import LINE
from gpuinfer.text.decoder.cpu_intrinsics import I64
from gpuinfer.text.decoder.cpu_math import SOURCES
from gpuinfer.text.decoder.cpu_panels import aligned
from gpuinfer.text.decoder.cpu_vectors import BITS

STREAMS = 8
"""Places that a thread reads at once: a processor fetches ahead in each stream by itself, within 4 KiB only."""
BUFFER = 1 << 29
"""Bytes, many times the caches of most processors."""


def bandwidth(threads: int, seconds: float = 0.3, buffer: NDArray[Any] | None = None) -> float:
    """Bytes per second that so many threads read from memory at once, at best of the passes that fit into the time.

    buffer: what is read, a multiple of 512 bytes for each thread; without one 512 MiB are taken for the time
    """
    room = aligned((BUFFER // 8,), np.int64) if buffer is None else buffer
    if buffer is None:
        room.fill(1)  # pages that were never written are all the same one
    each = room.nbytes // threads // (LINE * STREAMS) * LINE * STREAMS
    read, start = _reader().ctypes, room.ctypes.data
    best, end = 0.0, time.perf_counter() + seconds
    with ThreadPoolExecutor(threads) as pool:
        while best == 0 or time.perf_counter() < end:
            begin = time.perf_counter()
            list(pool.map(lambda thread: read(start + thread * each, each), range(threads)))
            best = max(best, threads * each / (time.perf_counter() - begin))
    return best


@functools.cache
def _reader() -> Any:
    signature = types.int64(types.int64, types.int64)
    return c_compiler(SOURCES, signature, _nrt=False, error_model="numpy")(_read)


def _read(start, size):  # type: ignore[no-untyped-def]
    return read_streams(start, size)


@intrinsic
def read_streams(typing, start, size):  # type: ignore[no-untyped-def]
    """Read `size` bytes from an address on, in 8 streams; something that depends on all of them."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        start, size = values
        apart = builder.udiv(size, ir.Constant(I64, STREAMS))
        begins = [builder.add(start, builder.mul(apart, ir.Constant(I64, stream))) for stream in range(STREAMS)]
        sums = [cgutils.alloca_once_value(builder, ir.Constant(BITS, [0] * 16)) for _ in begins]
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), apart, ir.Constant(I64, LINE)) as (at, _):
            for begin, total in zip(begins, sums, strict=True):
                place = builder.inttoptr(builder.add(begin, at), ir.PointerType(BITS))
                builder.store(builder.xor(builder.load(total), builder.load(place, align=LINE)), total)
        result = functools.reduce(builder.xor, [builder.load(total) for total in sums])
        return builder.zext(builder.extract_element(result, ir.Constant(ir.IntType(32), 0)), I64)

    return types.int64(types.int64, types.int64), generate
