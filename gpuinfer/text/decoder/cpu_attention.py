"""Attention of one lane's heads over the cache: queries share what is read, and nothing else, so that a row's result
never depends on its company.
"""

import numpy as np

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_intrinsics import poke
from gpuinfer.text.decoder.cpu_math import called, inlined, narrow
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
BLOCK = 64  # positions whose values are summed by themselves: so that any of these may come from another slot's memory
GOER, POSITION, SEES, PLACE, COLUMN, ASKED = range(6)  # of a query: see `ask`


@called
def attend_step(
    layer, turns, slots, starts, lengths, going, few, sees, window, sizes, eps, qkv, biases, query_scale, key_scale,
    cosines, sines, keys, values, scores, query, mix, totals, asks, mixed,
):  # fmt: skip
    """Store the keys and values of a step's rows, then put what those of them see that go on in `mixed`.

    Segments are gone through in the order of `turns` (`cpu_sharing.Turns`). Rows that go on are those in `going`,
    ascending, by their numbers among all rows, and have the same places in `mixed`; without `few` they are all rows. A
    row sees its slot's first `sees` positions, and no more than `window` of those up to itself (0: all).
    """
    heads, kv_heads, dim = sizes[at.HEADS], sizes[at.KV_HEADS], sizes[at.HEAD_DIM]
    padded, half, segments = sizes[at.PADDED_DIM], sizes[at.HALF_ROPE], sizes[at.SEGMENTS]
    slot_values = sizes[at.TILES] * TILE * padded
    base, per_slot = layer * sizes[at.SLOTS] * kv_heads * slot_values, kv_heads * slot_values
    for i in range(segments):
        segment, row = turns[i, 0], turns[i, 1]
        place = base + slots[segment] * per_slot
        for t in range(lengths[segment]):
            store(
                place, starts[segment] + t, qkv[row + t], sizes, eps, biases, key_scale, cosines, sines, keys, values,
                query,
            )  # fmt: skip
    group = heads // kv_heads
    together = 1 if window else max(1, QUERIES // group)
    done = 0
    while done < segments:
        sharers = alike(turns, done, min(together, segments - done), going, few, sizes)
        shared, first = turns[done, 3] * (window == 0), place_of(turns[done, 1], going, few, sizes)
        behind = place_of(turns[done, 1] + lengths[turns[done, 0]], going, few, sizes)
        queries = group * (behind - first if sharers == 1 else sharers)
        for head in range(kv_heads):
            common = base + turns[done, 2] * per_slot + head * slot_values
            for number in range(0, queries, QUERIES):  # by row, and by head within
                count = min(QUERIES, queries - number)
                for which in range(count):
                    t, own_head = (number + which) // group, head * group + (number + which) % group
                    given = done if sharers == 1 else done + t
                    segment = turns[given, 0]
                    goer = first + t if sharers == 1 else place_of(turns[given, 1], going, few, sizes)
                    row = going[goer]
                    position = starts[segment] + row - turns[given, 1]
                    place = base + slots[segment] * per_slot + head * slot_values
                    ask(asks, which, goer, position, sees[row], place, sizes[at.MIXED] + own_head * dim)
                    load_head(qkv[row], biases, own_head * dim, query_scale, sizes, eps, query, which * padded)
                    turn(query, which * padded, cosines[position], sines[position], half)
                store_scaled(query, 0, np.float32(1) / np.sqrt(np.float32(dim)), count * padded, query, 0)
                attend(
                    count, count if sharers == 1 else group, asks, common, shared, window, padded, keys, values,
                    scores, query, mix, totals,
                )  # fmt: skip
                for which in range(count):
                    put(mix, which * padded, dim, mixed[asks[which, GOER]], asks[which, COLUMN])
        done += sharers


@inlined
def place_of(row, going, few, sizes):
    """How many rows before this one go on."""
    if not few:
        return row
    low, high = 0, sizes[at.OUTPUTS]
    while low < high:
        middle = (low + high) // 2
        if going[middle] < row:
            low = middle + 1
        else:
            high = middle
    return low


@inlined
def ask(asks, which, goer, position, sees, place, column):
    """What this query is: its row's place among those that go on, its position, how many it sees, where its slot has
    its head's, and where its mix goes.
    """
    asks[which, GOER], asks[which, POSITION], asks[which, SEES] = goer, position, sees
    asks[which, PLACE], asks[which, COLUMN] = place, column


@inlined
def alike(turns, begin, most, going, few, sizes):
    """How many segments from this one on, `most` at most, share what the first of them does: one token each, that goes
    on.
    """
    count = 0
    while turns[begin, 3] and count < most:
        given = begin + count
        if turns[given, 2] != turns[begin, 2] or not turns[given, 3]:
            break
        place = place_of(turns[given, 1], going, few, sizes)
        if few and (place == sizes[at.OUTPUTS] or going[place] != turns[given, 1]):
            break
        count += 1
    return max(1, count)


@inlined
def store(place, position, row, sizes, eps, biases, scale, cosines, sines, keys, values, room):
    """Put a row's keys and values where its slot has them; its heads begin at `place`."""
    heads, kv_heads, dim, padded = sizes[at.HEADS], sizes[at.KV_HEADS], sizes[at.HEAD_DIM], sizes[at.PADDED_DIM]
    for head in range(kv_heads):
        load_head(row, biases, (heads + head) * dim, scale, sizes, eps, room, 0)
        turn(room, 0, cosines[position], sines[position], sizes[at.HALF_ROPE])
        tile = place + position // TILE * padded * TILE + position % TILE
        for d in range(dim):
            poke(keys, tile + d * TILE, narrow(room[d], keys))
        take(row, biases, (heads + kv_heads + head) * dim, dim, room, 0)
        store_scaled(room, 0, np.float32(1), padded, values, place + position * padded)
        place += sizes[at.TILES] * TILE * padded


@inlined
def attend(count, run, asks, common, shared, window, dim, keys, values, scores, query, mix, totals):
    """mix = Σ softmax(query · key) · value for `count` queries, each `run` of which have one slot.

    Their first `shared` positions, whole blocks, are read from `common` for all of them, the others from their slots'
    own memory. All of a run go through the same tiles: what a query does not see scores -inf, and its weight is 0.
    """
    first, stride = oldest_seen(asks[0, POSITION], window) // TILE, len(scores) // QUERIES
    if shared:
        score(count, shared // TILE, query, keys, common, dim, scores, stride)
    for begin in range(0, count, run):
        after, last = max(first, shared // TILE), -(-last_seen(asks, begin, run) // TILE)
        into = scores[begin * stride + (after - first) * TILE :]
        score(run, last - after, query[begin * dim :], keys, asks[begin, PLACE] + after * TILE * dim, dim, into, stride)
        for which in range(begin, begin + run):
            oldest = oldest_seen(asks[which, POSITION], window)
            totals[which] = weigh(scores, which * stride, oldest, asks[which, SEES], first, last - first)
    mix[: count * dim] = np.float32(0)
    for begin in range(0, shared, BLOCK):
        add_values(count, BLOCK, values, common + begin * dim, dim, scores[begin:], stride, mix)
    for begin in range(0, count, run):
        end = last_seen(asks, begin, run)
        for block in range(max(shared, first * TILE // BLOCK * BLOCK), end, BLOCK):  # the same, whatever comes first
            seen = max(block, first * TILE)
            place = asks[begin, PLACE] + seen * dim
            weights = scores[begin * stride + seen - first * TILE :]
            add_values(run, min(block + BLOCK, end) - seen, values, place, dim, weights, stride, mix[begin * dim :])
    for which in range(count):
        store_scaled(mix, which * dim, np.float32(1) / totals[which], dim, mix, which * dim)


@inlined
def last_seen(asks, begin, count):
    """How many positions these queries see at most."""
    end = asks[begin, SEES]
    for which in range(begin + 1, begin + count):
        end = max(end, asks[which, SEES])
    return end


@inlined
def score(count, tiles, query, keys, keys_at, dim, scores, stride):
    """The scores of all queries over these tiles."""
    size = dim * TILE
    if count == 1:
        for tile in range(0, tiles, OF_ONE):
            begin, into = keys_at + tile * size, scores[tile * TILE :]
            tile_scores(1, OF_ONE, count, query, tiles - tile, keys, begin, dim, into, stride)
    elif count == 2:
        for tile in range(0, tiles, OF_TWO):
            begin, into = keys_at + tile * size, scores[tile * TILE :]
            tile_scores(2, OF_TWO, count, query, tiles - tile, keys, begin, dim, into, stride)
    else:
        for tile in range(0, tiles, OF_FOUR):
            begin, into = keys_at + tile * size, scores[tile * TILE :]
            tile_scores(4, OF_FOUR, count, query, tiles - tile, keys, begin, dim, into, stride)


@inlined
def add_values(count, rows, values, values_at, dim, weights, stride, mix):
    """Add the values of so many positions, each times its weight, to the mix of all queries."""
    tiles = dim // TILE
    if count == 1:
        for tile in range(0, tiles, OF_ONE):
            begin, into = values_at + tile * TILE, mix[tile * TILE :]
            add_weighed(1, OF_ONE, count, weights, stride, rows, tiles - tile, values, begin, dim, into)
    elif count == 2:
        for tile in range(0, tiles, OF_TWO):
            begin, into = values_at + tile * TILE, mix[tile * TILE :]
            add_weighed(2, OF_TWO, count, weights, stride, rows, tiles - tile, values, begin, dim, into)
    else:
        for tile in range(0, tiles, OF_FOUR):
            begin, into = values_at + tile * TILE, mix[tile * TILE :]
            add_weighed(4, OF_FOUR, count, weights, stride, rows, tiles - tile, values, begin, dim, into)


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
