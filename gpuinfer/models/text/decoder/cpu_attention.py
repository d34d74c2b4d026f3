"""Attention of one lane's heads over the cache, one query at a time: a row's result never depends on its company."""

import numpy as np

from gpuinfer.models.text.decoder import cpu_sizes as at
from gpuinfer.models.text.decoder.cpu_intrinsics import poke
from gpuinfer.models.text.decoder.cpu_math import compiled, inlined, narrow
from gpuinfer.models.text.decoder.cpu_vectors import (
    TILE,
    add_vectors,
    soften,
    store_scaled,
    tile_scores,
    turn_vectors,
    weighed_sum,
)


@compiled
def attend_segment(
    layer, row, slot, start, length, window, sizes, eps, qkv, biases, query_scale, key_scale, cosines, sines,
    keys, values, scores, query, mix, mixed,
):  # fmt: skip
    """Store the keys and values of a segment's rows, then put what each row sees in `mixed`.

    Its rows begin at `row` in `qkv`, its positions at `start`. A row sees what is not later than itself, and no more
    than `window` positions, itself included (0: all).
    """
    heads, kv_heads, dim = sizes[at.HEADS], sizes[at.KV_HEADS], sizes[at.HEAD_DIM]
    padded, tiles, half = sizes[at.PADDED_DIM], sizes[at.TILES], sizes[at.HALF_ROPE]
    slot_values = tiles * TILE * padded
    base = (layer * sizes[at.SLOTS] + slot) * kv_heads * slot_values
    for t in range(length):
        position = start + t
        given = qkv[row + t]
        for head in range(kv_heads):
            place = base + head * slot_values
            load_head(given, biases, (heads + head) * dim, key_scale, sizes, eps, query)
            turn(query, cosines[position], sines[position], half)
            tile = place + position // TILE * padded * TILE + position % TILE
            for d in range(dim):
                poke(keys, tile + d * TILE, narrow(query[d], keys))
            take(given, biases, (heads + kv_heads + head) * dim, dim, query)
            store_scaled(query, np.float32(1), padded, values, place + position * padded)
    group = heads // kv_heads
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for t in range(length):
        position = start + t
        oldest = max(0, position - window + 1) if window else 0
        given = qkv[row + t]
        for head in range(heads):
            load_head(given, biases, head * dim, query_scale, sizes, eps, query)
            turn(query, cosines[position], sines[position], half)
            place = base + head // group * slot_values
            total = attend(place, oldest, position, padded, scale, keys, values, scores, query, mix)
            share = np.float32(1) / total
            if dim == padded:
                store_scaled(mix, share, dim, mixed[row + t], head * dim)
            else:
                for d in range(dim):
                    mixed[row + t, head * dim + d] = narrow(mix[d] * share, mixed)


@inlined
def attend(place, oldest, position, dim, scale, keys, values, scores, query, mix):
    """mix = Σ weight · value over the positions from `oldest` to `position`; returns the sum of the weights.

    Scores outside are -inf, so that whole tiles are gone through: their weights are 0.
    """
    first, last = oldest // TILE, position // TILE
    store_scaled(query, scale, dim, query, 0)
    for tile in range(first, last + 1):
        tile_scores(query, 0, keys, place + tile * dim * TILE, dim, scores, (tile - first) * TILE)
    for j in range(oldest - first * TILE):
        poke(scores, j, np.float32(-np.inf))
    count = position + 1 - first * TILE
    for j in range(count, (last + 1 - first) * TILE):
        poke(scores, j, np.float32(-np.inf))
    total = soften(scores, last + 1 - first)
    for column in range(0, dim, TILE):
        weighed_sum(scores, count, values, place + first * TILE * dim + column, dim, mix, column)
    return total


@inlined
def load_head(row, biases, column, scale, sizes, eps, out):
    """One head's values with their bias; with q/k norms through an RMSNorm."""
    dim = sizes[at.HEAD_DIM]
    take(row, biases, column, dim, out)
    if sizes[at.QK_NORM]:
        squares = np.float32(0)
        for d in range(dim):
            squares += out[d] * out[d]
        factor = np.float32(1) / np.sqrt(squares / np.float32(dim) + np.float32(eps))
        for d in range(dim):
            out[d] *= factor * scale[d]


@inlined
def take(row, biases, column, dim, out):
    """out = row + biases, from `column` on."""
    if dim % TILE == 0:
        add_vectors(row, column, biases, column, dim, out)
    else:
        for d in range(dim):
            out[d] = row[column + d] + biases[column + d]


@inlined
def turn(head, cosines, sines, half):
    """Rotate value i with value i + half (Su et al. 2021)."""
    if half % TILE == 0:
        turn_vectors(head, cosines, sines, half)
        return
    for i in range(half):
        a, b = head[i], head[i + half]
        head[i] = a * cosines[i] - b * sines[i]
        head[i + half] = b * cosines[i] + a * sines[i]
