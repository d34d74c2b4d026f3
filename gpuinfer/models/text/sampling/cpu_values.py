# mypy: ignore-errors
"""A row of logits as compiled code sees it: values in a total order, and weights that add up exactly.

Order: a float32 as an int32 key that sorts alike, before the token's number, lowest first, in one int64. So no two
tokens of a row are equal, and every filter keeps the tokens from some order upwards.

Weights: e^((logit - best) / temperature) in units of 2^-40, int64. Sums of whole numbers do not depend on the order of
adding, so they are the same bits on every device and in every grouping.
"""

import numpy as np
from numba import njit

from gpuinfer.models.text.decoder.cpu_intrinsics import bits_of, float_of
from gpuinfer.models.text.decoder.cpu_math import exp

compiled = njit(nogil=True, cache=True, _nrt=False, error_model="numpy")
"""Without reference counts: a function so compiled allocates nothing; its caller keeps the arrays alive."""

inlined = njit(_nrt=False, error_model="numpy", forceinline=True)

BLOCK = 64  # tokens whose largest value is remembered, so that most of a row can be passed over
ONE_WEIGHT = np.float32(2.0**40)
NOTHING = np.float32(-np.inf)
SIGN, MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)
LOWEST_KEY, HIGHEST_KEY = np.int32(-(1 << 31)), np.int32(0x7FFFFFFF)
LARGEST, NOTHING_KEY = np.int32(0x7F7FFFFF), np.int32(0x807FFFFF - (1 << 32))  # keys of the largest finite value and -inf
ALL = np.int64(-(1 << 63))  # an order below every token's
ZERO = np.float32(0.0)


@inlined
def key_of(value):
    bits = bits_of(value + ZERO)  # -0 becomes 0, which it equals
    return bits ^ ((bits >> SIGN) & MAGNITUDE)


@inlined
def value_of(key):
    return float_of(key ^ ((key >> SIGN) & MAGNITUDE))


@inlined
def order_of(value, token):
    return (np.int64(key_of(value)) << 32) | (np.int64(0x7FFFFFFF) - token)


@inlined
def key_in(order):
    return np.int32(order >> 32)


@inlined
def token_in(order):
    return np.int64(0x7FFFFFFF) - (order & np.int64(0xFFFFFFFF))


@inlined
def weight_of(value, best, inverse):
    return np.int64(exp((value - best) * inverse) * ONE_WEIGHT)


@inlined
def survey(values, tops):
    """The largest and smallest key of the row; `tops` gets the largest key of each block."""
    best, least = LOWEST_KEY, HIGHEST_KEY
    for block in range(tops.shape[0]):
        top, low = LOWEST_KEY, HIGHEST_KEY
        for token in range(block * BLOCK, min((block + 1) * BLOCK, values.shape[0])):
            key = key_of(values[token])
            top = max(top, key)
            low = min(low, key)
        tops[block] = top
        best, least = max(best, top), min(least, low)
    return best, least


@inlined
def weigh(values, tops, threshold, best, inverse, sums):
    """Sum of the weights of the tokens whose order is `threshold` or above; `sums` gets that of each block."""
    total = np.int64(0)
    for block in range(tops.shape[0]):
        sums[block] = 0
        if tops[block] >= key_in(threshold):
            weight = np.int64(0)
            for token in range(block * BLOCK, min((block + 1) * BLOCK, values.shape[0])):
                kept = order_of(values[token], token) >= threshold
                weight += weight_of(values[token], best, inverse) if kept else np.int64(0)
            sums[block] = weight
            total += weight
    return total
