"""The compiled forward step.

All threads walk through the layers together, phase by phase. A product is shared out by blocks of its rows and panels
of its columns, attention by rows and heads of keys (`cpu_plan`), all else by rows: so any number of threads has work,
whatever the number of heads. Each value is computed by one thread from its first term to its last, in an order of its
own, so that neither the number of threads nor which of them computes a piece shows in it.

Rows are the step's tokens, in order. Arrays end where their capacity does; how much of them counts is in `sizes`.
Scratch of a thread has the thread for its first index.
"""

import numpy as np

from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_attention import attend, store_row
from gpuinfer.text.decoder.cpu_math import (
    TILE,
    atomic_load,
    call_product,
    called,
    compiled,
    inlined,
    load_at,
    narrow,
    ticks,
    widen,
)
from gpuinfer.text.decoder.cpu_mlp import activate, choose, into_experts, out_of_experts
from gpuinfer.text.decoder.cpu_quantised import panel_value, quantise_row
from gpuinfer.text.decoder.cpu_threads import barrier, claim, wait_for_go
from gpuinfer.text.decoder.cpu_weights import head_panel_bytes, panel_bytes

ROWS_AT_ONCE = 4  # in a piece of what goes row by row
ROW_BLOCK, ROW_BYTES = 256, 384 << 10  # rows of a piece of a product: so many, or as many as stay in a core's cache
MOST_PANELS, PIECES = 16, 8  # panels of a piece; pieces for each thread, if there are as many
FEW_ROWS = 4  # with more, products take longer than reading the weights
FEW_PIECES, FEW_PANELS = 3, 8  # the same of so few rows, whose pieces are whole blocks (`panels_for`)


@compiled
def serve(thread, control, sizes, addresses, eps, step, attention, model, shared, own):
    """Thread 0: run one step, with the others that take part. Another: take part in steps until there has been none for
    a while (0) or STOP is set (1). One function for both, as whatever calls `run` is compiled with all of it.
    """
    line = at.OF_THREAD + at.LINE * thread
    while True:
        if thread and not wait_for_go(thread, control, addresses):
            return np.int64(0)
        if thread and atomic_load(control, at.STOP):
            return np.int64(1)
        threads = (control[line + at.SEEN] if thread else atomic_load(control, at.GO)) % at.MOST_THREADS
        control[line + at.SINCE] = ticks()
        run(thread, threads, control, sizes, addresses, eps, step, attention, model, shared, own)
        if not thread:
            return np.int64(0)


@inlined
def run(thread, threads, control, sizes, addresses, eps, step, attention, model, shared, own):
    """One thread's part in one step."""
    tokens, wanted, every, positions, sees, owners, clears, vector_rows, vectors, runs, pages = step
    embedding, places, scales, shifts, query_scales, key_scales, cosines, sines = model[:8]
    qkv_biases, out_biases, up_biases, down_biases, windows, inners, router_biases, router_scale = model[8:]
    x, kept, normed, qkv, queries, mixed, wide, inner, added, last, logits, state, peaks = shared[:13]
    chosen, shares, expert_inner, operands, expert_operands = shared[13:]
    all_pieces, all_members, all_waves = attention
    of_threads, adapters = own
    room, asked, scores, weights, tops, part, more, gate, up, low, delta, widened, gathered = of_threads[:13]
    begins, order, router_scores, ranked, gathered_operands = of_threads[13:]
    layers, rows, hidden = sizes[at.LAYERS], sizes[at.ROWS], sizes[at.HIDDEN]
    outputs, layer_norm = sizes[at.OUTPUTS], sizes[at.LAYER_NORM]
    adapting, eps32 = sizes[at.RUNS] > 0, np.float32(eps)
    quantised, source, lda = sizes[at.WEIGHT_BITS] > 0, normed.ctypes.data, hidden
    if quantised:  # products take rows of 8 bits
        source, lda = operands.ctypes.data, operands.shape[1]
    going = every
    while True:
        first, end = next_rows(control, rows)
        if first == end:
            break
        for row in range(first, end):
            if sizes[at.TIED]:
                embed_from_panels(
                    addresses[at.FIRST_WEIGHT + at.WEIGHTS * layers], tokens[row], sizes, embedding, x[row]
                )
            else:
                embed(embedding[tokens[row]], x[row])
        for number in range(sizes[at.VECTORS]):
            if first <= vector_rows[number] < end:
                embed(vectors[number], x[vector_rows[number]])
        for row in range(first, end):
            if sizes[at.LEARNED_POSITIONS]:
                add_place(x[row], places[positions[row]])
            norm_row(x[row], scales[0], shifts[0], eps32, layer_norm, normed[row])
            if quantised:
                quantise_row(normed[row], hidden, operands[row])
    barrier(thread, threads, control, addresses)
    for layer in range(layers):
        weight, window = at.FIRST_WEIGHT + at.WEIGHTS * layer, windows[layer]
        few = np.int64(sizes[at.FEW] and layer == layers - 1)
        share_product(
            threads, control, sizes, addresses, rows, qkv.shape[1], hidden, source, lda,
            addresses[weight + at.QKV_WEIGHT], qkv.ctypes.data, qkv.shape[1],
        )  # fmt: skip
        barrier(thread, threads, control, addresses)
        while True:
            first, end = next_rows(control, rows)
            if first == end:
                break
            if adapting:
                adapt(
                    at.QKV, at.OUT, layer, first, end, normed, hidden, qkv, sizes, addresses, runs, adapters,
                    widened[thread], low[thread], delta[thread],
                )  # fmt: skip
            for row in range(first, end):
                store_row(
                    pages[owners[row]], positions[row], clears[row], layer, sizes, addresses, eps32, qkv[row],
                    qkv_biases[layer], query_scales[layer], key_scales[layer], cosines, sines, queries[row],
                    room[thread], embedding,
                )  # fmt: skip
        barrier(thread, threads, control, addresses)
        if few:  # the other rows are through, now that their keys and values are stored
            going, rows = wanted, outputs
        pieces, members, waves = all_pieces[few], all_members[few], all_waves[few]
        for wave in range(waves[0]):
            count = waves[wave + 2] - waves[wave + 1]
            while True:
                number = claim(control)
                if number >= count * sizes[at.KV_HEADS]:
                    break
                attend(
                    pieces[waves[wave + 1] + number % count], number // count, layer, window, np.float32(0), members,
                    going, positions, sees, pages, sizes, addresses, queries, state, peaks, asked[thread],
                    scores[thread], weights[thread], tops[thread], part[thread], more[thread], mixed,
                )  # fmt: skip
            barrier(thread, threads, control, addresses)
        mixed_at, mixed_apart = mixed.ctypes.data, mixed.shape[1]
        if quantised:
            quantise_rows(control, rows, mixed, mixed.shape[1], operands)
            barrier(thread, threads, control, addresses)
            mixed_at, mixed_apart = source, lda
        share_product(
            threads, control, sizes, addresses, rows, hidden, mixed.shape[1], mixed_at, mixed_apart,
            addresses[weight + at.OUT_WEIGHT], added.ctypes.data, hidden,
        )  # fmt: skip
        barrier(thread, threads, control, addresses)
        while True:
            first, end = next_rows(control, rows)
            if first == end:
                break
            if adapting:
                adapt(
                    at.OUT, at.UP, layer, first, end, mixed, mixed.shape[1], added, sizes, addresses, runs, adapters,
                    widened[thread], low[thread], delta[thread],
                )  # fmt: skip
            for row in range(first, end):
                into = kept[row] if few else x[row]
                add(x[going[row]], added[row], out_biases[layer], into)
                norm_row(into, scales[2 * layer + 1], shifts[2 * layer + 1], eps32, layer_norm, normed[row])
                if quantised:
                    quantise_row(normed[row], hidden, operands[row])
        if few:
            x = kept
        barrier(thread, threads, control, addresses)
        width = inners[layer, 0]
        if adapting and width:
            for half in range(2 if sizes[at.GATED] else 1):
                share_product(
                    threads, control, sizes, addresses, rows, width, hidden, source, lda,
                    addresses[weight + at.GATE_WEIGHT + half], wide.ctypes.data + 4 * half * width, wide.shape[1],
                )  # fmt: skip
                barrier(thread, threads, control, addresses)
            while True:
                first, end = next_rows(control, rows)
                if first == end:
                    break
                adapt(
                    at.UP, at.DOWN, layer, first, end, normed, hidden, wide, sizes, addresses, runs, adapters,
                    widened[thread], low[thread], delta[thread],
                )  # fmt: skip
                for row in range(first, end):
                    activate(
                        wide[row], wide[row, width:], up_biases[layer], up_biases[layer, width:], sizes[at.ACTIVATION],
                        sizes[at.GATED], width, inner[row],
                    )  # fmt: skip
            barrier(thread, threads, control, addresses)
        elif width:
            share_up(
                threads, control, sizes, addresses, rows, width, hidden, source, lda, weight, up_biases[layer],
                gate[thread], up[thread], inner,
            )  # fmt: skip
            barrier(thread, threads, control, addresses)
        if inners[layer, 1]:
            while True:
                first, end = next_rows(control, rows)
                if first == end:
                    break
                choose(
                    first, end, layer, normed, sizes, addresses, router_biases, router_scale, chosen, shares,
                    widened[thread], router_scores[thread], ranked[thread],
                )  # fmt: skip
            barrier(thread, threads, control, addresses)
            into_experts(
                control, rows, layer, normed, operands, sizes, addresses, chosen, gathered[thread],
                gathered_operands[thread], gate[thread], up[thread], begins[thread], order[thread], expert_inner,
                expert_operands,
            )  # fmt: skip
            barrier(thread, threads, control, addresses)
        inner_at, inner_apart = inner.ctypes.data, inner.shape[1]
        if quantised and width:
            quantise_rows(control, rows, inner, width, operands)
            barrier(thread, threads, control, addresses)
            inner_at, inner_apart = source, lda
        if inners[layer, 1]:
            out_of_experts(
                control, rows, layer, width, inner_at, inner_apart, expert_inner, expert_operands, sizes, addresses,
                shares, begins[thread], order[thread], delta[thread], added,
            )  # fmt: skip
        else:
            share_product(
                threads, control, sizes, addresses, rows, hidden, width, inner_at, inner_apart,
                addresses[weight + at.DOWN_WEIGHT], added.ctypes.data, hidden,
            )  # fmt: skip
        barrier(thread, threads, control, addresses)
        while True:
            first, end = next_rows(control, rows)
            if first == end:
                break
            if adapting and width:
                adapt(
                    at.DOWN, at.END, layer, first, end, inner, width, added, sizes, addresses, runs, adapters,
                    widened[thread], low[thread], delta[thread],
                )  # fmt: skip
            for row in range(first, end):
                add(x[row], added[row], down_biases[layer], x[row])
                norm_row(x[row], scales[2 * layer + 2], shifts[2 * layer + 2], eps32, layer_norm, normed[row])
                if quantised:
                    quantise_row(normed[row], hidden, operands[row])
        barrier(thread, threads, control, addresses)
    if sizes[at.PICKED]:
        source = source if quantised else last.ctypes.data
        while True:
            first, end = next_rows(control, outputs)
            if first == end:
                break
            for row in range(first, end):
                for i in range(hidden):
                    last[row, i] = normed[wanted[row], i]
                if quantised:
                    quantise_row(last[row], hidden, operands[row])
        barrier(thread, threads, control, addresses)
    share_pieces(
        threads, control, sizes, addresses[at.HEAD_PRODUCT], head_panel_bytes(sizes, hidden), outputs,
        sizes[at.VOCABULARY], hidden, source, lda, addresses[at.FIRST_WEIGHT + at.WEIGHTS * layers],
        logits.ctypes.data, sizes[at.VOCABULARY],
    )  # fmt: skip
    barrier(thread, threads, control, addresses)


@inlined
def next_rows(control, rows):
    """The next piece of what goes row by row: from the first row to before the end; nothing once all are taken."""
    first = claim(control) * ROWS_AT_ONCE
    return min(first, rows), min(first + ROWS_AT_ONCE, rows)


@called
def quantise_rows(control, rows, a, inner, operands):
    """All rows as products of quantised weights take them, by all threads."""
    while True:
        first, end = next_rows(control, rows)
        if first == end:
            return
        for row in range(first, end):
            quantise_row(a[row], inner, operands[row])


@inlined
def rows_of_piece(rows, inner, size):
    """Rows that a piece of a product takes: all of them where they stay in a core's cache, else about equal blocks, as
    products go through rows by 8 (of one block) or by 32.
    """
    most = max(32, min(ROW_BLOCK, ROW_BYTES // (inner * size) // 32 * 32))
    blocks = max(1, -(-rows // most))
    unit = 8 if blocks == 1 else 32
    return -(-rows // (blocks * unit)) * unit


@inlined
def panels_of_piece(rows, panels, blocks, threads):
    """So few that threads end a phase at about the same time, and so many that a piece is worth its while."""
    if rows <= FEW_ROWS:
        return max(FEW_PANELS, min(MOST_PANELS, panels // (FEW_PIECES * threads) // FEW_PANELS * FEW_PANELS))
    wide = panels * blocks // (PIECES * threads)
    return max(2, min(MOST_PANELS, wide // 4 * 4 if wide >= 4 else 2))


@called
def share_product(threads, control, sizes, addresses, rows, columns, inner, a, lda, weight, c, ldc):
    """c float32 [rows, columns] = a [rows, inner] · weight, piece by piece. `a`, `weight` and `c` are addresses, rows
    lie `lda` and `ldc` values apart.
    """
    product, stride = addresses[at.WEIGHT_PRODUCT], panel_bytes(sizes, inner)
    share_pieces(threads, control, sizes, product, stride, rows, columns, inner, a, lda, weight, c, ldc)


@called
def share_pieces(threads, control, sizes, product, stride, rows, columns, inner, a, lda, weight, c, ldc):
    """The same, by this product, of a weight whose panels lie `stride` bytes apart."""
    if rows == 0:
        return
    size, panels = sizes[at.OPERAND], (columns + TILE - 1) // TILE
    high = rows_of_piece(rows, inner, size)
    blocks = (rows + high - 1) // high
    wide = panels_of_piece(rows, panels, blocks, threads)
    pieces = blocks * ((panels + wide - 1) // wide)
    while True:
        piece = claim(control)
        if piece >= pieces:
            return
        row, panel = piece % blocks * high, piece // blocks * wide
        call_product(
            product, min(high, rows - row), min(wide * TILE, columns - panel * TILE), inner,
            a + size * row * lda, lda, weight + panel * stride, c + 4 * (row * ldc + panel * TILE), ldc,
        )  # fmt: skip


@called
def share_up(threads, control, sizes, addresses, rows, width, hidden, a, lda, weight, biases, gate, up, inner):
    """inner [rows, width] = what stands between the two products of an MLP of the rows at `a`: each piece of the first
    one goes through the activation while it is in the cache. `gate` and `up` are scratch for a piece.
    """
    size, panels = sizes[at.OPERAND], (width + TILE - 1) // TILE
    high = min(rows_of_piece(rows, hidden, size), len(gate) // (MOST_PANELS * TILE))
    blocks = (rows + high - 1) // high
    wide = panels_of_piece(rows, panels, blocks, threads)
    pieces, stride = blocks * ((panels + wide - 1) // wide), panel_bytes(sizes, hidden)
    while True:
        piece = claim(control)
        if piece >= pieces:
            return
        row, panel = piece % blocks * high, piece // blocks * wide
        count, columns, first = min(high, rows - row), min(wide * TILE, width - panel * TILE), panel * TILE
        source = a + size * row * lda
        call_product(
            addresses[at.WEIGHT_PRODUCT], count, columns, hidden, source, lda,
            addresses[weight + at.GATE_WEIGHT] + panel * stride, gate.ctypes.data, columns,
        )  # fmt: skip
        if sizes[at.GATED]:
            call_product(
                addresses[at.WEIGHT_PRODUCT], count, columns, hidden, source, lda,
                addresses[weight + at.UP_WEIGHT] + panel * stride, up.ctypes.data, columns,
            )  # fmt: skip
        for number in range(count):
            begin = number * columns
            activate(
                gate[begin : begin + columns], up[begin : begin + columns], biases[first : first + columns],
                biases[width + first :], sizes[at.ACTIVATION], sizes[at.GATED], columns,
                inner[row + number, first : first + columns],
            )  # fmt: skip


@called
def adapt(part, end, layer, first, last, a, inner, c, sizes, addresses, runs, adapters, widened, low, delta):
    """Add what adapters add to rows of a product, c [rows, columns] += a[:, :inner] · downᵀ · upᵀ, in float32, for rows
    from `first` to before `last`.

    `runs` [runs, 3]: rows from the second to before the third number have the adapter at the first's place. Its parts
    of this product are those from `part` to before `end`. A row's bits depend on it and its adapter alone, as those of
    any product. `widened`, `low` and `delta` are scratch for ROWS_AT_ONCE rows.
    """
    product, ranks = addresses[at.WIDE_PRODUCT], sizes[at.RANKS]
    for number in range(sizes[at.RUNS]):
        place, begin = runs[number, 0], max(first, runs[number, 1])
        rows = min(last, runs[number, 2]) - begin
        if rows <= 0:
            continue
        source, stride = a.ctypes.data + 4 * begin * a.shape[1], a.shape[1]
        if a.itemsize == 2:
            source, stride = widened.ctypes.data, inner
            for row in range(rows):
                for i in range(inner):
                    widened[row * inner + i] = widen(a[begin + row, i])
        for which in range(part, end):
            facts = adapters[place, layer, which]
            rank, count = facts[at.RANK], facts[at.COUNT]
            if rank == 0 or count == 0:
                continue
            call_product(product, rows, rank, inner, source, stride, facts[at.DOWNWARDS], low.ctypes.data, ranks)
            call_product(
                product, rows, count, rank, low.ctypes.data, ranks, facts[at.UPWARDS], delta.ctypes.data, count
            )  # fmt: skip
            for row in range(rows):
                for i in range(count):
                    c[begin + row, facts[at.FIRST] + i] += delta[row * count + i]


@inlined
def embed(vector, out):
    for i in range(len(out)):
        out[i] = widen(vector[i])


@inlined
def embed_from_panels(head, token, sizes, like, out):
    """The token's row of the head's weight, whose panels hold the embedding too."""
    pair, size, bits = sizes[at.PAIR], sizes[at.STORED], sizes[at.HEAD_BITS]
    start = head + token // TILE * head_panel_bytes(sizes, len(out))
    if bits:
        for i in range(len(out)):
            out[i] = panel_value(start, i, token % TILE, bits)
        return
    start += token % TILE * pair * size
    for i in range(len(out)):
        out[i] = widen(load_at(start + (i // pair * TILE * pair + i % pair) * size, like))


@inlined
def add_place(x, place):
    for i in range(len(x)):
        x[i] += widen(place[i])


@inlined
def add(x, added, bias, out):
    """What attention or the MLP adds to a row, and the bias."""
    for i in range(len(x)):
        out[i] = x[i] + (added[i] + bias[i])


@inlined
def norm_row(x, scale, shift, eps, layer_norm, out):
    """RMSNorm, or LayerNorm with its shift."""
    n = len(x)
    mean = np.float32(0)
    if layer_norm:
        for i in range(n):
            mean += x[i]
        mean /= np.float32(n)
    squares = np.float32(0)
    for i in range(n):
        squares += (x[i] - mean) * (x[i] - mean)
    factor = np.float32(1) / np.sqrt(squares / np.float32(n) + eps)
    for i in range(n):
        out[i] = narrow((x[i] - mean) * factor * scale[i] + shift[i], out)
