"""One block of a matrix product in registers: some rows times some panels of 16 columns.

A weight [out, in] lies in panels [in, 16], its columns side by side for each term; bfloat16 is widened as it is read.
Each sum begins at 0 and takes its terms one by one, in order, with one rounding each: its bits depend on its row and
its column alone, neither on what else is in the block nor on how wide the processor's vectors are.
"""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpuinfer.models.text.decoder.cpu_intrinsics import F32, I64
from gpuinfer.models.text.decoder.cpu_vectors import (
    HALF,
    TILE,
    WIDE,
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
