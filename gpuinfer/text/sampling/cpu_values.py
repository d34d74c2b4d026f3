"""A row of logits as compiled code sees it: values in a total order, and weights that add up exactly.

Order: a float32 as an int32 key that sorts alike, before the token's number, lowest first, in one int64. So no two
tokens of a row are equal, and every filter keeps the tokens from some order upwards.

Weights: e^((logit - best) / temperature) in units of 2^-40, int64. Sums of whole numbers do not depend on the order of
adding, so they are the same bits on every device and in every grouping.

What changes single logits before a token is drawn: bias, penalties, tokens that may not come.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from gpuinfer.models.called_only import called_only
from gpuinfer.models.kernel_cache import compiler
from gpuinfer.text.decoder.cpu_intrinsics import bits_of, float_of
from gpuinfer.text.decoder.cpu_math import exp

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
