"""Attention of one lane's heads over the cache, one query at a time: a row's result never depends on its company."""

import numpy as np

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_intrinsics import poke
from gpuinfer.text.decoder.cpu_math import compiled, inlined, narrow
from gpuinfer.text.decoder.cpu_vectors import (
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
    layer, row, slot, start, length, sees, window, sizes, eps, qkv, biases, query_scale, key_scale, cosines, sines,
    keys, values, scores, query, mix, mixed,
):  # fmt: skip
    """Store the keys and values of a segment's rows, then put what each row sees in `mixed`.

    Its rows begin at `row` in `qkv` and `sees`, its positions at `start`. A row sees its slot's first `sees` positions,
    and no more than `window` of those up to itself (0: all).
    """
    heads, kv_heads, dim = sizes[at.HEADS], sizes[at.KV_HEADS], sizes[at.HEAD_DIM]
    padded, half = sizes[at.PADDED_DIM], sizes[at.HALF_ROPE]
    slot_values = sizes[at.TILES] * TILE * padded
    base = (layer * sizes[at.SLOTS] + slot) * kv_heads * slot_values
    for t in range(length):
        position = start + t
        given = qkv[row + t]
        for head in range(kv_heads):
            place = base + head * slot_values
            load_head(given, biases, (heads + head) * dim, key_scale, sizes, eps, query, 0)
            turn(query, 0, cosines[position], sines[position], half)
            tile = place + position // TILE * padded * TILE + position % TILE
            for d in range(dim):
                poke(keys, tile + d * TILE, narrow(query[d], keys))
            take(given, biases, (heads + kv_heads + head) * dim, dim, query, 0)
            store_scaled(query, 0, np.float32(1), padded, values, place + position * padded)
    group = heads // kv_heads
    queries = length * group
    for head in range(kv_heads):
        place = base + head * slot_values
        for number in range(0, queries, 2):  # by position, and by head within: two share what they read of the cache
            count = min(2, queries - number)
            for which in range(count):
                t, column = (number + which) // group, (head * group + (number + which) % group) * dim
                load_head(qkv[row + t], biases, column, query_scale, sizes, eps, query, which * padded)
                turn(query, which * padded, cosines[start + t], sines[start + t], half)
            near, far = number // group, (number + count - 1) // group
            attend(
                count, start + near, start + far, sees[row + near], sees[row + far], window, place, padded, sizes,
                keys, values, scores, query, mix,
            )  # fmt: skip
            for which in range(count):
                t, column = (number + which) // group, (head * group + (number + which) % group) * dim
                put(mix, which * padded, dim, mixed[row + t], sizes[at.MIXED] + column)


@inlined
def attend(
    count, near, far, near_sees, far_sees, window, place, dim, sizes, keys, values, scores, query, mix
):  # fmt: skip
    """mix = Σ softmax(query · key) · value for one query at position `near`, or for a second one at `far` as well.

    What a query does not see scores -inf, so that whole tiles are gone through: its weight is 0.
    """
    first = oldest_seen(near, window) // TILE
    end = max(near_sees, far_sees)
    tiles, seen = -(-end // TILE) - first, end - first * TILE
    store_scaled(query, 0, np.float32(1) / np.sqrt(np.float32(sizes[at.HEAD_DIM])), count * dim, query, 0)
    for tile in range(tiles):
        keys_at = place + (first + tile) * dim * TILE
        if count == 2:
            tile_scores(2, query, keys, keys_at, dim, scores, tile * TILE)
        else:
            tile_scores(1, query, keys, keys_at, dim, scores, tile * TILE)
    values_at = place + first * TILE * dim
    totals = weigh(scores, 0, oldest_seen(near, window), near_sees, first, tiles), np.float32(1)
    if count == 2:
        totals = totals[0], weigh(scores, len(scores) // 2, oldest_seen(far, window), far_sees, first, tiles)
        for column in range(0, dim, TILE):
            weighed_sum(2, scores, seen, values, values_at + column, dim, mix, column)
        store_scaled(mix, dim, np.float32(1) / totals[1], dim, mix, dim)
    else:
        for column in range(0, dim, TILE):
            weighed_sum(1, scores, seen, values, values_at + column, dim, mix, column)
    store_scaled(mix, 0, np.float32(1) / totals[0], dim, mix, 0)


@inlined
def oldest_seen(position, window):
    return max(0, position - window + 1) if window else 0


@inlined
def weigh(scores, begin, oldest, end, first, tiles):
    """The scores from `begin` on as weights of what a query sees, from `oldest` to before `end`; their sum."""
    for j in range(oldest - first * TILE):
        poke(scores, begin + j, np.float32(-np.inf))
    for j in range(end - first * TILE, tiles * TILE):
        poke(scores, begin + j, np.float32(-np.inf))
    return soften(scores, begin, tiles)


@inlined
def put(mix, begin, dim, out, column):
    """out[column:] = mix[begin : begin + dim], as it is stored there."""
    if dim % TILE == 0:
        store_scaled(mix, begin, np.float32(1), dim, out, column)
    else:
        for d in range(dim):
            out[column + d] = narrow(mix[begin + d], out)


@inlined
def load_head(row, biases, column, scale, sizes, eps, out, begin):
    """One head's values with their bias, from `begin` on; with q/k norms through an RMSNorm."""
    dim = sizes[at.HEAD_DIM]
    take(row, biases, column, dim, out, begin)
    if sizes[at.QK_NORM]:
        squares = np.float32(0)
        for d in range(dim):
            squares += out[begin + d] * out[begin + d]
        factor = np.float32(1) / np.sqrt(squares / np.float32(dim) + np.float32(eps))
        for d in range(dim):
            out[begin + d] *= factor * scale[d]


@inlined
def take(row, biases, column, dim, out, begin):
    """out[begin:] = row + biases, from `column` on."""
    if dim % TILE == 0:
        add_vectors(row, column, biases, column, dim, out, begin)
    else:
        for d in range(dim):
            out[begin + d] = row[column + d] + biases[column + d]


@inlined
def turn(head, begin, cosines, sines, half):
    """Rotate value i with value i + half (Su et al. 2021)."""
    if half % TILE == 0:
        turn_vectors(head, begin, cosines, sines, half)
        return
    for i in range(begin, begin + half):
        a, b = head[i], head[i + half]
        head[i] = a * cosines[i - begin] - b * sines[i - begin]
        head[i + half] = b * cosines[i - begin] + a * sines[i - begin]
