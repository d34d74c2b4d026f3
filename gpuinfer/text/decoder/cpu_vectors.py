"""The inner loops of attention, written in vectors of 16 float32 that LLVM maps to what the processor has.

bfloat16 is widened as it is read. The loops of a head are too short for LLVM to find their vectors by itself: it looks
for longer ones.
"""

import contextlib
import functools
import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from gpuinfer.text.decoder.cpu_intrinsics import F32, I32, I64

TILE = 16
WIDE, HALF = ir.VectorType(F32, TILE), ir.VectorType(ir.IntType(16), TILE)
BITS = ir.VectorType(I32, TILE)
LEAST, LOG2_E = -87.0, 1.4426950216293335  # all exact in float32
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.4286057785444427e-06
COEFFICIENTS = [float(np.float32(1 / math.factorial(n))) for n in range(8)]
FLOATS = types.Array(types.float32, 1, "C")
WRITTEN = ("contract",)  # flags of its own keep `cpu_math.FAST` off an operation: LLVM may not sum in another order
FEATURES = cpu_target.target_context.codegen().magic_tuple()[2]  # what Numba compiles for
WIDE_VECTORS = "+avx512f" in FEATURES
SUMS = 8 if WIDE_VECTORS else 4  # of 16 values, kept apart in registers: so many that none waits for the one before


@intrinsic
def soften(typing, scores, first, tiles, weights, tops, place):
    """weights[first + i] = e^(score - the highest), as it is stored there, of 16 × `tiles` scores from `first` on; the
    highest score and the sum of the weights go to tops[place] and tops[place + 1]. A score of -inf weighs 0; one at
    least is higher.
    """
    if not isinstance(weights, types.Array):
        return None

    def generate(context, builder, signature, values):
        scores, weights, out = (_data(context, builder, signature, values, index) for index in (0, 3, 4))
        first, place = values[1], values[5]
        tops = cgutils.alloca_once_value(builder, ir.Constant(WIDE, [float("-inf")] * TILE))
        sums = sum_of_none(builder)
        end = builder.mul(values[2], ir.Constant(I64, TILE))
        kind = ir.FunctionType(WIDE, [WIDE] * 2)
        largest = cgutils.get_or_insert_function(builder.module, kind, "llvm.maxnum.v16f32")
        with counting(builder, end, TILE) as at:
            score = _load(builder, scores, builder.add(first, at))
            builder.store(builder.call(largest, [builder.load(tops), score]), tops)
        highest = _across(builder, builder.load(tops), lambda a, b: builder.call(largest, [a, b]))
        top = splat(builder, highest)
        with counting(builder, end, TILE) as at:
            offset = builder.add(first, at)
            weight = _exp(builder, builder.fsub(_load(builder, scores, offset), top, flags=WRITTEN))
            _store(builder, weights, offset, weight)
            builder.store(_added(builder, builder.load(sums), weight), sums)
        builder.store(highest, builder.gep(out, [place]))
        total = _across(builder, builder.load(sums), functools.partial(_added, builder))
        builder.store(total, builder.gep(out, [builder.add(place, ir.Constant(I64, 1))]))
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, types.int64, weights, FLOATS, types.int64), generate


@intrinsic
def add_vectors(typing, a, a_at, b, b_at, count, out, out_at):
    """out[out_at + i] = a[a_at + i] + b[b_at + i], float32, for i < count, a multiple of 16."""

    def generate(context, builder, signature, values):
        a, b, out = (_data(context, builder, signature, values, index) for index in (0, 2, 5))
        with counting(builder, values[4], TILE) as at:
            left = _load(builder, a, builder.add(values[1], at))
            right = _load(builder, b, builder.add(values[3], at))
            _store(builder, out, builder.add(values[6], at), builder.fadd(left, right))
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, FLOATS, types.int64, types.int64, FLOATS, types.int64), generate


@intrinsic
def turn_vectors(typing, head, first, cosines, sines, half):
    """Rotate head[first + i] with head[first + half + i] by the angle i, in place; `half` is a multiple of 16."""

    def generate(context, builder, signature, values):
        head, cosines, sines = (_data(context, builder, signature, values, index) for index in (0, 2, 3))
        half = values[4]
        with counting(builder, half, TILE) as at:
            near = builder.add(values[1], at)
            beyond = builder.add(near, half)
            a, b = _load(builder, head, near), _load(builder, head, beyond)
            cosine, sine = _load(builder, cosines, at), _load(builder, sines, at)
            _store(builder, head, near, builder.fsub(builder.fmul(a, cosine), builder.fmul(b, sine)))
            _store(builder, head, beyond, builder.fadd(builder.fmul(b, cosine), builder.fmul(a, sine)))
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, FLOATS, FLOATS, types.int64), generate


@intrinsic
def store_scaled(typing, source, source_at, scale, count, out, out_at):
    """out[out_at + i] = source[source_at + i] × scale for i < count, a multiple of 16; rounded for bfloat16."""

    def generate(context, builder, signature, values):
        source, out = (_data(context, builder, signature, values, index) for index in (0, 4))
        scale = splat(builder, values[2])
        with counting(builder, values[3], TILE) as at:
            value = builder.fmul(_load(builder, source, builder.add(values[1], at)), scale)
            _store(builder, out, builder.add(values[5], at), value)
        return context.get_dummy_value()

    if not isinstance(out, types.Array):
        return None
    return types.void(FLOATS, types.int64, types.float32, types.int64, out, types.int64), generate


def _added(builder, a, b):
    """a + b in a sum of more, in the order that is written. Two alone (`add_vectors`, `turn_vectors`) have no other."""
    return builder.fadd(a, b, flags=WRITTEN)


def _exp(builder, x):
    """e^x for x ≤ 0, as `cpu_math.exp`."""

    def all_of(value):
        return ir.Constant(WIDE, [value] * TILE)

    def fused(a, b, c):
        function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(WIDE, [WIDE] * 3), "llvm.fma.v16f32")
        return builder.call(function, [a, b, c])

    gone = builder.fcmp_ordered("<", x, all_of(LEAST))
    x = builder.select(gone, all_of(LEAST), x)
    power = builder.fptosi(fused(x, all_of(LOG2_E), all_of(-0.5)), BITS)
    whole = builder.sitofp(power, WIDE)
    r = fused(whole, all_of(-LN2_LOW), fused(whole, all_of(-LN2_HIGH), x))
    result = all_of(COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        result = fused(result, r, all_of(coefficient))
    exponent = builder.shl(builder.add(power, ir.Constant(BITS, [127] * TILE)), ir.Constant(BITS, [23] * TILE))
    result = builder.fmul(result, builder.bitcast(exponent, WIDE))
    return builder.select(gone, all_of(0.0), result)


def _across(builder, vector, combine):
    """All 16 values of a vector combined into one, in halves."""
    width = TILE // 2
    while width:
        places = [(i + width) % TILE for i in range(TILE)]
        vector = combine(vector, builder.shuffle_vector(vector, vector, ir.Constant(BITS, places)))
        width //= 2
    return builder.extract_element(vector, ir.Constant(I32, 0))


def _data(context, builder, signature, values, index):
    return context.make_array(signature.args[index])(context, builder, values[index]).data


@contextlib.contextmanager
def counting(builder, end, step):
    """A loop from 0 to before `end`."""
    with cgutils.for_range_slice(builder, ir.Constant(I64, 0), end, ir.Constant(I64, step)) as (at, _):
        yield at


def sum_of_none(builder):
    """A vector of zeros that is added to: a register, once LLVM is done."""
    return cgutils.alloca_once_value(builder, ir.Constant(WIDE, [0.0] * TILE))


def add_product(builder, total, a, b):
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(WIDE, [WIDE] * 3), "llvm.fma.v16f32")
    builder.store(builder.call(fused, [a, b, builder.load(total)]), total)


def splat(builder, value):
    first = builder.insert_element(ir.Constant(WIDE, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(WIDE, ir.Undefined), ir.Constant(BITS, [0] * TILE))


def _load(builder, data, offset):
    """16 stored values from `offset` on, as float32."""
    narrow = data.type.pointee != F32
    pointer = builder.bitcast(builder.gep(data, [offset]), ir.PointerType(HALF if narrow else WIDE))
    return widened(builder, builder.load(pointer, align=2 if narrow else 4))


def widened(builder, vector):
    """16 loaded values as float32: bfloat16 is the upper half of one."""
    if vector.type == WIDE:
        return vector
    shift = ir.Constant(BITS, [16] * TILE)
    return builder.bitcast(builder.shl(builder.zext(vector, BITS), shift), WIDE)


def _store(builder, data, offset, vector):
    """Put 16 float32 at `offset`, rounded to the nearest even where bfloat16 is kept."""
    place = builder.gep(data, [offset])
    if data.type.pointee == F32:
        builder.store(vector, builder.bitcast(place, ir.PointerType(WIDE)), align=4)
        return
    bits, shift = builder.bitcast(vector, BITS), ir.Constant(BITS, [16] * TILE)
    odd = builder.and_(builder.lshr(bits, shift), ir.Constant(BITS, [1] * TILE))
    rounded = builder.add(builder.add(bits, odd), ir.Constant(BITS, [0x7FFF] * TILE))
    half = builder.trunc(builder.lshr(rounded, shift), HALF)
    builder.store(half, builder.bitcast(place, ir.PointerType(HALF)), align=2)
