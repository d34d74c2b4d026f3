# mypy: ignore-errors
"""Log-probabilities of one token of each row, and of the row's likeliest."""

import math

import numpy as np

from gpuinfer.models.text.sampling.cpu_selection import bound_for, gather, select
from gpuinfer.models.text.sampling.cpu_values import (
    ALL,
    HIGHEST_KEY,
    LARGEST,
    NOTHING_KEY,
    ONE_WEIGHT,
    compiled,
    inlined,
    key_in,
    key_of,
    survey,
    token_in,
    value_of,
    weigh,
)

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


@compiled
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
