"""Matrix products of compiled kernels: a row's result has the same bits among any number of rows, on any processor.

Every value is summed in one fixed order (see `cpu_blocks`), so that neither company, nor the lane that a column falls
to, nor the kind of processor can show. A block holds as many sums as the processor has registers for.
"""

from __future__ import annotations

import functools

import numpy as np
from numba import types
from numba.core.registry import cpu_target

from gpuinfer.models.kernel_cache import c_compiler
from gpuinfer.models.text.decoder.cpu_blocks import block
from gpuinfer.models.text.decoder.cpu_math import SOURCES, inlined
from gpuinfer.models.text.decoder.cpu_vectors import TILE

SIGNATURE = types.void(*[types.int64] * 8)
FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]  # what Numba compiles for
WIDE_VECTORS = "+avx512f" in FEATURES
ROWS, PANELS = (8, 2) if WIDE_VECTORS else (6, 1)  # sums at once: 16 of 32 registers, or 12 of 16 in halves
PAIR_PANELS = 2
LONE_PANELS = 4


@functools.cache
def product_with(stored):
    """The product with weights that are stored so: float32, or bfloat16 as its bits in uint16. It is called by its
    `address` (`cpu_intrinsics.call_product`), and so compiled once, not with each kernel that needs it.

    c [rows, columns] = a [rows, inner] · the weight that `panels_of` gave. `a` and `c` are float32, and given as
    addresses; their rows lie `lda` and `ldc` values apart.
    """
    compiled = c_compiler(SOURCES, SIGNATURE, _nrt=False, error_model="numpy")
    return compiled(product_bfloat16 if stored == np.uint16 else product_float32)


def product_float32(rows, columns, inner, a, lda, panels, c, ldc):
    product(np.float32(0), 4, rows, columns, inner, a, lda, panels, c, ldc)


def product_bfloat16(rows, columns, inner, a, lda, panels, c, ldc):
    product(np.uint16(0), 2, rows, columns, inner, a, lda, panels, c, ldc)


@inlined
def product(kind, size, rows, columns, inner, a, lda, panels, c, ldc):
    rest = rows % ROWS
    many = rows - rest if rest <= 2 else rows  # one or two rows more are cheaper in blocks of their own
    for column in range(0, columns, TILE * PANELS):
        weight, into, width = panels + size * column * inner, c + 4 * column, columns - column
        for row in range(0, many, ROWS):
            block(
                ROWS, PANELS, kind, many - row, width, inner, a + 4 * row * lda, lda, weight, into + 4 * row * ldc, ldc
            )
    a += 4 * many * lda
    c += 4 * many * ldc
    if rows - many == 2:
        for column in range(0, columns, TILE * PAIR_PANELS):
            weight = panels + size * column * inner
            block(2, PAIR_PANELS, kind, 2, columns - column, inner, a, lda, weight, c + 4 * column, ldc)
    elif rows - many == 1:
        for column in range(0, columns, TILE * LONE_PANELS):
            weight = panels + size * column * inner
            block(1, LONE_PANELS, kind, 1, columns - column, inner, a, lda, weight, c + 4 * column, ldc)
