"""The inner loops of attention, written in vectors of 16 float32 that LLVM maps to what the processor has.

A cache holds keys in tiles of 16 positions, [head_dim, 16] each, so that the scores of 16 positions are one vector, and
values as [position, head_dim]. bfloat16 is widened as it is read. The loops of a head are too short for LLVM to find
their vectors by itself: it looks for longer ones.
"""

import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpuinfer.models.text.decoder.cpu_intrinsics import F32, I32, I64

TILE = 16
WIDE, HALF = ir.VectorType(F32, TILE), ir.VectorType(ir.IntType(16), TILE)
BITS = ir.VectorType(I32, TILE)
LEAST, LOG2_E = -87.0, 1.4426950216293335  # all exact in float32
LN2_HIGH, LN2_LOW = 0.693145751953125, 1.4286057785444427e-06
COEFFICIENTS = [float(np.float32(1 / math.factorial(n))) for n in range(8)]
CHAINS = 4  # sums kept apart, so that one addition need not wait for the one before


@intrinsic
def tile_scores(typing, query, query_at, keys, keys_at, dim, scores, scores_at):
    """scores[16] = query[dim] · keys[dim, 16]: one query with the keys of a tile. `dim` is a multiple of 4."""

    def generate(context, builder, signature, values):
        query, keys, scores = (_data(context, builder, signature, values, index) for index in (0, 2, 5))
        query_at, keys_at, dim, scores_at = values[1], values[3], values[4], values[6]
        sums = [_zero(builder) for _ in range(CHAINS)]
        four = ir.Constant(I64, CHAINS)
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), dim, four) as (d, _):
            for number, total in enumerate(sums):
                at = builder.add(d, ir.Constant(I64, number))
                value = builder.load(builder.gep(query, [builder.add(query_at, at)]))
                offset = builder.add(keys_at, builder.mul(at, ir.Constant(I64, TILE)))
                _add_product(builder, total, _splat(builder, value), _load(builder, keys, offset))
        _store(builder, scores, scores_at, _sum(builder, sums))
        return context.get_dummy_value()

    if not isinstance(keys, types.Array):
        return None
    f32 = types.Array(types.float32, 1, "C")
    return types.void(f32, types.int64, keys, types.int64, types.int64, f32, types.int64), generate


@intrinsic
def weighed_sum(typing, weights, count, values_array, values_at, stride, out, out_at):
    """out[16] = Σ weights[j] · values[j, 16 of its columns], over j < count; rows of values lie `stride` apart."""

    def generate(context, builder, signature, values):
        weights, array, out = (_data(context, builder, signature, values, index) for index in (0, 2, 5))
        count, values_at, stride, out_at = values[1], values[3], values[4], values[6]
        sums = [_zero(builder) for _ in range(CHAINS)]
        four = ir.Constant(I64, CHAINS)
        whole = builder.and_(count, ir.Constant(I64, -CHAINS))

        def add(j, number):
            row = builder.add(j, ir.Constant(I64, number))
            weight = _splat(builder, builder.load(builder.gep(weights, [row])))
            offset = builder.add(values_at, builder.mul(row, stride))
            _add_product(builder, sums[number], weight, _load(builder, array, offset))

        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), whole, four) as (j, _):
            for number in range(CHAINS):
                add(j, number)
        with cgutils.for_range_slice(builder, whole, count, ir.Constant(I64, 1)) as (j, _):
            add(j, 0)
        _store(builder, out, out_at, _sum(builder, sums))
        return context.get_dummy_value()

    if not isinstance(values_array, types.Array):
        return None
    f32 = types.Array(types.float32, 1, "C")
    return types.void(f32, types.int64, values_array, types.int64, types.int64, f32, types.int64), generate


@intrinsic
def soften(typing, scores, tiles):
    """Put e^(score - the highest) in place of each of the first 16 × `tiles` scores; their sum. -inf gives 0."""

    def generate(context, builder, signature, values):
        scores, tiles = _data(context, builder, signature, values, 0), values[1]
        tops = cgutils.alloca_once_value(builder, ir.Constant(WIDE, [float("-inf")] * TILE))
        sums = _zero(builder)
        end = builder.mul(tiles, ir.Constant(I64, TILE))
        largest = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(WIDE, [WIDE] * 2), "llvm.maxnum.v16f32"
        )
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), end, ir.Constant(I64, TILE)) as (at, _):
            builder.store(builder.call(largest, [builder.load(tops), _load(builder, scores, at)]), tops)
        top = _splat(builder, _across(builder, builder.load(tops), lambda a, b: builder.call(largest, [a, b])))
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), end, ir.Constant(I64, TILE)) as (at, _):
            weight = _exp(builder, builder.fsub(_load(builder, scores, at), top))
            _store(builder, scores, at, weight)
            builder.store(builder.fadd(builder.load(sums), weight), sums)
        return _across(builder, builder.load(sums), builder.fadd)

    return types.float32(types.Array(types.float32, 1, "C"), types.int64), generate


@intrinsic
def add_vectors(typing, a, a_at, b, b_at, count, out):
    """out[i] = a[a_at + i] + b[b_at + i], float32, for i < count, a multiple of 16."""

    def generate(context, builder, signature, values):
        a, b, out = (_data(context, builder, signature, values, index) for index in (0, 2, 5))
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), values[4], ir.Constant(I64, TILE)) as (at, _):
            left = _load(builder, a, builder.add(values[1], at))
            right = _load(builder, b, builder.add(values[3], at))
            _store(builder, out, at, builder.fadd(left, right))
        return context.get_dummy_value()

    f32 = types.Array(types.float32, 1, "C")
    return types.void(f32, types.int64, f32, types.int64, types.int64, f32), generate


@intrinsic
def turn_vectors(typing, head, cosines, sines, half):
    """Rotate head[i] with head[i + half] by the angle i, in place; float32, `half` a multiple of 16."""

    def generate(context, builder, signature, values):
        head, cosines, sines = (_data(context, builder, signature, values, index) for index in (0, 1, 2))
        half = values[3]
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), half, ir.Constant(I64, TILE)) as (at, _):
            beyond = builder.add(at, half)
            a, b = _load(builder, head, at), _load(builder, head, beyond)
            cosine, sine = _load(builder, cosines, at), _load(builder, sines, at)
            _store(builder, head, at, builder.fsub(builder.fmul(a, cosine), builder.fmul(b, sine)))
            _store(builder, head, beyond, builder.fadd(builder.fmul(b, cosine), builder.fmul(a, sine)))
        return context.get_dummy_value()

    f32 = types.Array(types.float32, 1, "C")
    return types.void(f32, f32, f32, types.int64), generate


@intrinsic
def store_scaled(typing, source, scale, count, out, out_at):
    """out[out_at + i] = source[i] × scale for i < count, a multiple of 16; rounded when out is bfloat16."""

    def generate(context, builder, signature, values):
        source, out = (_data(context, builder, signature, values, index) for index in (0, 3))
        scale = _splat(builder, values[1])
        with cgutils.for_range_slice(builder, ir.Constant(I64, 0), values[2], ir.Constant(I64, TILE)) as (at, _):
            value = builder.fmul(_load(builder, source, at), scale)
            _store(builder, out, builder.add(values[4], at), value)
        return context.get_dummy_value()

    if not isinstance(out, types.Array):
        return None
    return types.void(types.Array(types.float32, 1, "C"), types.float32, types.int64, out, types.int64), generate


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


def _zero(builder):
    """A vector of zeros that is added to: a register, once LLVM is done."""
    return cgutils.alloca_once_value(builder, ir.Constant(WIDE, [0.0] * TILE))


def _add_product(builder, total, a, b):
    fused = cgutils.get_or_insert_function(builder.module, ir.FunctionType(WIDE, [WIDE] * 3), "llvm.fma.v16f32")
    builder.store(builder.call(fused, [a, b, builder.load(total)]), total)


def _splat(builder, value):
    first = builder.insert_element(ir.Constant(WIDE, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(WIDE, ir.Undefined), ir.Constant(BITS, [0] * TILE))


def _load(builder, data, offset):
    """16 stored values from `offset` on, as float32."""
    narrow = data.type.pointee != F32
    pointer = builder.bitcast(builder.gep(data, [offset]), ir.PointerType(HALF if narrow else WIDE))
    value = builder.load(pointer, align=2 if narrow else 4)
    if not narrow:
        return value
    shift = ir.Constant(BITS, [16] * TILE)
    return builder.bitcast(builder.shl(builder.zext(value, BITS), shift), WIDE)


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


def _sum(builder, sums):
    a, b, c, d = (builder.load(total) for total in sums)
    return builder.fadd(builder.fadd(a, b), builder.fadd(c, d))
