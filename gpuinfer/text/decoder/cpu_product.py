"""Matrix products of compiled kernels: a row's result has the same bits among any number of rows, and for any share of
the columns.

Of four kinds, by what rows and weights are stored as and by what the processor does (`cpu_bfloat16`):

    float32     both float32. One fused multiplication and addition for each term, in order, from 0 on: the same bits on
                any processor
    widened     rows of float32, weights of bfloat16, which are widened as they are read: the same bits on any processor
    avx512      both bfloat16, by the processor's products of pairs
    amx         both bfloat16, by its matrix unit

Every function is called by its address, `product(rows, columns, inner, a, lda, panels, c, ldc)`, all int64: c [rows,
columns] float32 = a [rows, inner] · the weight that `panels_of` gave; `a`, `panels` and `c` are addresses, rows of `a`
and `c` lie `lda` and `ldc` values apart. What is not among these rows, terms and columns is neither read nor written. A
share of the columns begins at a multiple of 16: `panels` at a multiple of `panel_bytes`.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
from numba import types

from gpuinfer.models.kernel_cache import c_compiler
from gpuinfer.text.decoder.cpu_amx import product_amx
from gpuinfer.text.decoder.cpu_block import LINE, LINES_AHEAD, MOST_ROWS, block, panels_for
from gpuinfer.text.decoder.cpu_math import SOURCES, inlined
from gpuinfer.text.decoder.cpu_panels import TERMS
from gpuinfer.text.decoder.cpu_vectors import TILE

Kind = Literal["float32", "widened", "avx512", "amx"]
SIGNATURE = types.void(*[types.int64] * 8)
AT_ONCE = 160
"""Terms of a block's sums before the next block's turn: two panels of so many stay in the first-level cache."""

WIDTHS = (1, *[panels_for(rows) for rows in range(1, MOST_ROWS + 1)])


@functools.cache
def product_with(kind: Kind) -> Any:
    """The compiled product of this kind, to be called by its `address` (`cpu_intrinsics.call_product`)."""
    functions = {
        "float32": product_float32,
        "widened": product_widened,
        "avx512": product_avx512,
        "amx": product_amx,
    }
    return c_compiler(SOURCES, SIGNATURE, _nrt=False, error_model="numpy")(functions[kind])


def product_float32(rows, columns, inner, a, lda, panels, c, ldc):
    product("float32", rows, columns, inner, a, 4 * lda, 4, panels, LINE * inner, 1, c, 4 * ldc)


def product_widened(rows, columns, inner, a, lda, panels, c, ldc):
    apart = LINE // 2 * ((inner + TERMS - 1) // TERMS * TERMS)
    product("widened", rows, columns, inner, a, 4 * lda, 4, panels, apart, 2, c, 4 * ldc)


def product_avx512(rows, columns, inner, a, lda, panels, c, ldc):
    apart = LINE // 2 * ((inner + TERMS - 1) // TERMS * TERMS)
    product("avx512", rows, columns, inner, a, 2 * lda, 2, panels, apart, 2, c, 4 * ldc)


@inlined
def product(kind, rows, columns, inner, a, lda, size, panels, apart, terms, c, ldc):
    """The product in blocks of equal height, within a bit. `lda`, `ldc` and `apart` (of panels) in bytes; `size` is
    that of a value of `a` in bytes, and `terms` so many of each column are in a cache line of a panel.
    """
    count = (rows + MOST_ROWS - 1) // MOST_ROWS
    if count == 0:
        return
    step = WIDTHS[(rows + count - 1) // count] * TILE
    depth = AT_ONCE * terms if count > 1 else max(inner, 1)
    for begin in range(0, max(inner, 1), depth):
        some, fresh = min(depth, inner - begin), np.int64(begin == 0)
        lines = (some + terms - 1) // terms
        for column in range(0, columns, step):
            weight = panels + column // TILE * apart + LINE * (begin // terms)
            following = weight + step // TILE * apart
            if column + step >= columns:
                following = panels + LINE * ((begin + depth) // terms)
            stride, gap = LINE * (step // TILE) // count, LINE * (step // TILE) // count // 2
            if count == 1:  # nothing but memory keeps it waiting
                following, stride, gap = weight + LINE * LINES_AHEAD, LINE, apart
            for number in range(count):
                first, last = rows * number // count, rows * (number + 1) // count
                place = lines * (step // TILE) * number // count
                ahead = following + place // lines * apart + LINE * (place % lines)
                block(
                    kind, last - first, some, a + first * lda + begin * size, lda, weight, apart,
                    c + first * ldc + 4 * column, ldc, columns - column, fresh, ahead, gap, stride,
                )  # fmt: skip
