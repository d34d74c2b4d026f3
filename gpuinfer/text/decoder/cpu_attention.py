"""Attention over pages of keys and values, a span of positions after another.

Of each span of SPAN positions, which lie at multiples of it, a query has a part of its own: the highest score, the sum
of the weights, and the weighed values. Parts are joined in the order of their spans by their highest scores (Milakov
and Gimelshein 2018; Dao et al. 2022, "FlashAttention"). So the sums of a query are the same ones whether its span is
computed for it alone or together with all rows that share these pages, and whichever thread has it (Juravsky et al.
2024, "Hydragen"; Ye et al. 2024, cascade inference).

A page has for each head its keys as a product's panels, 32 columns of the head's width, and its values as panels of 32
terms: scores, and weights times values, are products as any other (`cpu_product`).
"""

import numpy as np

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_math import (
    TILE,
    add_vectors,
    call_product,
    called,
    exp,
    inlined,
    narrow,
    poke,
    soften,
    store_at,
    store_scaled,
    tanh,
    turn_vectors,
)
from gpuinfer.text.transformer import PAGE

PAGES = 4  # of a span
SPAN = PAGES * PAGE
QUERIES = 64  # that go through a span together, at most
NEVER = np.float32(-np.inf)


@called
def store_row(
    pages, position, clears, layer, sizes, addresses, eps, qkv, biases, query_scale, key_scale, cosines, sines, queries,
    room, like,
):  # fmt: skip
    """Put a row's keys and values in its page, one of `pages`, and its queries, turned and scaled, in `queries`
    [heads × padded].

    `qkv` are the row's values, `room` [padded] is scratch; `like` has the type of what the cache holds. Unless `clears`
    is negative, values in the page from there on become 0: weights of 0 are multiplied with them, and what an earlier
    row has left might be no number.
    """
    heads, kv_heads, dim = sizes[at.HEADS], sizes[at.KV_HEADS], sizes[at.HEAD_DIM]
    padded, half = sizes[at.PADDED_DIM], sizes[at.HALF_ROPE]
    page = addresses[at.POOL] + pages[position // PAGE] * sizes[at.PAGE_BYTES] + layer * sizes[at.LAYER_BYTES]
    scale = np.float32(1) / np.sqrt(np.float32(dim))
    for head in range(heads):
        load_head(qkv, biases, head * dim, query_scale, sizes, eps, room)
        turn(room, cosines[position], sines[position], half)
        store_scaled(room, 0, scale, padded, queries, head * padded)
    for head in range(kv_heads):
        keys = page + head * sizes[at.HEAD_BYTES]
        values = keys + sizes[at.KEY_BYTES]
        load_head(qkv, biases, (heads + head) * dim, key_scale, sizes, eps, room)
        turn(room, cosines[position], sines[position], half)
        store_key(room, position % PAGE, keys, sizes, like)
        take(qkv, biases, (heads + kv_heads + head) * dim, dim, room)
        store_value(room, position % PAGE, values, sizes, like)
        if clears >= 0:
            for d in range(padded):
                room[d] = np.float32(0)
            for place in range(clears, PAGE):
                store_value(room, place, values, sizes, like)


@inlined
def store_key(room, place, address, sizes, like):
    pair, size = sizes[at.PAIR], sizes[at.STORED]
    address += place // TILE * (sizes[at.KEY_BYTES] * TILE // PAGE) + place % TILE * pair * size
    for d in range(sizes[at.PADDED_DIM]):
        store_at(address + (d // pair * TILE * pair + d % pair) * size, narrow(room[d], like))


@inlined
def store_value(room, place, address, sizes, like):
    pair, size = sizes[at.PAIR], sizes[at.STORED]
    address += (place // pair * TILE * pair + place % pair) * size
    for d in range(sizes[at.PADDED_DIM]):
        store_at(address + (d // TILE * PAGE * TILE + d % TILE * pair) * size, narrow(room[d], like))


@called
def attend(
    piece, head, layer, window, cap, members, going, positions, sees, pages, sizes, addresses, queries, state, peaks,
    gathered, scores, weights, tops, part, more, mixed,
):  # fmt: skip
    """Take the piece's members, rows that go on, through its spans for one head of keys; `piece` is one of
    `cpu_plan.AttentionPlan`. `mixed` [going, heads × head_dim] has the result after the last piece. Unless it is 0,
    `cap` bounds the scores.

    `state` [going × heads, padded] holds the values weighed until now, `peaks` [going × heads, 2] their highest score
    and the sum of the weights. `gathered`, `scores`, `weights`, `tops`, `part`, `more` are scratch for as many queries
    as a piece may have.
    """
    heads, kv_heads, padded = sizes[at.HEADS], sizes[at.KV_HEADS], sizes[at.PADDED_DIM]
    group = heads // kv_heads
    first, count, table = piece[at.MEMBERS], piece[at.MEMBER_COUNT], piece[at.TABLE]
    rows, size = count * group, sizes[at.MULTIPLIED]
    oldest, end = np.int64(1 << 62), np.int64(0)
    for member in range(first, first + count):
        row = going[members[member]]
        oldest = min(oldest, oldest_seen(positions[row], window))
        end = max(end, np.int64(sees[row]))
    from_row = going[members[first]]
    asking = queries.ctypes.data + (from_row * heads + head * group) * padded * size
    if count > 1:
        asking = gathered.ctypes.data
        for member in range(count):
            row = going[members[first + member]]
            for i in range(group * padded):
                gathered[member * group * padded + i] = queries[row, head * group * padded + i]
    if piece[at.FIRST_SPAN] == 0:
        for member in range(first, first + count):
            place = members[member] * heads + head * group
            for which in range(group):
                peaks[place + which, 0], peaks[place + which, 1] = NEVER, np.float32(0)
    base = addresses[at.POOL] + layer * sizes[at.LAYER_BYTES] + head * sizes[at.HEAD_BYTES]
    last_span = (end + SPAN - 1) // SPAN if piece[at.END_SPAN] == at.TO_THE_END else piece[at.END_SPAN]
    for span in range(max(piece[at.FIRST_SPAN], oldest // SPAN), last_span):
        there = min(PAGES, (end - span * SPAN + PAGE - 1) // PAGE)
        for number in range(there):
            keys = base + pages[table, span * PAGES + number] * sizes[at.PAGE_BYTES]
            into = scores.ctypes.data + 4 * number * PAGE
            call_product(addresses[at.PRODUCT], rows, PAGE, padded, asking, padded, keys, into, SPAN)
        if cap > 0:
            for i in range(rows * SPAN):
                scores[i] = cap * tanh(scores[i] / cap)
        for which in range(rows):
            row = going[members[first + which // group]]
            weigh(which, span, oldest_seen(positions[row], window), np.int64(sees[row]), there, scores, weights, tops)
        for number in range(there):
            values = base + pages[table, span * PAGES + number] * sizes[at.PAGE_BYTES] + sizes[at.KEY_BYTES]
            source, into = weights.ctypes.data + size * number * PAGE, part if number == 0 else more
            call_product(addresses[at.PRODUCT], rows, padded, PAGE, source, SPAN, values, into.ctypes.data, padded)
            if number:
                for i in range(rows * padded):
                    part[i] += more[i]
        for which in range(rows):
            place = members[first + which // group] * heads + head * group + which % group
            join(which, place, padded, part, tops, state, peaks)
    if piece[at.LAST]:
        for which in range(rows):
            goer, own_head = members[first + which // group], head * group + which % group
            put(goer * heads + own_head, state, peaks, sizes, mixed[goer], own_head * sizes[at.HEAD_DIM])


@inlined
def oldest_seen(position, window):
    return max(np.int64(0), np.int64(position) - window + 1) if window else np.int64(0)


@inlined
def weigh(which, span, oldest, end, there, scores, weights, tops):
    """A query's scores of a span as weights; `tops` has the highest score and their sum. What it does not see weighs
    nothing.
    """
    begin, limit, place = which * SPAN, there * PAGE, 2 * which
    first, last = max(np.int64(0), oldest - span * SPAN), min(limit, end - span * SPAN)
    if first >= last:
        poke(tops, place, NEVER)
        for j in range(limit):
            weights[begin + j] = narrow(np.float32(0), weights)
        return
    for j in range(first):
        poke(scores, begin + j, NEVER)
    for j in range(last, limit):
        poke(scores, begin + j, NEVER)
    soften(scores, begin, limit // TILE, weights, tops, place)


@inlined
def join(which, place, padded, part, tops, state, peaks):
    """Add a span's part to what a query has of the spans before it."""
    top, total = tops[2 * which], tops[2 * which + 1]
    if top == NEVER:
        return
    before = peaks[place, 0]
    begin = which * padded
    if before == NEVER:
        peaks[place, 0], peaks[place, 1] = top, total
        for i in range(padded):
            state[place, i] = part[begin + i]
        return
    highest = max(before, top)
    old, new = exp(before - highest), exp(top - highest)
    peaks[place, 0], peaks[place, 1] = highest, peaks[place, 1] * old + total * new
    for i in range(padded):
        state[place, i] = state[place, i] * old + part[begin + i] * new


@inlined
def put(place, state, peaks, sizes, out, column):
    """out[column:] = what a query has mixed, as it is stored there."""
    dim, factor = sizes[at.HEAD_DIM], np.float32(1) / peaks[place, 1]
    if dim % TILE == 0:
        store_scaled(state[place], 0, factor, dim, out, column)
    else:
        for d in range(dim):
            out[column + d] = narrow(state[place, d] * factor, out)


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
        add_vectors(row, column, biases, column, dim, out, 0)
    else:
        for d in range(dim):
            out[d] = row[column + d] + biases[column + d]


@inlined
def turn(head, cosines, sines, half):
    """Rotate value i with value i + half (Su et al. 2021)."""
    if half % TILE == 0:
        turn_vectors(head, 0, cosines, sines, half)
        return
    for i in range(half):
        a, b = head[i], head[i + half]
        head[i] = a * cosines[i] - b * sines[i]
        head[i + half] = b * cosines[i] + a * sines[i]
