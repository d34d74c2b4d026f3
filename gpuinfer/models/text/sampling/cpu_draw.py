# mypy: ignore-errors
"""One token for each row of logits: the compiled way from end to end."""

import numpy as np

from gpuinfer.models.text.sampling.cpu_edits import bar_ends, is_edited, mask_out, note, penalise
from gpuinfer.models.text.sampling.cpu_filters import cut, draw
from gpuinfer.models.text.sampling.cpu_random import unit
from gpuinfer.models.text.sampling.cpu_values import (
    BLOCK,
    LARGEST,
    NOTHING_KEY,
    compiled,
    inlined,
    key_of,
    survey,
    value_of,
)

BROKEN, EMPTY = -1, -2  # instead of a token: the row has NaN or +inf; no token may come


@compiled
def draw_rows(lane, lanes, logits, slots, masks, records, lists, edited, work, tokens):
    """Draw for every `lanes`-th row from `lane` on, and note it. Logits are left as they are.

    logits: float32 [rows, vocabulary]; slots: int32 [rows]; masks: int32 [rows or 0, words]
    records, lists: see `slots.Slots`; edited: float32 [vocabulary]; work: (tops, *the filters'); tokens: int32 [rows]
    """
    for row in range(lane, slots.shape[0], lanes):
        slot = slots[row]
        record = records[slot]
        token = draw_row(logits[row], slot, masks, row, record, lists, edited, work)
        tokens[row] = token
        if token >= 0:
            note(np.int32(token), slot, record, lists)


@inlined
def draw_row(values, slot, masks, row, record, lists, edited, work):
    tops = work[0]
    best, least = survey(values, tops)
    if best > LARGEST or least < NOTHING_KEY:
        return BROKEN
    if is_edited(record) or masks.shape[0] > 0:
        edit(values, slot, masks, row, record, lists, edited, tops)
        return choose(edited, tops, record, work)
    return choose(values, tops, record, work)


@inlined
def edit(values, slot, masks, row, record, lists, edited, tops):
    """Write the row to `edited` as it counts. Where a constraint leaves nothing but an end, it may come early."""
    for bars in (True, False):
        for token in range(values.shape[0]):
            edited[token] = values[token]
        penalise(edited, slot, record, lists)
        if masks.shape[0] > 0:
            mask_out(edited, masks[row])
        if bars and record.drawn < record.min_tokens:
            bar_ends(edited, slot, record, lists)
        best, _ = survey(edited, tops)
        if best > NOTHING_KEY:
            break


@compiled
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
