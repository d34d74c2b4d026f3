"""A row of logits as compiled code reads it: values in a total order, and weights that add up exactly; the edits of
single logits (bias, penalties, forbidden tokens), and top-k, top-p and min-p.

Order: a float32 as an int32 key that sorts alike, before the token's number, lowest first, in one int64. So no two
tokens of a row are equal, and each of the three filters keeps the tokens from some order upwards.

Weights: e^((logit - best) / temperature) in units of 2^-40, int64. Sums of whole numbers do not depend on the order of
adding, so they are the same bits on every device and in every grouping.

Limits are found without sorting: tokens are counted and weighed by buckets of equal width in the exponent, and only the
bucket of the limit is looked at token by token. Tokens below the last bucket have no weight and are never drawn.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from gpuinfer.models.kernel_cache import called_only, compiler
from gpuinfer.text.decoder.cpu_math import bits_of, exp, float_of

# mypy: ignore-errors


PACKAGES = Path(__file__).parent, Path(__file__).parent.parent / "decoder"
SOURCES = [file for package in PACKAGES for file in package.glob("cpu_*.py")]
compiled = compiler(SOURCES, nogil=True, _nrt=False, error_model="numpy")
"""Without reference counts: a function so compiled allocates nothing; its caller keeps the arrays alive."""

called = called_only(_nrt=False, error_model="numpy")
inlined = called_only(_nrt=False, error_model="numpy", forceinline=True)

BLOCK = 64  # tokens whose largest key is remembered, so that most of a row can be passed over. Loops count from 0 in a
# slice of that size: so they become vector instructions
ONE_WEIGHT = np.float32(2.0**40)
NOTHING = np.float32(-np.inf)
SIGN, MAGNITUDE = np.int32(31), np.int32(0x7FFFFFFF)
LOWEST_KEY, HIGHEST_KEY = np.int32(-(1 << 31)), np.int32(0x7FFFFFFF)
LARGEST, NOTHING_KEY = (
    np.int32(0x7F7FFFFF),
    np.int32(0x807FFFFF - (1 << 32)),
)  # keys of the largest finite value and -inf
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
        part = values[block * BLOCK : (block + 1) * BLOCK]
        for place in range(part.shape[0]):
            key = key_of(part[place])
            top = max(top, key)
            low = min(low, key)
        tops[block] = top
        best, least = max(best, top), min(least, low)
    return best, least


@inlined
def least_key(threshold, block):
    """The least key that a token of the block needs to reach the order, but for the block of the order's own token."""
    own = key_in(threshold)
    return own if block * BLOCK < token_in(threshold) else own + np.int32(1)


@inlined
def weigh(values, tops, threshold, best, inverse, sums):
    """Sum of the weights of the tokens whose order is `threshold` or above; `sums` gets that of each block."""
    total, own = np.int64(0), token_in(threshold) // BLOCK
    for block in range(tops.shape[0]):
        sums[block] = 0
        if tops[block] >= key_in(threshold):
            part = values[block * BLOCK : (block + 1) * BLOCK]
            if threshold == ALL:
                sums[block] = weigh_all(part, best, inverse)
            elif block == own:
                sums[block] = weigh_ordered(part, threshold, block * BLOCK, best, inverse)
            else:
                sums[block] = weigh_above(part, least_key(threshold, block), best, inverse)
            total += sums[block]
    return total


@inlined
def weigh_all(part, best, inverse):
    weight = np.int64(0)
    for place in range(part.shape[0]):
        weight += weight_of(part[place], best, inverse)
    return weight


@inlined
def weigh_above(part, key, best, inverse):
    weight = np.int64(0)
    for place in range(part.shape[0]):
        value = part[place] if key_of(part[place]) >= key else NOTHING
        weight += weight_of(value, best, inverse)
    return weight


@inlined
def weigh_ordered(part, threshold, first, best, inverse):
    weight = np.int64(0)
    for place in range(part.shape[0]):
        if order_of(part[place], first + place) >= threshold:
            weight += weight_of(part[place], best, inverse)
    return weight


# mypy: ignore-errors


ONE = np.float32(1.0)
EVERYTHING = np.int32(-1)


@inlined
def is_edited(record):
    return record.biases > 0 or record.penalised != 0 or record.drawn < record.min_tokens


@called
def penalise(values, slot, record, lists):
    """Logit bias, then the penalties for tokens seen: repetition divides or multiplies (Keskar et al. 2019), presence
    and frequency subtract, as OpenAI's API has them.
    """
    bias_ids, bias_values, _, _, seen_ids, seen_counts = lists
    for place in range(record.biases):
        values[bias_ids[slot, place]] += bias_values[slot, place]
    for place in range(record.seen):
        token, count = seen_ids[slot, place], np.float32(seen_counts[slot, place])
        value = values[token]
        value = value / record.repetition if value > ZERO else value * record.repetition
        if count > ZERO:
            value = (value - record.frequency * count) - record.presence
        values[token] = value


@called
def mask_out(values, words):
    """Leave the tokens whose bit is set in int32 `words`."""
    for place in range(words.shape[0]):
        if words[place] != EVERYTHING:
            for token in range(place * 32, min((place + 1) * 32, values.shape[0])):
                if not (words[place] >> np.int32(token & 31)) & np.int32(1):
                    values[token] = NOTHING


@called
def bar_ends(values, slot, record, lists):
    """Take the end tokens and the slot's stop tokens away."""
    _, _, stops, ends, _, _ = lists
    for place in range(ends.shape[0]):
        values[ends[place]] = NOTHING
    for place in range(record.stops):
        values[stops[slot, place]] = NOTHING


@inlined
def note(token, slot, record, lists):
    """Count the token that the slot has drawn."""
    _, _, _, _, ids, counts = lists
    record.drawn += 1
    if record.penalised == 0:
        return
    place = 0
    while place < record.seen and ids[slot, place] != token:
        place += 1
    if place == record.seen:
        ids[slot, place], counts[slot, place] = token, 0
        record.seen += 1
    counts[slot, place] += 1


@compiled
def note_all(tokens, slots, records, lists):
    """note for each row that has a token."""
    for row in range(slots.shape[0]):
        if tokens[row] >= 0:
            note(tokens[row], slots[row], records[slots[row]], lists)


# mypy: ignore-errors


ONE_TOKEN = np.int64(1)
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
                mass += ONE_TOKEN if inverse == 0 else weight_of(value_of(key_in(orders[left])), best, inverse)
                left += 1
            elif orders[right] <= pivot:
                right -= 1
            else:
                orders[left], orders[right] = orders[right], orders[left]
        if mass >= need:
            last = left - 1
        else:
            need -= mass
            own = ONE_TOKEN if inverse == 0 else weight_of(value_of(key_in(pivot)), best, inverse)
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
