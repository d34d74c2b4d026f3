"""Scalars of compiled kernels, written so that LLVM turns loops over them into vector instructions."""

import math
from pathlib import Path

import numpy as np
from numba import types
from numba.extending import overload

from gpuinfer.models.called_only import called_only
from gpuinfer.models.kernel_cache import compiler
from gpuinfer.text.decoder.cpu_intrinsics import bits_of, float_of

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
