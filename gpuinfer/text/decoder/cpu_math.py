"""What compiled code needs and Numba does not offer: calls by address, atomics, views of a number's bits; scalars that
LLVM turns into vector instructions, and the inner loops of attention in vectors of 16 float32.

bfloat16 is widened as it is read. The loops of a head are too short for LLVM to vectorise by itself.
"""

import contextlib
import functools
import math
from pathlib import Path

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic, overload

from gpuinfer.models.kernel_cache import called_only, compiler

I32, I64, F32, VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()


def _call(builder, address, signature, arguments):
    """Call the C function of this signature at an address."""
    function = builder.inttoptr(address, ir.PointerType(signature))
    return builder.call(function, arguments)


def own_function(module, name, count, write):
    """The function `name` of an LLVM module, of so many int64, which is not inlined; made when it is first asked for:
    `write(builder, *arguments)` gives it its body.
    """
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(VOID, [I64] * count), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    builder = ir.IRBuilder(function.append_basic_block("entry"))
    write(builder, *function.args)
    builder.ret_void()
    return function


@intrinsic
def call_product(typing, function, m, n, k, a, lda, b, c, ldc):
    """c float32 [m, n] = a [m, k] · b, by the product of `cpu_product` at an address; a, b, c are addresses too."""

    def generate(context, builder, signature, values):
        _call(builder, values[0], ir.FunctionType(VOID, [I64] * 8), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


@intrinsic
def call_int(typing, function):
    """Call `int function(void)` at an address, such as `sched_yield`."""

    def generate(context, builder, signature, values):
        return builder.sext(_call(builder, values[0], ir.FunctionType(I32, []), []), I64)

    return types.int64(types.int64), generate


@intrinsic
def atomic_add(typing, array, index, value):
    """Add to an element of an int64 array, seen by all threads in one order; its value before."""

    return _exchange("add", array)


@intrinsic
def atomic_swap(typing, array, index, value):
    """Set an element of an int64 array, seen by all threads in one order; its value before."""

    return _exchange("xchg", array)


@intrinsic
def atomic_load(typing, array, index):
    """An element of an int64 array as the other threads have left it."""

    def generate(context, builder, signature, values):
        return builder.load_atomic(_element(context, builder, signature, values), "seq_cst", 8)

    return types.int64(array, types.int64), generate


@intrinsic
def poke(typing, array, index, value):
    """array[index] = value, for an index that is known not to count from the end."""

    def generate(context, builder, signature, values):
        builder.store(values[2], _element(context, builder, signature, values))
        return context.get_dummy_value()

    if not isinstance(array, types.Array):
        return None
    return types.void(array, types.int64, array.dtype), generate


@intrinsic
def relax(typing):
    """Tell the core that this is a loop that waits."""

    def generate(context, builder, signature, values):
        pause = cgutils.get_or_insert_function(builder.module, ir.FunctionType(VOID, []), "llvm.x86.sse2.pause")
        builder.call(pause, [])
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def ticks(typing):
    """The processor's counter of time."""

    def generate(context, builder, signature, values):
        counter = cgutils.get_or_insert_function(builder.module, ir.FunctionType(I64, []), "llvm.readcyclecounter")
        return builder.call(counter, [])

    return types.int64(), generate


@intrinsic
def load_at(typing, address, kind):
    """The value at an address: float32, or bfloat16 as its bits, like the array `kind`."""

    def generate(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], ir.PointerType(context.get_data_type(kind.dtype)))
        return builder.load(pointer)

    if not isinstance(kind, types.Array):
        return None
    return kind.dtype(types.int64, kind), generate


@intrinsic
def store_at(typing, address, value):
    """Put a value of its size at an address."""

    def generate(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], ir.PointerType(values[1].type))
        builder.store(values[1], pointer)
        return context.get_dummy_value()

    return types.void(types.int64, value), generate


@intrinsic
def bits_of(typing, value):
    """The bits of a float32 as an int32."""

    def generate(context, builder, signature, values):
        return builder.bitcast(values[0], I32)

    return types.int32(types.float32), generate


@intrinsic
def float_of(typing, bits):
    """The float32 of these bits."""

    def generate(context, builder, signature, values):
        return builder.bitcast(values[0], F32)

    return types.float32(types.int32), generate


def _element(context, builder, signature, values):
    array = context.make_array(signature.args[0])(context, builder, values[0])
    return builder.gep(array.data, [values[1]])


def _exchange(operation, array):
    """Signature and code of an atomic operation on an element of `array` with a value; it gives the value before."""

    def generate(context, builder, signature, values):
        pointer = _element(context, builder, signature, values)
        return builder.atomic_rmw(operation, pointer, values[2], "seq_cst")

    return types.int64(array, types.int64, types.int64), generate


FAST = {"contract", "reassoc", "nsz"}  # sums in vector order: always in the same one, as the code is
SOURCES = tuple(Path(__file__).parent.glob("cpu_*.py"))
compiled = compiler(SOURCES, nogil=True, _nrt=False, error_model="numpy", fastmath=FAST)
"""How kernels are compiled: without reference counts, so that they allocate nothing."""

called = called_only(_nrt=False, error_model="numpy", fastmath=FAST)
"""The same for a function that kernels call."""

inlined = called_only(_nrt=False, error_model="numpy", fastmath=FAST, forceinline=True)
"""The same for a small one on the hot path."""

F = np.float32
LOG2_E = F(1.4426950408889634)
LN2_HIGH, LN2_LOW = F(0.693145751953125), F(1.428606765330187e-06)
LEAST = F(-87.0)
C2, C3, C4, C5, C6, C7 = (F(1 / math.factorial(n)) for n in range(2, 8))
ONE, HALF, ZERO = F(1.0), F(0.5), F(0.0)


@inlined
def exp(x):
    """e^x for x ≤ 0: range reduction to ±ln 2 / 2 (Cody and Waite 1980) and a Taylor polynomial.

    Off by at most some units in the last place; below -87 it is that of -87, about 1e-38.
    """
    x = max(x, LEAST)
    power = np.int32(x * LOG2_E - HALF)  # the nearest, as x is not above 0: conversion drops what is behind the point
    whole = F(power)
    r = (x - whole * LN2_HIGH) - whole * LN2_LOW
    p = ONE + r * (ONE + r * (C2 + r * (C3 + r * (C4 + r * (C5 + r * (C6 + r * C7))))))
    return p * float_of((power + np.int32(127)) << np.int32(23))


@inlined
def sigmoid(x):
    """1 / (1 + e^-x), of either sign without overflow."""
    e = exp(-abs(x))
    return (ONE if x >= ZERO else e) / (ONE + e)


@inlined
def tanh(x):
    e = exp(F(-2.0) * abs(x))
    t = (ONE - e) / (ONE + e)
    return t if x >= ZERO else -t


def widen(value):
    """The float32 of a stored value: float32 as it is, bfloat16 as the upper half of one."""


@overload(widen, inline="always")
def _widen(value):
    if value == types.uint16:
        return lambda value: float_of(np.int32(value) << np.int32(16))
    return lambda value: value


def narrow(value, like):
    """A float32 as it is stored in an array like this one; bfloat16 rounds to the nearest even."""


@overload(narrow, inline="always")
def _narrow(value, like):
    if like.dtype == types.uint16:
        return lambda value, like: _to_bfloat16(value)
    return lambda value, like: value


@inlined
def _to_bfloat16(value):
    bits = bits_of(value)
    return np.uint16((bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) >> np.int32(16))


TILE = 16
WIDE, HALF_WIDE = ir.VectorType(F32, TILE), ir.VectorType(ir.IntType(16), TILE)
BITS = ir.VectorType(I32, TILE)
VECTOR_LEAST, VECTOR_LOG2_E = -87.0, 1.4426950216293335  # all exact in float32
VECTOR_LN2_HIGH, VECTOR_LN2_LOW = 0.693145751953125, 1.4286057785444427e-06
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
        scores, weights, out = (data_of(context, builder, signature, values, index) for index in (0, 3, 4))
        first, place = values[1], values[5]
        tops = cgutils.alloca_once_value(builder, ir.Constant(WIDE, [float("-inf")] * TILE))
        sums = sum_of_none(builder)
        end = builder.mul(values[2], ir.Constant(I64, TILE))
        kind = ir.FunctionType(WIDE, [WIDE] * 2)
        largest = cgutils.get_or_insert_function(builder.module, kind, "llvm.maxnum.v16f32")
        with counting(builder, end, TILE) as at:
            score = load_vector(builder, scores, builder.add(first, at))
            builder.store(builder.call(largest, [builder.load(tops), score]), tops)
        highest = across(builder, builder.load(tops), lambda a, b: builder.call(largest, [a, b]))
        top = splat(builder, highest)
        with counting(builder, end, TILE) as at:
            offset = builder.add(first, at)
            weight = _exp(builder, builder.fsub(load_vector(builder, scores, offset), top, flags=WRITTEN))
            _store(builder, weights, offset, weight)
            builder.store(_added(builder, builder.load(sums), weight), sums)
        builder.store(highest, builder.gep(out, [place]))
        total = across(builder, builder.load(sums), functools.partial(_added, builder))
        builder.store(total, builder.gep(out, [builder.add(place, ir.Constant(I64, 1))]))
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, types.int64, weights, FLOATS, types.int64), generate


@intrinsic
def add_vectors(typing, a, a_at, b, b_at, count, out, out_at):
    """out[out_at + i] = a[a_at + i] + b[b_at + i], float32, for i < count, a multiple of 16."""

    def generate(context, builder, signature, values):
        a, b, out = (data_of(context, builder, signature, values, index) for index in (0, 2, 5))
        with counting(builder, values[4], TILE) as at:
            left = load_vector(builder, a, builder.add(values[1], at))
            right = load_vector(builder, b, builder.add(values[3], at))
            _store(builder, out, builder.add(values[6], at), builder.fadd(left, right))
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, FLOATS, types.int64, types.int64, FLOATS, types.int64), generate


@intrinsic
def turn_vectors(typing, head, first, cosines, sines, half):
    """Rotate head[first + i] with head[first + half + i] by the angle i, in place; `half` is a multiple of 16."""

    def generate(context, builder, signature, values):
        head, cosines, sines = (data_of(context, builder, signature, values, index) for index in (0, 2, 3))
        half = values[4]
        with counting(builder, half, TILE) as at:
            near = builder.add(values[1], at)
            beyond = builder.add(near, half)
            a, b = load_vector(builder, head, near), load_vector(builder, head, beyond)
            cosine, sine = load_vector(builder, cosines, at), load_vector(builder, sines, at)
            _store(builder, head, near, builder.fsub(builder.fmul(a, cosine), builder.fmul(b, sine)))
            _store(builder, head, beyond, builder.fadd(builder.fmul(b, cosine), builder.fmul(a, sine)))
        return context.get_dummy_value()

    return types.void(FLOATS, types.int64, FLOATS, FLOATS, types.int64), generate


@intrinsic
def store_scaled(typing, source, source_at, scale, count, out, out_at):
    """out[out_at + i] = source[source_at + i] × scale for i < count, a multiple of 16; rounded for bfloat16."""

    def generate(context, builder, signature, values):
        source, out = (data_of(context, builder, signature, values, index) for index in (0, 4))
        scale = splat(builder, values[2])
        with counting(builder, values[3], TILE) as at:
            value = builder.fmul(load_vector(builder, source, builder.add(values[1], at)), scale)
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

    gone = builder.fcmp_ordered("<", x, all_of(VECTOR_LEAST))
    x = builder.select(gone, all_of(VECTOR_LEAST), x)
    power = builder.fptosi(fused(x, all_of(VECTOR_LOG2_E), all_of(-0.5)), BITS)
    whole = builder.sitofp(power, WIDE)
    r = fused(whole, all_of(-VECTOR_LN2_LOW), fused(whole, all_of(-VECTOR_LN2_HIGH), x))
    result = all_of(COEFFICIENTS[-1])
    for coefficient in reversed(COEFFICIENTS[:-1]):
        result = fused(result, r, all_of(coefficient))
    exponent = builder.shl(builder.add(power, ir.Constant(BITS, [127] * TILE)), ir.Constant(BITS, [23] * TILE))
    result = builder.fmul(result, builder.bitcast(exponent, WIDE))
    return builder.select(gone, all_of(0.0), result)


def across(builder, vector, combine):
    """All 16 values of a vector combined into one, in halves."""
    width = TILE // 2
    while width:
        places = [(i + width) % TILE for i in range(TILE)]
        vector = combine(vector, builder.shuffle_vector(vector, vector, ir.Constant(BITS, places)))
        width //= 2
    return builder.extract_element(vector, ir.Constant(I32, 0))


def data_of(context, builder, signature, values, index):
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


def load_vector(builder, data, offset):
    """16 stored values from `offset` on, as float32."""
    narrow = data.type.pointee != F32
    pointer = builder.bitcast(builder.gep(data, [offset]), ir.PointerType(HALF_WIDE if narrow else WIDE))
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
    half = builder.trunc(builder.lshr(rounded, shift), HALF_WIDE)
    builder.store(half, builder.bitcast(place, ir.PointerType(HALF_WIDE)), align=2)
