"""Compiled scores of masks: what each would become and how sure the model is of it; and the expected embeddings of
masks. Each position is computed by itself.

A row of logits is read twice: for its best and worst value, then for the sum of e^(value - best). The second time it
lies in the processor's cache, even of a vocabulary of 150,000.

The sum leaves out the best token, whose summand is 1. A confidence near 1 is then 1 minus a small number, which float32
holds exactly enough: each block of 64 is added up in pairs, in an order that no processor changes, and blocks in
float64.
"""

from __future__ import annotations

import math

import numpy as np

from gpuinfer.text.decoder.cpu_math import exp, widen
from gpuinfer.text.sampling.cpu_draw import BROKEN, EMPTY, LOW_32, U5, U6, U26, U32, UNIT, first_of, philox
from gpuinfer.text.sampling.cpu_values import (
    BLOCK,
    LARGEST,
    NOTHING,
    NOTHING_KEY,
    compiled,
    cut,
    draw,
    inlined,
    survey,
    value_of,
)

# mypy: ignore-errors


ZERO, FARTHEST = np.float32(0.0), np.float32(87.0)  # as `exp` has it: beyond, a summand counts as nothing
LANES = np.int64(BLOCK)


@compiled
def score_rows(lane, lanes, logits, flat, mask, work, edited, tokens, confidence, margin, entropy):
    """Of every `lanes`-th of `logits` float32 [n, vocabulary] from `lane` on that somebody owns.

    flat: the fields of `torch_scores.FlatRequests`; mask: the mask token, whose logit becomes -inf, or -1; edited:
    float32 [vocabulary]; work: `compiled_path.scratch`, two blocks of float32. tokens: int32 [n], BROKEN and EMPTY as
    in `cpu_draw`; confidence: float64 [n]; margin, entropy: the same, or [0] where nobody needs it.
    """
    owners, positions, rows, bias_ids, bias_values, stops = flat
    for place in range(lane, logits.shape[0], lanes):
        if owners[place] < 0:
            continue
        values, owner, position = logits[place], owners[place], positions[place]
        if mask >= 0:
            values[mask] = NOTHING
        record, after = rows[owner], rows[owner + 1]
        tops = work[0]
        best, least = survey(values, tops)
        if best > LARGEST or least < NOTHING_KEY:
            tokens[place] = BROKEN
            continue
        barred = after.stops if position < record.min_tokens else record.stops
        if after.biases > record.biases or barred > record.stops:
            for token in range(values.shape[0]):
                edited[token] = values[token]
            for entry in range(record.biases, after.biases):
                edited[bias_ids[entry]] += bias_values[entry]
            for entry in range(record.stops, barred):
                edited[stops[entry]] = NOTHING
            values = edited
            best, least = survey(values, tops)
        if best == NOTHING_KEY:
            tokens[place] = EMPTY
            continue
        score_row(values, tops, best, place, position, record, work, tokens, confidence, margin, entropy)


@inlined
def score_row(values, tops, best, place, position, record, work, tokens, confidence, margin, entropy):
    top, likeliest = value_of(best), first_of(values, tops, best)
    filters, weights, surprises = work[1:7], work[7], work[8]
    rest, surprise = others(values, top, likeliest, weights, surprises, entropy.shape[0] > 0)
    total = 1.0 + rest
    token = likeliest
    if record.inverse != 0:
        threshold = cut(values, tops, top, record.inverse, record.top_k, record.top_p, record.floor, filters)
        token = draw(values, tops, threshold, top, record.inverse, unit(position, record), filters)
    tokens[place] = token
    confidence[place] = math.exp(np.float64(values[token]) - np.float64(top)) / total
    if margin.shape[0] > 0:
        second = runner_up(values, tops, likeliest)
        margin[place] = (1.0 - math.exp(np.float64(second) - np.float64(top))) / total
    if entropy.shape[0] > 0:
        entropy[place] = math.log(total) + surprise / total


@inlined
def others(values, top, likeliest, weights, surprises, wanted):
    """Σ w and, if wanted, Σ w (top - value), of all tokens but the likeliest, with w = e^(value - top)."""
    total, surprise = 0.0, 0.0
    for block in range((values.shape[0] + BLOCK - 1) // BLOCK):
        part = values[block * BLOCK : (block + 1) * BLOCK]
        for lane in range(part.shape[0]):
            weights[lane] = exp(part[lane] - top)
        for lane in range(part.shape[0], BLOCK):
            weights[lane] = ZERO
        if likeliest // BLOCK == block:
            weights[likeliest - block * BLOCK] = ZERO
        if wanted:
            for lane in range(part.shape[0]):
                surprises[lane] = weights[lane] * min(top - part[lane], FARTHEST)
            for lane in range(part.shape[0], BLOCK):
                surprises[lane] = ZERO
            surprise += np.float64(added(surprises))
        total += np.float64(added(weights))
    return total, surprise


@inlined
def added(block):
    """The sum of BLOCK numbers, by pairs; they are overwritten."""
    for lane in range(32):
        block[lane] += block[lane + 32]
    for lane in range(16):
        block[lane] += block[lane + 16]
    for lane in range(8):
        block[lane] += block[lane + 8]
    for lane in range(4):
        block[lane] += block[lane + 4]
    return (block[0] + block[2]) + (block[1] + block[3])


@inlined
def runner_up(values, tops, likeliest):
    """The best value of all tokens but the likeliest."""
    own, second = likeliest // BLOCK, NOTHING
    for block in range(tops.shape[0]):
        if block != own:
            second = max(second, value_of(tops[block]))
    for token in range(own * BLOCK, min((own + 1) * BLOCK, values.shape[0])):
        if token != likeliest:
            second = max(second, values[token])
    return second


@inlined
def unit(position, record):
    """As `torch_scores.units` with TOKENS."""
    key, seed = record.key, record.seed
    a, b, _, _ = philox(np.uint64(position), np.uint64(0), key & LOW_32, key >> U32, seed & LOW_32, seed >> U32)
    return np.float64(((a >> U5) << U26) | (b >> U6)) * UNIT


def likeliest(logits):
    """Of logits float32 [n, vocabulary] each row's likeliest token, int32 [n], and its probability, float64 [n]."""
    count, vocabulary = logits.shape
    tokens, chances = np.zeros(count, np.int32), np.zeros(count)
    tops = np.zeros(-(-vocabulary // BLOCK), np.int32)
    weights = np.zeros(BLOCK, np.float32)
    likeliest_rows(np.require(logits, np.float32, ["C", "W"]), tops, weights, tokens, chances)
    return tokens, chances


@compiled
def likeliest_rows(logits, tops, weights, tokens, chances):
    for row in range(logits.shape[0]):
        best, _ = survey(logits[row], tops)
        token = first_of(logits[row], tops, best)
        rest, _ = others(logits[row], value_of(best), token, weights, weights, False)
        tokens[row], chances[row] = token, 1.0 / (1.0 + rest)


# mypy: ignore-errors


@compiled
def expect(lane, lanes, logits, places, embedding, tops, totals, weights, out):
    """out[i] = Σ softmax(logits[places[i]]) × embedding, of this lane's columns.

    logits: float32 [all, vocabulary]; places: int64 [n]; embedding: [vocabulary, hidden], float32, or bfloat16 as
    uint16; out: float32 [n, hidden]. The lane's own: tops float32 [n], totals float64 [n], weights float32 [n, BLOCK].
    Tokens are added up one after another, so that a mask's sum depends neither on the others nor on the lanes.
    """
    count, vocabulary, hidden = len(places), logits.shape[1], out.shape[1]
    begin, end = lane * hidden // lanes, (lane + 1) * hidden // lanes
    for i in range(count):
        tops[i] = -np.inf
        for token in range(vocabulary):
            tops[i] = max(tops[i], logits[places[i], token])
        totals[i] = 0.0
        for column in range(begin, end):
            out[i, column] = 0.0
    for first in range(0, vocabulary, BLOCK):
        size = min(BLOCK, vocabulary - first)
        for i in range(count):
            part, own = logits[places[i], first : first + size], weights[i]
            for j in range(size):
                own[j] = exp(part[j] - tops[i])
            for j in range(size):
                totals[i] += np.float64(own[j])
        for j in range(size):
            vector = embedding[first + j, begin:end]
            for i in range(count):
                weight, sums = weights[i, j], out[i, begin:end]
                for column in range(end - begin):
                    sums[column] += weight * widen(vector[column])
    for i in range(count):
        scale = np.float32(1.0 / totals[i])
        for column in range(begin, end):
            out[i, column] *= scale
