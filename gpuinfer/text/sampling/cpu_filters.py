"""Top-k, top-p and min-p as one threshold: all three keep the tokens of a row from some order upwards.

Tokens are counted and weighed by buckets of equal width in the exponent; only the bucket in which a limit falls is
looked at token by token. What lies below the last bucket has no weight, so it is never drawn.

The k-th of many, or the first so many per cent of them, without sorting them.
"""

from __future__ import annotations

import math

import numpy as np

from gpuinfer.text.sampling.cpu_values import (
    ALL,
    BLOCK,
    NOTHING,
    called,
    inlined,
    key_in,
    key_of,
    order_of,
    value_of,
    weigh,
    weight_of,
)

# mypy: ignore-errors


ONE = np.int64(1)
SHIFT, FACTOR = np.uint64(32), np.uint64(0x9E3779B97F4A7C15)


@called
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


@called
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


@called
def middle(a, b, c):
    return max(min(a, b), min(max(a, b), c))


@called
def bound_for(count, tops, orders):
    """An order that at least `count` tokens of the row reach, by the blocks' largest keys; ALL if none is known."""
    if count > tops.shape[0]:
        return ALL
    for block in range(tops.shape[0]):
        orders[block] = (np.int64(tops[block]) << 32) | block
    lowest = select(orders, tops.shape[0], np.int64(count), np.float32(0.0), np.float32(0.0))
    return np.int64(key_in(lowest)) << 32


@called
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


# mypy: ignore-errors


WIDEST = np.float32(40 * math.log(2) + 0.01)  # exponents beyond it have the weight 0
MARGIN = 0.01  # of a bucket
LEAST_BUCKETS, MOST_BUCKETS = 32, 1024


@inlined
def cut(values, tops, best, inverse, top_k, top_p, floor, work):
    """The order from which on tokens stay. `work`: (orders, counts, masses, buckets, weights, sums)."""
    threshold = ALL
    if 0 < top_k < values.shape[0] or top_p < 1.0:
        bound = bound_for(top_k, tops, work[0]) if top_k > 0 else ALL
        sort_into_buckets(values, tops, bound, best, inverse, top_k > 0, work)
        total, threshold = keep_count(values, tops, bound, best, inverse, top_k, work)
        if top_p < 1.0:
            threshold = keep_mass(values, tops, threshold, best, inverse, total, top_p, work)
    if floor > -np.inf:
        lowest = key_of(np.float32(np.float64(best) + floor))
        threshold = max(threshold, np.int64(lowest) << 32)
    return threshold


@inlined
def bucket_of(value, best, inverse, scale):
    return np.int32(min((value - best) * -inverse, WIDEST) * scale)  # multiplied as weight_of does


@inlined
def scale_of(counts):
    """Buckets per unit of the exponent. The last bucket is for what has no weight."""
    return np.float32(counts.shape[0] - 1) / WIDEST


@inlined
def sort_into_buckets(values, tops, bound, best, inverse, counted, work):
    """Tokens from `bound` upwards: what those of each bucket weigh and, if `counted`, how many there are."""
    _, counts, masses, buckets, weights, _ = work
    scale = scale_of(counts)
    for bucket in range(counts.shape[0]):
        counts[bucket] = masses[bucket] = 0
    key = key_in(bound)
    for block in range(tops.shape[0]):
        if tops[block] < key:
            continue
        part = values[block * BLOCK : (block + 1) * BLOCK]
        for place in range(part.shape[0]):  # apart from what follows, so that it becomes vector instructions
            value = part[place] if key_of(part[place]) >= key else NOTHING
            buckets[place] = bucket_of(value, best, inverse, scale)
            weights[place] = weight_of(value, best, inverse)
        for place in range(part.shape[0]):
            masses[buckets[place]] += weights[place]
        if counted:
            for place in range(part.shape[0]):
                counts[buckets[place]] += 1


@inlined
def keep_count(values, tops, bound, best, inverse, top_k, work):
    """What the `top_k` likeliest tokens weigh, and the order of the last; of all tokens when that is 0."""
    orders, counts, masses, _, _, _ = work
    total, bucket, left = np.int64(0), 0, top_k if top_k > 0 else np.int64(values.shape[0] + 1)
    while bucket < counts.shape[0] - 1 and counts[bucket] < left:
        left -= counts[bucket]
        total += masses[bucket]
        bucket += 1
    if bucket == counts.shape[0] - 1:
        return total, bound  # the rest has no weight
    count = gather_bucket(values, tops, bound, best, inverse, bucket, work)
    last = select(orders, count, left, best, np.float32(0.0))
    for place in range(count):
        if orders[place] >= last:
            total += weight_of(value_of(key_in(orders[place])), best, inverse)
    return total, last


@inlined
def keep_mass(values, tops, threshold, best, inverse, total, top_p, work):
    """The order from which on tokens weigh at least `top_p` of the total, with as few of them as will do."""
    orders, _, masses, _, _, _ = work
    need = min(max(np.int64(math.ceil(top_p * np.float64(total))), np.int64(1)), total)
    bucket = 0
    while bucket < masses.shape[0] - 1 and masses[bucket] < need:
        need -= masses[bucket]
        bucket += 1
    count = gather_bucket(values, tops, threshold, best, inverse, bucket, work)
    return select(orders, count, need, best, inverse)


@inlined
def gather_bucket(values, tops, threshold, best, inverse, bucket, work):
    """Write the orders of the bucket's tokens from the threshold upwards; how many they are."""
    orders, counts, _, _, _, _ = work
    scale = scale_of(counts)
    lowest = np.int64(key_of(edge_of(best, inverse, bucket + 1 + MARGIN, scale))) << 32
    highest = key_of(edge_of(best, inverse, bucket - MARGIN, scale))
    found = gather(values, tops, max(threshold, lowest), highest, orders)
    count = 0
    for place in range(found):
        if bucket_of(value_of(key_in(orders[place])), best, inverse, scale) == bucket:
            orders[count] = orders[place]
            count += 1
    return count


@inlined
def edge_of(best, inverse, bucket, scale):
    """The logit at which a bucket begins. `bucket_of` rounds otherwise, by far less than MARGIN."""
    return np.float32(np.float64(best) - bucket / np.float64(scale) / np.float64(inverse))


@inlined
def draw(values, tops, threshold, best, inverse, unit, work):
    """The token at which the weights, added up in the order of the tokens, pass `unit` of their sum."""
    sums = work[5]
    total = weigh(values, tops, threshold, best, inverse, sums)
    left = min(np.int64(unit * np.float64(total)), total - 1)
    block = 0
    while sums[block] <= left:
        left -= sums[block]
        block += 1
    token = block * BLOCK
    while True:
        if order_of(values[token], token) >= threshold:
            left -= weight_of(values[token], best, inverse)
        if left < 0:
            return token
        token += 1
