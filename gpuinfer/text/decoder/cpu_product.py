"""Matrix products of compiled kernels: a row's result has the same bits among any number of rows, on any processor.

Every value is summed in one fixed order (see the end), so that neither company, nor the lane that a column falls
to, nor the kind of processor can show. A block holds as many sums as the processor has registers for.

Weights as our own products read them, and memory for their rows.

One block of a matrix product in registers: some rows times some panels of 16 columns.

A weight [out, in] lies in panels [in, 16], its columns side by side for each term; bfloat16 is widened as it is read.
Each sum begins at 0 and takes its terms one by one, in order, with one rounding each: its bits depend on its row and
its column alone, neither on what else is in the block nor on how wide the processor's vectors are.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numpy.typing import NDArray

from gpuinfer.models.kernel_cache import c_compiler
from gpuinfer.text.decoder.cpu_intrinsics import F32, I64, call_product, gemm_bfloat16
from gpuinfer.text.decoder.cpu_math import SOURCES, inlined
from gpuinfer.text.decoder.cpu_vectors import (
    HALF,
    TILE,
    WIDE,
    WIDE_VECTORS,
    add_product,
    counting,
    splat,
    sum_of_none,
    widened,
)


@intrinsic
def block(typing, most_rows, most_panels, kind, rows, columns, inner, a, lda, panels, c, ldc):
    """c = a · panels, float32: `a` [rows, inner], c [rows, columns], their rows `lda` and `ldc` values apart.

    `most_rows` and `most_panels`, literals, are what registers are there for; rows or columns beyond are not looked at.
    `kind` is any float32 for panels of float32, any uint16 for bfloat16. `a`, `panels` and `c` are addresses.
    """
    literals = isinstance(most_rows, types.IntegerLiteral) and isinstance(most_panels, types.IntegerLiteral)
    if not literals or kind not in (types.float32, types.uint16):
        return None
    vector = WIDE if kind == types.float32 else HALF

    def generate(context, builder, signature, values):
        rows, columns, inner, a, lda, panels, c, ldc = values[3:]
        numbers = range(most_rows.literal_value)
        into = [_least(builder, _number(row), builder.sub(rows, _number(1))) for row in numbers]  # the last row again
        given = [_address(builder, a, builder.mul(row, lda), F32) for row in into]
        there = builder.udiv(builder.add(columns, _number(TILE - 1)), _number(TILE))
        ours = [
            _address(
                builder,
                panels,
                builder.mul(_least(builder, _number(panel), builder.sub(there, _number(1))), inner),
                vector,
            )
            for panel in range(most_panels.literal_value)
        ]
        sums = [[sum_of_none(builder) for _ in ours] for _ in given]
        with counting(builder, inner, 1) as at:
            terms = [widened(builder, builder.load(builder.gep(panel, [at]), align=_bytes(vector))) for panel in ours]
            for row, totals in zip(given, sums, strict=True):
                value = splat(builder, builder.load(builder.gep(row, [at])))
                for total, term in zip(totals, terms, strict=True):
                    add_product(builder, total, value, term)
        for row, totals in zip(into, sums, strict=True):
            place = _address(builder, c, builder.mul(row, ldc), F32)
            for panel, total in enumerate(totals):
                begin = _number(panel * TILE)
                _put(builder, builder.gep(place, [begin]), builder.load(total), builder.sub(columns, begin))
        return context.get_dummy_value()

    return types.void(most_rows, most_panels, kind, *[types.int64] * 8), generate


def _put(builder, place, vector, columns):
    """The first `columns` values of a vector, all 16 at once where there are so many; none for 0 or less."""
    whole = builder.icmp_signed(">=", columns, _number(TILE))
    with builder.if_else(whole) as (all_of_them, some):
        with all_of_them:
            builder.store(vector, builder.bitcast(place, ir.PointerType(WIDE)), align=4)
        with some:
            kept = cgutils.alloca_once_value(builder, vector)
            values = builder.bitcast(kept, ir.PointerType(F32))
            with cgutils.for_range_slice(builder, _number(0), columns, _number(1)) as (at, _):
                builder.store(builder.load(builder.gep(values, [at])), builder.gep(place, [at]))


def _number(value):
    return ir.Constant(I64, value)


def _least(builder, a, b):
    return builder.select(builder.icmp_signed("<", a, b), a, b)


def _address(builder, start, count, kind):
    """A pointer to the element with this number, from the address where they start."""
    return builder.gep(builder.inttoptr(start, ir.PointerType(kind)), [count])


def _bytes(vector):
    return TILE * (4 if vector == WIDE else 2)


SIGNATURE = types.void(*[types.int64] * 8)
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


@inlined
def multiply(product, rows, columns, a, first, inner, weight, c, stride):
    """c [rows, columns] = a[first : first + rows, :inner] · weight, by ours or the library's product at an address; `c`
    is an address, its rows `stride` values apart.
    """
    if rows == 0 or columns == 0:
        return
    source = a.ctypes.data + a.itemsize * first * a.shape[1]
    if a.itemsize == 2:
        gemm_bfloat16(product, rows, columns, inner, source, a.shape[1], weight, c, stride)
    else:
        call_product(product, rows, columns, inner, source, a.shape[1], weight, c, stride)


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
