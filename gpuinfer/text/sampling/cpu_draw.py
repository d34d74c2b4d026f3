"""Compiled sampling: one token for each row of logits, and log-probabilities of one token of each row and of the row's
likeliest.

Where few tokens are allowed in a row, only these are looked at, in a row of their own. A draw depends on the order of
the tokens, their values, and sums of whole numbers: without the forbidden tokens, which weigh nothing, it is the same
draw to the bit.

Random numbers come from a counter: Philox4x32-10 (Salmon, Moraes, Dror, Shaw 2011, Parallel random numbers: as easy as
1, 2, 3). A number depends on (seed, key, sample, position) alone, so a row draws the same in any company.
"""

from __future__ import annotations

import math

import numpy as np

from gpuinfer.text.sampling.cpu_values import (
    ALL,
    BLOCK,
    HIGHEST_KEY,
    LARGEST,
    LEAST_BUCKETS,
    LOWEST_KEY,
    NOTHING,
    NOTHING_KEY,
    ONE_WEIGHT,
    bar_ends,
    bound_for,
    called,
    compiled,
    cut,
    draw,
    gather,
    inlined,
    is_edited,
    key_in,
    key_of,
    mask_out,
    note,
    penalise,
    select,
    survey,
    token_in,
    value_of,
    weigh,
)

# mypy: ignore-errors


@inlined
def narrowed(work, count):
    """Work space for a row of so many tokens."""
    tops, orders, counts, masses, buckets, weights, sums = work
    blocks = (count + BLOCK - 1) // BLOCK
    return tops[:blocks], orders, counts[:LEAST_BUCKETS], masses[:LEAST_BUCKETS], buckets, weights, sums[:blocks]


@inlined
def pick(values, ids, few):
    """few[i] = values[ids[i]]"""
    for place in range(ids.shape[0]):
        few[place] = values[ids[place]]


@inlined
def edit_few(values, few, ids, slot, record, lists, edited, tops):
    """Write to `few` what the tokens of `ids` count. `edited`, of the whole vocabulary, is work space. As `edit`."""
    if not is_edited(record):
        return
    for bars in (True, False):
        for place in range(ids.shape[0]):
            edited[ids[place]] = values[ids[place]]
        penalise(edited, slot, record, lists)
        if bars and record.drawn < record.min_tokens:
            bar_ends(edited, slot, record, lists)
        pick(edited, ids, few)
        best, _ = survey(few, tops)
        if best > NOTHING_KEY:
            break


@inlined
def bar_few(edited, ids):
    for place in range(ids.shape[0]):
        edited[ids[place]] = NOTHING


# mypy: ignore-errors


MULTIPLY_0, MULTIPLY_1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL_0, WEYL_1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW_32, U32 = np.uint64(0xFFFFFFFF), np.uint64(32)
U5, U6, U26 = np.uint64(5), np.uint64(6), np.uint64(26)
ROUNDS = 10
UNIT = 1.0 / (1 << 53)


@inlined
def philox(c0, c1, c2, c3, k0, k1):
    """Four random 32-bit numbers, each in a uint64, for the counter of four such and the key of two."""
    for _ in range(ROUNDS):
        left, right = MULTIPLY_0 * c0, MULTIPLY_1 * c2
        c0, c1, c2, c3 = (right >> U32) ^ c1 ^ k0, right & LOW_32, (left >> U32) ^ c3 ^ k1, left & LOW_32
        k0, k1 = (k0 + WEYL_0) & LOW_32, (k1 + WEYL_1) & LOW_32
    return c0, c1, c2, c3


@inlined
def unit(record):
    """A float64 from 0 to under 1, for the slot's next position."""
    position, key, seed = np.uint64(record.drawn), record.key, record.seed
    a, b, _, _ = philox(position & LOW_32, record.sample & LOW_32, key & LOW_32, key >> U32, seed & LOW_32, seed >> U32)
    return np.float64(((a >> U5) << U26) | (b >> U6)) * UNIT


@compiled
def units(records, slots, out):
    """The next number of each slot."""
    for row in range(slots.shape[0]):
        out[row] = unit(records[slots[row]])


@compiled
def philox_words(words, out):
    """philox over rows: uint64 `words` [rows, 6] of counter and key, `out` [rows, 4]."""
    for row in range(words.shape[0]):
        c0, c1, c2, c3, k0, k1 = words[row]
        out[row, 0], out[row, 1], out[row, 2], out[row, 3] = philox(c0, c1, c2, c3, k0, k1)


# mypy: ignore-errors


ANYTHING, ONLY, ALL_BUT = 0, 1, 2  # kinds of rules
BROKEN, EMPTY = -1, -2  # instead of a token: the row has NaN or +inf; no token may come


@compiled
def draw_rows(lane, lanes, logits, slots, masks, rules, records, lists, edited, few, work, tokens, processed):
    """Draw for every `lanes`-th row from `lane` on, and note it. Logits are left as they are.

    logits: float32 [rows, vocabulary]; slots: int32 [rows]; masks: int32 [rows or 0, words]
    rules: see `slots.Rules`, with no kinds when no row has any; few: float32 [vocabulary], work space
    records, lists: see `slots.Slots`; edited: float32 [vocabulary]; work: (tops, *the filters'); tokens: int32 [rows]
    processed: float64 [rows], written for rows that want it
    """
    for row in range(lane, slots.shape[0], lanes):
        slot = slots[row]
        record = records[slot]
        kinds, starts, ids = rules
        kind = kinds[row] if kinds.shape[0] > 0 else ANYTHING
        ids = ids[starts[row] : starts[row + 1]] if kind != ANYTHING else ids[:0]
        if kind == ONLY:
            parts, values = narrowed(work, ids.shape[0]), few[: ids.shape[0]]
            token = draw_few(logits[row], values, ids, slot, record, lists, edited, parts)
            if token >= 0 and record.processed != 0:
                processed[row] = processed_of(values, token, record, parts)
            token = ids[token] if token >= 0 else token
        else:
            token = draw_row(logits[row], slot, masks, ids, row, record, lists, edited, work)
            if token >= 0 and record.processed != 0:
                counts = is_edited(record) or masks.shape[0] > 0 or ids.shape[0] > 0
                processed[row] = processed_of(edited if counts else logits[row], token, record, work)
        tokens[row] = token
        if token >= 0:
            note(np.int32(token), slot, record, lists)


@inlined
def draw_few(values, few, ids, slot, record, lists, edited, work):
    """The place in `ids` of one of them. Values of other tokens are not looked at, nor whether they are numbers."""
    pick(values, ids, few)
    best, least = survey(few, work[0])
    if best > LARGEST or least < NOTHING_KEY:
        return BROKEN
    edit_few(values, few, ids, slot, record, lists, edited, work[0])
    return choose(few, work[0], record, work)


@inlined
def draw_row(values, slot, masks, barred, row, record, lists, edited, work):
    tops = work[0]
    best, least = survey(values, tops)
    if best > LARGEST or least < NOTHING_KEY:
        return BROKEN
    if is_edited(record) or masks.shape[0] > 0 or barred.shape[0] > 0:
        edit(values, slot, masks, barred, row, record, lists, edited, tops)
        return choose(edited, tops, record, work)
    return choose(values, tops, record, work)


@inlined
def processed_of(values, token, record, work):
    """The log-probability of a token under the distribution that it has just been drawn from: e^(its logit over the
    temperature), of all that the filters have left. `work` is as `draw` has left it.
    """
    if record.inverse == 0:
        return 0.0
    tops, sums, best, total = work[0], work[6], LOWEST_KEY, np.int64(0)
    for block in range(tops.shape[0]):
        best = max(best, tops[block])
        total += sums[block]
    above = np.float64(values[token]) - np.float64(value_of(best))
    return above * np.float64(record.inverse) - math.log(np.float64(total) / np.float64(ONE_WEIGHT))


@inlined
def edit(values, slot, masks, barred, row, record, lists, edited, tops):
    """Write the row to `edited` as it counts. Where a constraint leaves nothing but an end, it may come early."""
    for bars in (True, False):
        for token in range(values.shape[0]):
            edited[token] = values[token]
        penalise(edited, slot, record, lists)
        if masks.shape[0] > 0:
            mask_out(edited, masks[row])
        bar_few(edited, barred)
        if bars and record.drawn < record.min_tokens:
            bar_ends(edited, slot, record, lists)
        best, _ = survey(edited, tops)
        if best > NOTHING_KEY:
            break


@called
def choose(values, tops, record, work):
    best = tops[0]
    for block in range(tops.shape[0]):
        best = max(best, tops[block])
    if best == NOTHING_KEY:
        return EMPTY
    if record.inverse == 0:
        return first_of(values, tops, best)
    parts = work[1:]
    top = value_of(best)
    threshold = cut(values, tops, top, record.inverse, record.top_k, record.top_p, record.floor, parts)
    return draw(values, tops, threshold, top, record.inverse, unit(record), parts)


@inlined
def first_of(values, tops, best):
    """The lowest token whose key is the best."""
    block = 0
    while tops[block] != best:
        block += 1
    token = block * BLOCK
    while key_of(values[token]) != best:
        token += 1
    return token


# mypy: ignore-errors


ZERO, ONE = np.float32(0.0), np.float32(1.0)


@compiled
def logprob_rows(lane, lanes, logits, rows, chosen, wanted, work, ranks, logprobs, likeliest):
    """For every `lanes`-th of `rows`, each a row of `logits`, with the token `chosen` and so many `wanted` beside it.

    ranks: int64 [rows], 0 when the row has NaN, +inf or no finite value; logprobs: float64 [rows, 1 + most wanted];
    likeliest: int32 [rows, most wanted]
    """
    for place in range(lane, rows.shape[0], lanes):
        values = logits[rows[place]]
        ranks[place] = logprob_row(values, chosen[place], wanted[place], work, logprobs[place], likeliest[place])


@inlined
def logprob_row(values, chosen, wanted, work, logprobs, likeliest):
    tops, orders, sums = work[0], work[1], work[6]
    best, least = survey(values, tops)
    if best > LARGEST or least < NOTHING_KEY or best == NOTHING_KEY:
        return 0
    top = value_of(best)
    total = weigh(values, tops, ALL, top, ONE, sums)
    whole = np.float64(top) + math.log(np.float64(total) / np.float64(ONE_WEIGHT))
    logprobs[0] = np.float64(values[chosen]) - whole
    if wanted > 0:
        count = gather(values, tops, bound_for(wanted, tops, orders), HIGHEST_KEY, orders)
        take_largest(orders, count, wanted)
        for place in range(wanted):
            likeliest[place] = token_in(orders[place])
            logprobs[1 + place] = np.float64(value_of(key_in(orders[place]))) - whole
    return rank_of(values, chosen)


@inlined
def rank_of(values, chosen):
    """1 and how many tokens come before it."""
    key, rank = key_of(values[chosen]), np.int64(1)
    for token in range(values.shape[0]):
        rank += np.int64(key_of(values[token]) > key)
    for token in range(chosen):
        rank += np.int64(key_of(values[token]) == key)
    return rank


@called
def take_largest(orders, count, wanted):
    """Bring the `wanted` largest to the front, largest first."""
    last = select(orders, count, wanted, ZERO, ZERO)
    taken = 0
    for place in range(count):
        order = orders[place]
        if order >= last:
            back = taken
            while back > 0 and orders[back - 1] < order:
                orders[back] = orders[back - 1]
                back -= 1
            orders[back] = order
            taken += 1
