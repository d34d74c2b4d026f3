"""Rows of which a few tokens alone may come: only these are looked at, in a row of their own.

All that a draw goes by is the order of the tokens, their values, and sums of whole numbers: without the tokens that may
not come, which weigh nothing, it is the same draw, to the bit.
"""

from __future__ import annotations

from gpuinfer.text.sampling.cpu_filters import LEAST_BUCKETS
from gpuinfer.text.sampling.cpu_values import (
    BLOCK,
    NOTHING,
    NOTHING_KEY,
    bar_ends,
    inlined,
    is_edited,
    penalise,
    survey,
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
