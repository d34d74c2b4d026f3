"""Kernels for CUDA devices, in Triton: weights of logits, and one token of each row. See `torch_path`, which does the
same in many more launches, to the bit.

This file needs Triton, which torch brings along where it is built for CUDA; nothing imports it elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl

from gpuinfer.text.sampling.torch_path import EXP_TERMS, LEAST, LN2, LOG2_E

ONE_WEIGHT = tl.constexpr(2.0**40)
EXP_LEAST, EXP_LOG2_E, EXP_LN2 = tl.constexpr(LEAST), tl.constexpr(LOG2_E), tl.constexpr(LN2)
C7, C6, C5, C4, C3, C2 = (tl.constexpr(term) for term in EXP_TERMS[:6])


@triton.jit
def key_of(value):
    """int32 that sort as the logits do; -0 is 0."""
    bits = tl.where(value == 0.0, 0.0, value).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def term(rest, found, added):
    """rest × found + added, rounded once to float32: the product of two float32 is exact in float64."""
    return (rest * found.to(tl.float64) + added).to(tl.float32)


@triton.jit
def weigh(
    values,  # float32 [rows, vocabulary]
    best,  # float32 [rows]
    inverse,  # float32 [rows]
    weights,  # float32 [rows, vocabulary], which become whole numbers when their fraction is dropped
    vocabulary,
    BLOCK: tl.constexpr,
):
    """A program is a block of one row. See `torch_path.exponentials`."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    held = at < vocabulary
    value = tl.load(values + row * vocabulary + at, mask=held, other=float("-inf"))
    above = (value - tl.load(best + row)) * tl.load(inverse + row)
    exact = tl.where(above > EXP_LEAST, above, EXP_LEAST).to(tl.float64)
    power = (exact * EXP_LOG2_E - 0.5).to(tl.float32).to(tl.int32)
    rest = (exact - power.to(tl.float64) * EXP_LN2).to(tl.float32).to(tl.float64)
    found = (rest * C7 + C6).to(tl.float32)
    found = term(rest, found, C5)
    found = term(rest, found, C4)
    found = term(rest, found, C3)
    found = term(rest, found, C2)
    found = term(rest, found, 1.0)
    found = term(rest, found, 1.0)
    scale = ((power + 127) << 23).to(tl.float32, bitcast=True)
    tl.store(weights + row * vocabulary + at, found * scale * ONE_WEIGHT, mask=held)


@triton.jit
def loaded(values, weights, start, vocabulary, BLOCK: tl.constexpr):
    """Keys and weights of a block of a row, and which of its places are in the row."""
    at = start + tl.arange(0, BLOCK)
    held = at < vocabulary
    value = tl.load(values + at, mask=held, other=float("-inf"))
    weight = tl.load(weights + at, mask=held, other=0.0).to(tl.int64)
    return key_of(value), weight, held


@triton.jit
def reaching(values, weights, vocabulary, need, BY_WEIGHT: tl.constexpr, BLOCK: tl.constexpr):
    """The largest key, int32, such that the tokens from it on reach `need` in sum: of their weights, or of 1 each. It
    is found by two bits at a time, from the highest on.
    """
    found = tl.full([], -2147483648, tl.int64)
    for step in range(16):
        width = tl.full([], 1, tl.int64) << (30 - 2 * step)
        first, second, third = found + width, found + 2 * width, found + 3 * width
        of_first = tl.zeros([BLOCK], tl.int64)
        of_second = tl.zeros([BLOCK], tl.int64)
        of_third = tl.zeros([BLOCK], tl.int64)
        for start in range(0, vocabulary, BLOCK):
            key, weight, held = loaded(values, weights, start, vocabulary, BLOCK)
            amount = weight if BY_WEIGHT else held.to(tl.int64)
            of_first += tl.where(key >= first.to(tl.int32), amount, 0)
            of_second += tl.where(key >= second.to(tl.int32), amount, 0)
            of_third += tl.where(key >= third.to(tl.int32), amount, 0)
        found = tl.where(tl.sum(of_first, 0) >= need, first, found)
        found = tl.where(tl.sum(of_second, 0) >= need, second, found)
        found = tl.where(tl.sum(of_third, 0) >= need, third, found)
    return found.to(tl.int32)


@triton.jit
def around(values, weights, vocabulary, key, BLOCK: tl.constexpr):
    """How many tokens are above a key, what they weigh, how many have the key, and what one of these weighs."""
    above = tl.zeros([BLOCK], tl.int64)
    mass = tl.zeros([BLOCK], tl.int64)
    tied = tl.zeros([BLOCK], tl.int64)
    own = tl.zeros([BLOCK], tl.int64)
    for start in range(0, vocabulary, BLOCK):
        found, weight, held = loaded(values, weights, start, vocabulary, BLOCK)
        above += (held & (found > key)).to(tl.int64)
        mass += tl.where(found > key, weight, 0)
        equal = held & (found == key)
        tied += equal.to(tl.int64)
        own = tl.maximum(own, tl.where(equal, weight, 0))
    return tl.sum(above, 0), tl.sum(mass, 0), tl.sum(tied, 0), tl.max(own, 0)


@triton.jit
def pick(
    values,  # float32 [rows, vocabulary]
    weights,  # as `weigh` leaves them
    best,  # float32 [rows]
    wanted,  # int64 [5, stride]: see `torch_path.columns_of`
    tokens,  # int64 [rows]
    totals,  # int64 [rows]: what the tokens that may be drawn weigh
    stride,
    vocabulary,
    BLOCK: tl.constexpr,
):
    """A program is one row."""
    row = tl.program_id(0).to(tl.int64)
    top_k = tl.load(wanted + stride + row)
    top_p = tl.load(wanted + 2 * stride + row).to(tl.float64, bitcast=True)
    floor = tl.load(wanted + 3 * stride + row).to(tl.float64, bitcast=True)
    unit = tl.load(wanted + 4 * stride + row).to(tl.float64, bitcast=True)
    lowest = key_of((tl.load(best + row).to(tl.float64) + floor).to(tl.float32))
    values += row * vocabulary
    weights += row * vocabulary

    key = tl.full([], -2147483648, tl.int32)
    ties = tl.full([], 1, tl.int64) << 62  # how many tokens of the key may be drawn, the lowest
    if (top_k > 0) & (top_k < vocabulary):
        key = reaching(values, weights, vocabulary, top_k, False, BLOCK)
        above, mass, tied, own = around(values, weights, vocabulary, key, BLOCK)
        ties = top_k - above
    if top_p < 1.0:
        above, mass, tied, own = around(values, weights, vocabulary, key, BLOCK)
        total = mass + own * tl.minimum(tied, ties)
        share = top_p * total.to(tl.float64)
        need = share.to(tl.int64)
        need += (need.to(tl.float64) < share).to(tl.int64)  # rounded up
        need = tl.minimum(tl.maximum(need, 1), total)
        key = reaching(values, weights, vocabulary, need, True, BLOCK)
        above, mass, tied, own = around(values, weights, vocabulary, key, BLOCK)
        own = tl.maximum(own, 1)
        ties = (need - mass + own - 1) // own
    if lowest > key:
        key = lowest
        ties = tl.full([], 1, tl.int64) << 62

    above, mass, tied, own = around(values, weights, vocabulary, key, BLOCK)
    total = mass + own * tl.minimum(tied, ties)
    left = tl.minimum((unit * total.to(tl.float64)).to(tl.int64), total - 1)
    reached = tl.full([], 0, tl.int64)
    token = tl.full([], 0, tl.int64)
    start = 0
    while start < vocabulary:
        found, weight, held = loaded(values, weights, start, vocabulary, BLOCK)
        equal = (held & (found == key)).to(tl.int64)
        kept = (found > key) | ((equal > 0) & (tl.cumsum(equal, 0) <= ties))
        weight = tl.where(kept, weight, 0)
        sums = reached + tl.cumsum(weight, 0)
        token = start + tl.sum((held & (sums <= left)).to(tl.int64), 0)
        reached += tl.sum(weight, 0)
        ties -= tl.sum(equal, 0)
        start = tl.where(reached > left, vocabulary, start + BLOCK)
    tl.store(tokens + row, tl.minimum(token, vocabulary - 1))
    tl.store(totals + row, total)
