# mypy: ignore-errors
"""The k-th of many, or the first so many per cent of them, without sorting them."""

import numpy as np

from gpuinfer.models.text.sampling.cpu_values import (
    ALL,
    BLOCK,
    compiled,
    inlined,
    key_in,
    key_of,
    order_of,
    value_of,
    weight_of,
)

ONE = np.int64(1)
SHIFT, FACTOR = np.uint64(32), np.uint64(0x9E3779B97F4A7C15)


@compiled
def select(orders, count, need, best, inverse):
    """The order at which the largest of `orders[:count]`, taken in turn, reach `need` in sum: of their weights, or of
    1 each when `inverse` is 0. They are moved about. Quickselect (Hoare 1961), by weight; the pivot is the middle
    of three taken here and there, so that no pattern in the logits makes it slow. `need` is within reach.
    """
    first, last, step = 0, count - 1, count
    while first < last:
        size = last - first + 1
        a, b, c = mix(step), mix(step + 1), mix(step + 2)
        step += 3
        pivot = middle(orders[first + a % size], orders[first + b % size], orders[first + c % size])
        left, right, mass = first, last, np.int64(0)
        while left <= right:
            if orders[left] > pivot:
                mass += ONE if inverse == 0 else weight_of(value_of(key_in(orders[left])), best, inverse)
                left += 1
            elif orders[right] <= pivot:
                right -= 1
            else:
                orders[left], orders[right] = orders[right], orders[left]
        if mass >= need:
            last = left - 1
        else:
            need -= mass
            own = ONE if inverse == 0 else weight_of(value_of(key_in(pivot)), best, inverse)
            if own >= need:
                return pivot
            first = to_front(orders, left, last, pivot)
            need -= own
    return orders[first]


@compiled
def to_front(orders, first, last, pivot):
    """Put the pivot, which is somewhere in the range, out of it; where the range begins then."""
    place = first
    while orders[place] != pivot and place < last:
        place += 1
    orders[place], orders[first] = orders[first], orders[place]
    return first + 1


@inlined
def mix(number):
    """A small number that looks random (Fibonacci hashing: Knuth 1973, section 6.4)."""
    return np.int64((np.uint64(number) * FACTOR) >> SHIFT)


@compiled
def middle(a, b, c):
    return max(min(a, b), min(max(a, b), c))


@compiled
def bound_for(count, tops, orders):
    """An order that at least `count` tokens of the row reach, by the blocks' largest keys; ALL if none is known."""
    if count > tops.shape[0]:
        return ALL
    for block in range(tops.shape[0]):
        orders[block] = (np.int64(tops[block]) << 32) | block
    lowest = select(orders, tops.shape[0], np.int64(count), np.float32(0.0), np.float32(0.0))
    return np.int64(key_in(lowest)) << 32


@compiled
def gather(values, tops, threshold, most, orders):
    """Write the orders of the tokens from the threshold up whose key is at most `most`; how many they are."""
    count, key = 0, key_in(threshold)
    for block in range(tops.shape[0]):
        if tops[block] < key:
            continue
        part, found = values[block * BLOCK : (block + 1) * BLOCK], np.int32(0)
        for place in range(part.shape[0]):
            found += np.int32((key_of(part[place]) >= key) & (key_of(part[place]) <= most))
        if found == 0:
            continue  # most blocks of a flat row: passed over in vector instructions
        for place in range(part.shape[0]):
            order = order_of(part[place], block * BLOCK + place)
            orders[count] = order  # always, as no processor guesses the outcome
            count += np.int64((order >= threshold) & (key_in(order) <= most))
    return count
