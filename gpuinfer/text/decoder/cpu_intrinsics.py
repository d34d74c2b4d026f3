"""What compiled code needs and Numba does not offer: calls by address, atomics, views of a number's bits."""

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

I32, I64, F32, VOID = ir.IntType(32), ir.IntType(64), ir.FloatType(), ir.VoidType()


def _call(builder, address, signature, arguments):
    """Call the C function of this signature at an address."""
    function = builder.inttoptr(address, ir.PointerType(signature))
    return builder.call(function, arguments)


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
