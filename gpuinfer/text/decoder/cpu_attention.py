"""Attention of one lane's heads over the cache: queries share what is read, and nothing else, so that a row's result
never depends on its company.
"""

import numpy as np

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_intrinsics import poke
from gpuinfer.text.decoder.cpu_math import compiled, inlined, narrow
from gpuinfer.text.decoder.cpu_vectors import (
    SUMS,
    TILE,
    add_vectors,
    add_weighed,
    soften,
    store_scaled,
    tile_scores,
    turn_vectors,
)

QUERIES = 4  # that share what they read of the cache, at most
OF_ONE, OF_TWO, OF_FOUR = SUMS, SUMS // 2, SUMS // 4  # tiles at once, for so many queries
BLOCK = 256  # positions whose values are summed by themselves: one long sum would lose digits


@compiled
def attend_segment(
    layer, row, slot, start, length, going, place_going, goes, sees, window, sizes, eps, qkv, biases, query_scale,
    key_scale, cosines, sines, keys, values, scores, query, mix, totals, mixed,
):  # fmt: skip
    """Store the keys and values of a segment's rows, then put what those of them see that go on in `mixed`.

    Its rows begin at `row` in `qkv` and `sees`, its positions at `start`. Those that go on are the `goes` at
    `place_going` in `going`, by their numbers among all rows, and have the same places in `mixed`. A row sees its
    slot's first `sees` positions, and no more than `window` of those up to itself (0: all).
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
    queries = goes * group
    for head in range(kv_heads):
        place = base + head * slot_values
        for number in range(0, queries, QUERIES):  # by position, and by head within
            count = min(QUERIES, queries - number)
            for which in range(count):
                t = going[place_going + (number + which) // group] - row
                column = (head * group + (number + which) % group) * dim
                load_head(qkv[row + t], biases, column, query_scale, sizes, eps, query, which * padded)
                turn(query, which * padded, cosines[start + t], sines[start + t], half)
            store_scaled(query, 0, np.float32(1) / np.sqrt(np.float32(dim)), count * padded, query, 0)
            attend(
                count, row, start, going, place_going, number, group, sees, window, place, padded, keys, values, scores,
                query, mix, totals,
            )  # fmt: skip
            for which in range(count):
                t, column = (number + which) // group, (head * group + (number + which) % group) * dim
                put(mix, which * padded, dim, mixed[place_going + t], sizes[at.MIXED] + column)


@inlined
def attend(
    count, row, start, going, place_going, number, group, sees, window, place, dim, keys, values, scores, query, mix,
    totals,
):  # fmt: skip
    """mix = Σ softmax(query · key) · value for `count` queries, where the one numbered n in its segment belongs to the
    token n // `group` of those that go on; the first here has the number `number`.

    All go through the same tiles: what a query does not see scores -inf, and its weight is 0.
    """
    first = oldest_seen(start + going[place_going + number // group] - row, window) // TILE
    end = sees[going[place_going + number // group]]
    for which in range(1, count):
        end = max(end, sees[going[place_going + (number + which) // group]])
    tiles, stride = -(-end // TILE) - first, len(scores) // QUERIES
    score(count, tiles, query, keys, place + first * TILE * dim, dim, scores, stride)
    for which in range(count):
        goer = going[place_going + (number + which) // group]
        total = weigh(scores, which * stride, oldest_seen(start + goer - row, window), sees[goer], first, tiles)
        poke(totals, which, total)
    mix[: count * dim] = np.float32(0)
    for begin in range(first * TILE // BLOCK * BLOCK, end, BLOCK):  # the same blocks, whatever comes first
        seen = max(begin, first * TILE)
        rows = min(begin + BLOCK, end) - seen
        add_values(count, rows, values, place + seen * dim, dim, scores, seen - first * TILE, stride, mix)
    for which in range(count):
        store_scaled(mix, which * dim, np.float32(1) / totals[which], dim, mix, which * dim)


@inlined
def score(count, tiles, query, keys, keys_at, dim, scores, stride):
    """The scores of all queries over these tiles."""
    size = dim * TILE
    if count == 1:
        for tile in range(0, tiles, OF_ONE):
            begin = keys_at + tile * size
            tile_scores(1, OF_ONE, count, query, tiles - tile, keys, begin, dim, scores, tile * TILE, stride)
    elif count == 2:
        for tile in range(0, tiles, OF_TWO):
            begin = keys_at + tile * size
            tile_scores(2, OF_TWO, count, query, tiles - tile, keys, begin, dim, scores, tile * TILE, stride)
    else:
        for tile in range(0, tiles, OF_FOUR):
            begin = keys_at + tile * size
            tile_scores(4, OF_FOUR, count, query, tiles - tile, keys, begin, dim, scores, tile * TILE, stride)


@inlined
def add_values(count, rows, values, values_at, dim, weights, weights_at, stride, mix):
    """Add the values of so many positions, each times its weight, to the mix of all queries."""
    tiles = dim // TILE
    if count == 1:
        for tile in range(0, tiles, OF_ONE):
            begin, into = values_at + tile * TILE, mix[tile * TILE :]
            add_weighed(1, OF_ONE, count, weights, weights_at, stride, rows, tiles - tile, values, begin, dim, into)
    elif count == 2:
        for tile in range(0, tiles, OF_TWO):
            begin, into = values_at + tile * TILE, mix[tile * TILE :]
            add_weighed(2, OF_TWO, count, weights, weights_at, stride, rows, tiles - tile, values, begin, dim, into)
    else:
        for tile in range(0, tiles, OF_FOUR):
            begin, into = values_at + tile * TILE, mix[tile * TILE :]
            add_weighed(4, OF_FOUR, count, weights, weights_at, stride, rows, tiles - tile, values, begin, dim, into)


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
