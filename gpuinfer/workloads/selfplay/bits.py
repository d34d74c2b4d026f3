"""Bit tricks on 64-bit masks and counter-based random numbers, for compiled rules and search."""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from gpuinfer.models.kernel_cache import called_only

GAMMA = np.uint64(0x9E3779B97F4A7C15)
MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
MIX_2 = np.uint64(0x94D049BB133111EB)
U11, U27, U30, U31, U32 = (np.uint64(n) for n in (11, 27, 30, 31, 32))
LOW_32 = np.uint64(0xFFFFFFFF)
ONE = np.uint64(1)

compiled = njit(no_cfunc_wrapper=True, _nrt=False, error_model="numpy")
"""How rules and search are compiled: without reference counts, which cost more than the search itself (atomic
increments for every slice of an array). A function so compiled allocates nothing; its caller keeps the arrays alive."""

inlined = njit(no_cfunc_wrapper=True, _nrt=False, error_model="numpy", forceinline=True)
"""The same for a small function on the hot path: passing a tuple of arrays costs more than the work itself."""

inner = called_only(_nrt=False, error_model="numpy")
inner_inlined = called_only(_nrt=False, error_model="numpy", forceinline=True)
"""The same two for what the search alone calls, never Python: they take half as long to compile."""


@intrinsic
def trailing_zeros(typing, mask):
    """The index of the lowest set bit; 64 for an empty mask."""

    def generate(context, builder, signature, arguments):
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(mask), generate


@intrinsic
def popcount(typing, mask):
    """How many bits are set."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.int64(mask), generate


@inlined
def mix(z):
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of uint64 that looks random."""
    z = (z ^ (z >> U30)) * MIX_1
    z = (z ^ (z >> U27)) * MIX_2
    return z ^ (z >> U31)


@compiled
def seed_stream(stream, seed, index):
    """Start `stream`, uint64 [2] of (key, counter), for one (seed, index). A stream depends on nothing else."""
    stream[0] = mix(mix(np.uint64(seed) + GAMMA) ^ (np.uint64(index) * MIX_1 + GAMMA))
    stream[1] = np.uint64(0)


@compiled
def unit_of(seed, index):
    """One number for one (seed, index), uniform on [0, 1): it has nothing to do with their stream."""
    key = mix(mix(np.uint64(seed) + GAMMA) ^ (np.uint64(index) * MIX_2 + GAMMA))
    return np.float64(key >> U11) * (1.0 / 9007199254740992.0)


@inlined
def random_bits(stream):
    """The next uint64 of the stream: SplitMix64, a hash of key and counter."""
    stream[1] += ONE
    return mix(stream[0] + stream[1] * GAMMA)


@compiled
def random_below(stream, n):
    """Exactly uniform on 0 … n-1, for n < 2**32 (Lemire 2019, fast random integer generation in an interval)."""
    bound = np.uint64(n)
    product = (random_bits(stream) & LOW_32) * bound
    if (product & LOW_32) < bound:
        threshold = ((LOW_32 + ONE) - bound) % bound
        while (product & LOW_32) < threshold:
            product = (random_bits(stream) & LOW_32) * bound
    return np.int64(product >> U32)


@compiled
def random_unit(stream):
    """Uniform on [0, 1): 53 bits."""
    return np.float64(random_bits(stream) >> U11) * (1.0 / 9007199254740992.0)


@compiled
def random_normal(stream):
    """Standard normal (Box, Muller 1958)."""
    return np.sqrt(-2.0 * np.log(1.0 - random_unit(stream))) * np.cos(2.0 * np.pi * random_unit(stream))


@compiled
def random_gamma(stream, shape):
    """Gamma with unit scale (Marsaglia, Tsang 2000)."""
    boost = 1.0
    if shape < 1.0:
        boost = (1.0 - random_unit(stream)) ** (1.0 / shape)
        shape += 1.0
    d = shape - 1.0 / 3.0
    c = 1.0 / np.sqrt(9.0 * d)
    while True:
        x = random_normal(stream)
        v = (1.0 + c * x) ** 3
        if v > 0.0 and np.log(1.0 - random_unit(stream)) < 0.5 * x * x + d - d * v + d * np.log(v):
            return boost * d * v
