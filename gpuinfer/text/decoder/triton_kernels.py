"""Kernels for CUDA devices, in Triton: attention over pages, and what lies between the products of a layer.

Each row's result is made by sums of one fixed order, which no other row of the launch has a say in. Attention goes over
the positions in blocks with a running maximum (Dao et al. 2022, "FlashAttention"), in portions of SPLIT positions that
are joined in their order afterwards, by one program or by as many as there are portions (Dao et al. 2023,
"Flash-Decoding"): both ways are the same sums. Contraction of products and sums is off, so that they are the same bits.

Where rows share a prefix (`prefix_plan`), `attend_shared` reads it once for many of them, and each row goes on behind
it: then the sums of a row are cut where others cease to share with it. A row that shares nothing has the sums above.

This file needs Triton, which torch brings along where it is built for CUDA; nothing imports it elsewhere.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def joined(total, total_max, total_sum, part, part_max, part_sum):
    """Sums over more positions: each is relative to 2 to the power of its maximum, -inf where nothing was seen."""
    most = tl.maximum(total_max, part_max)
    base = tl.where(most == float("-inf"), 0.0, most)
    one, other = tl.exp2(total_max - base), tl.exp2(part_max - base)
    return total * one[:, None] + part * other[:, None], most, total_sum * one + part_sum * other


@triton.jit
def add_parts(
    total,
    total_max,
    total_sum,
    parts,
    most,
    sums,
    first,
    end,
    number,
    asked,
    inside,
    value,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
):
    """Add the partial results in slots `first` to before `end` of this tile, in their order, for heads `number`."""
    tile, tiles = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    for slot in range(first, end):
        beside = (slot * tiles + tile) * HEADS + number
        part = tl.load(parts + beside[:, None] * DIM + value[None, :], mask=inside, other=0.0)
        part_max = tl.load(most + beside, mask=asked, other=float("-inf"))
        part_sum = tl.load(sums + beside, mask=asked, other=0.0)
        total, total_max, total_sum = joined(total, total_max, total_sum, part, part_max, part_sum)
    return total, total_max, total_sum


@triton.jit
def over(
    asking,  # [QUERIES, WIDTH]
    keys,
    values,
    pages,  # of the segment
    head,
    low,  # the first position, and the end
    high,
    seen,  # [QUERIES] positions that each sees
    at,  # [QUERIES] the position of each
    scale,
    window,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What queries find from `low` to before `high`: the mix of values, the largest score, the sum of the weights.
    Blocks of keys begin at multiples of KEYS, wherever `low` is.
    """
    value = tl.arange(0, WIDTH)
    there = value < DIM
    part = tl.zeros([QUERIES, WIDTH], tl.float32)
    part_max = tl.full([QUERIES], float("-inf"), tl.float32)
    part_sum = tl.zeros([QUERIES], tl.float32)
    for start in range(low // KEYS * KEYS, high, KEYS):
        position = start + tl.arange(0, KEYS)
        held = (position >= low) & (position < high)
        page = tl.load(pages + position // PAGE, mask=held, other=0)
        lies = ((page * PAGE + position % PAGE) * KV_HEADS + head) * DIM
        key = tl.load(keys + lies[None, :] + value[:, None], mask=there[:, None] & held[None, :], other=0.0)
        scores = tl.dot(asking, key, input_precision=PRECISION) * scale
        visible = held[None, :] & (position[None, :] < seen[:, None])
        if window > 0:
            visible &= position[None, :] > at[:, None] - window
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(part_max, tl.max(scores, 1))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        weights = tl.exp2(scores - base[:, None])
        kept = tl.exp2(part_max - base)
        held_values = tl.load(values + lies[:, None] + value[None, :], mask=held[:, None] & there[None, :], other=0.0)
        mixed = tl.dot(weights.to(held_values.dtype), held_values, input_precision=PRECISION)
        part = part * kept[:, None] + mixed
        part_sum = part_sum * kept + tl.sum(weights, 1)
        part_max = new_max
    return part, part_max, part_sum


@triton.jit
def attend(
    queries,  # [rows, HEADS, DIM]
    keys,  # [pages, PAGE, KV_HEADS, DIM] of one layer
    values,
    out,  # [rows, HEADS, DIM]; of portions float32 [portions, tiles, HEADS, DIM]
    most,  # of portions: float32 [portions, tiles, HEADS], and the sum of the weights beside it
    sums,
    shared,  # as `attend_shared` leaves them
    shared_most,
    shared_sums,
    begins,  # int64 [tiles], with FOLLOWING: the first position of each that is in none of them, and how many there are
    slots,
    table,  # int64 [segments, columns] numbers of pages
    firsts,  # int64 [tiles]: the first row of each, how many rows, and their segment
    counts,
    segments,
    positions,  # int64 [rows], and how many positions each row sees
    sees,
    scale,  # of the scores, with the logarithm's base 2 in it
    window,  # positions that a row looks back, itself included; 0: all
    columns,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    PAGE: tl.constexpr,
    ALONE: tl.constexpr,  # tile i is row i, and segment i
    PORTIONS: tl.constexpr,  # tiles are one row each, and each program does one portion, which it leaves to `join`
    FOLLOWING: tl.constexpr,  # tiles are one row each, and what `attend_shared` did comes first
    PRECISION: tl.constexpr,
):
    """A program is a tile of rows of one segment, for the heads that share one head of keys."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    SHARING: tl.constexpr = HEADS // KV_HEADS
    if ALONE:
        first = tile
        count = 1
        segment = tile
    else:
        first = tl.load(firsts + tile)
        count = tl.load(counts + tile)
        segment = tl.load(segments + tile)
    query = tl.arange(0, QUERIES)
    asked = query // SHARING < count
    row = first + query // SHARING
    number = head * SHARING + query % SHARING
    seen = tl.load(sees + row, mask=asked, other=0).to(tl.int32)
    at = tl.load(positions + row, mask=asked, other=0).to(tl.int32)
    reach = tl.max(seen, 0)
    lowest = 0
    if window > 0:
        lowest = tl.maximum(tl.min(tl.where(asked, at - window + 1, reach), 0), 0)
    if FOLLOWING:
        lowest = tl.load(begins + tile).to(tl.int32)
    value = tl.arange(0, WIDTH)
    there = value < DIM
    inside = asked[:, None] & there[None, :]
    place = (row * HEADS + number) * DIM
    asking = tl.load(queries + place[:, None] + value[None, :], mask=inside, other=0.0)

    if PORTIONS:
        portion = tl.program_id(2)
        low, high = tl.maximum(portion * SPLIT, lowest), tl.minimum(portion * SPLIT + SPLIT, reach)
        total, total_max, total_sum = over(
            asking, keys, values, table + segment * columns, head, low, high, seen, at, scale, window,
            KV_HEADS, DIM, WIDTH, QUERIES, KEYS, PAGE, PRECISION,
        )  # fmt: skip
        beside = (portion * tl.num_programs(0) + tile) * HEADS + number
        place = beside * DIM
        tl.store(most + beside, total_max, mask=asked)
        tl.store(sums + beside, total_sum, mask=asked)
    else:
        total = tl.zeros([QUERIES, WIDTH], tl.float32)
        total_max = tl.full([QUERIES], float("-inf"), tl.float32)
        total_sum = tl.zeros([QUERIES], tl.float32)
        if FOLLOWING:
            total, total_max, total_sum = add_parts(
                total, total_max, total_sum, shared, shared_most, shared_sums, 0, tl.load(slots + tile).to(tl.int32),
                number, asked, inside, value, HEADS, DIM,
            )  # fmt: skip
        for portion in range(lowest // SPLIT, (reach + SPLIT - 1) // SPLIT):
            low, high = tl.maximum(portion * SPLIT, lowest), tl.minimum(portion * SPLIT + SPLIT, reach)
            part, part_max, part_sum = over(
                asking, keys, values, table + segment * columns, head, low, high, seen, at, scale, window,
                KV_HEADS, DIM, WIDTH, QUERIES, KEYS, PAGE, PRECISION,
            )  # fmt: skip
            total, total_max, total_sum = joined(total, total_max, total_sum, part, part_max, part_sum)
        total = total / tl.where(asked, total_sum, 1.0)[:, None]
    tl.store(out + place[:, None] + value[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def attend_shared(
    queries,  # [rows, HEADS, DIM]
    keys,  # [pages, PAGE, KV_HEADS, DIM] of one layer
    values,
    parts,  # float32 [slots, tiles, HEADS, DIM]
    most,  # float32 [slots, tiles, HEADS], and the sum of the weights beside it
    sums,
    table,  # int64 [segments, columns] numbers of pages
    firsts,  # int64 [tiles]: the row of each
    segments,
    items,  # int64 [fields, items], as in `prefix_plan`: an item's rows are tiles; those without rows do nothing
    members,  # int64 [tiles]
    scale,
    columns,
    tiles,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    ALONE: tl.constexpr,  # tile i is row i, and segment i
    PRECISION: tl.constexpr,
):
    """A program is an item, for the heads that share one head of keys: positions that many rows see, in pages of one of
    them.
    """
    item, head, every = tl.program_id(0), tl.program_id(1), tl.num_programs(0)
    SHARING: tl.constexpr = HEADS // KV_HEADS
    count = tl.load(items + every + item)
    if count == 0:
        return
    first, segment = tl.load(items + item), tl.load(items + 2 * every + item)
    low, high = tl.load(items + 3 * every + item).to(tl.int32), tl.load(items + 4 * every + item).to(tl.int32)
    slot = tl.load(items + 5 * every + item)
    query = tl.arange(0, QUERIES)
    asked = query // SHARING < count
    tile = tl.load(members + first + query // SHARING, mask=asked, other=0)
    row = tile
    if not ALONE:
        row = tl.load(firsts + tile, mask=asked, other=0)
        segment = tl.load(segments + segment)
    number = head * SHARING + query % SHARING
    value = tl.arange(0, WIDTH)
    inside = asked[:, None] & (value < DIM)[None, :]
    place = (row * HEADS + number) * DIM
    asking = tl.load(queries + place[:, None] + value[None, :], mask=inside, other=0.0)
    seen = tl.zeros([QUERIES], tl.int32) + high
    part, part_max, part_sum = over(
        asking, keys, values, table + segment * columns, head, low, high, seen, seen, scale, 0,
        KV_HEADS, DIM, WIDTH, QUERIES, KEYS, PAGE, PRECISION,
    )  # fmt: skip
    beside = (slot * tiles + tile) * HEADS + number
    tl.store(most + beside, part_max, mask=asked)
    tl.store(sums + beside, part_sum, mask=asked)
    tl.store(parts + beside[:, None] * DIM + value[None, :], part, mask=inside)


@triton.jit
def join(
    parts,  # as `attend` leaves them
    most,
    sums,
    shared,  # as `attend_shared` leaves them; of each tile the position where they end, and how many there are
    shared_most,
    shared_sums,
    begins,
    slots,
    out,  # [rows, HEADS, DIM]
    firsts,
    positions,
    sees,
    window,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    SPLIT: tl.constexpr,
    ALONE: tl.constexpr,
    FOLLOWING: tl.constexpr,  # as for `attend`
):
    """A program is one head of one tile, which is one row: its portions, in their order."""
    tile, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tile if ALONE else tl.load(firsts + tile)
    seen = tl.load(sees + row).to(tl.int32)
    lowest = 0
    if window > 0:
        lowest = tl.maximum(tl.load(positions + row).to(tl.int32) - window + 1, 0)
    number = head + tl.arange(0, 1)
    value = tl.arange(0, WIDTH)
    there = value < DIM
    total = tl.zeros([1, WIDTH], tl.float32)
    total_max = tl.full([1], float("-inf"), tl.float32)
    total_sum = tl.zeros([1], tl.float32)
    if FOLLOWING:
        lowest = tl.load(begins + tile).to(tl.int32)
        total, total_max, total_sum = add_parts(
            total, total_max, total_sum, shared, shared_most, shared_sums, 0, tl.load(slots + tile).to(tl.int32),
            number, number >= 0, there[None, :], value, HEADS, DIM,
        )  # fmt: skip
    total, total_max, total_sum = add_parts(
        total, total_max, total_sum, parts, most, sums, lowest // SPLIT, (seen + SPLIT - 1) // SPLIT,
        number, number >= 0, there[None, :], value, HEADS, DIM,
    )  # fmt: skip
    total = total / total_sum[:, None]
    place = (row * HEADS + head) * DIM
    tl.store(out + place + value[None, :], total.to(out.dtype.element_ty), mask=there[None, :])


@triton.jit
def norm(
    x,  # [rows, HIDDEN]
    added,  # the same, added to `x` first, or nothing
    summed,  # where that sum goes
    given,  # where the norm goes
    scale,  # float32 [HIDDEN]
    shift,
    eps,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    ADDED: tl.constexpr,
    LAYER: tl.constexpr,  # LayerNorm, else RMSNorm
):
    """A program is one row."""
    at = tl.arange(0, BLOCK)
    there = at < HIDDEN
    place = tl.program_id(0).to(tl.int64) * HIDDEN + at
    found = tl.load(x + place, mask=there, other=0.0)
    if ADDED:
        more = tl.load(added + place, mask=there, other=0.0)
        found = (found.to(tl.float32) + more.to(tl.float32)).to(x.dtype.element_ty)
        tl.store(summed + place, found, mask=there)
    found = found.to(tl.float32)
    if LAYER:
        found = tl.where(there, found - tl.sum(found, 0) / HIDDEN, 0.0)
    spread = tl.sum(found * found, 0) / HIDDEN
    found = found * (1 / tl.sqrt(spread + eps)) * tl.load(scale + at, mask=there, other=0.0)
    if LAYER:
        found += tl.load(shift + at, mask=there, other=0.0)
    tl.store(given + place, found.to(given.dtype.element_ty), mask=there)


@triton.jit
def head_norm(found, scale, spread, at, there):
    """RMSNorm of a head's values, as they are rounded in between."""
    turned = found.to(tl.float32) * spread * tl.load(scale + at, mask=there, other=0.0)
    return turned.to(found.dtype)


@triton.jit
def place(
    qkv,  # [rows, HEADS + 2 × KV_HEADS, DIM]
    queries,  # [rows, HEADS, DIM]: where the queries go
    keys,  # [pages × PAGE, KV_HEADS, DIM] of one layer: where keys and values go
    values,
    places,  # int64 [rows] in there
    positions,  # int64 [rows]
    cosines,  # float32 [positions, HALF]
    sines,
    query_scale,  # float32 [DIM]
    key_scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,  # of the values of a head that turn; 0: none
    NORMED: tl.constexpr,
):
    """Norms of heads, rotary embedding, and keys and values into the cache. A program is one head of one row."""
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    there = at < DIM
    given = qkv + (row * (HEADS + 2 * KV_HEADS) + head) * DIM
    found = tl.load(given + at, mask=there, other=0.0)
    if head < HEADS + KV_HEADS:
        scale = query_scale
        if head >= HEADS:
            scale = key_scale
        spread = 1.0
        if NORMED:
            whole = found.to(tl.float32)
            spread = 1 / tl.sqrt(tl.sum(whole * whole, 0) / DIM + eps)
            found = head_norm(found, scale, spread, at, there)
        if HALF > 0:
            turns = at < 2 * HALF
            partner = tl.where(at < HALF, at + HALF, at - HALF)
            other = tl.load(given + partner, mask=turns, other=0.0)
            if NORMED:
                other = head_norm(other, scale, spread, partner, turns)
            angle = tl.load(positions + row) * HALF + tl.where(at < HALF, at, at - HALF)
            cosine = tl.load(cosines + angle, mask=turns, other=1.0)
            sine = tl.load(sines + angle, mask=turns, other=0.0)
            sine = tl.where(at < HALF, -sine, sine)
            turned = found.to(tl.float32) * cosine + other.to(tl.float32) * sine
            found = tl.where(turns, turned.to(found.dtype), found)
    if head < HEADS:
        tl.store(queries + (row * HEADS + head) * DIM + at, found, mask=there)
    else:
        into = tl.load(places + row) * KV_HEADS
        if head < HEADS + KV_HEADS:
            tl.store(keys + (into + head - HEADS) * DIM + at, found, mask=there)
        else:
            tl.store(values + (into + head - HEADS - KV_HEADS) * DIM + at, found, mask=there)


@triton.jit
def activate(
    inner,  # [rows, 2 × SIZE] gate, then value; [rows, SIZE] where nothing gates
    out,  # [rows, SIZE]
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GATED: tl.constexpr,
    KIND: tl.constexpr,  # as `shape.Shape.activation`
):
    """A program is a block of one row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = at < SIZE
    start = row * SIZE * 2 if GATED else row * SIZE
    given = tl.load(inner + start + at, mask=there, other=0.0)
    x = given.to(tl.float32)
    if KIND == "silu":
        x = x / (1 + tl.exp(-x))
    elif KIND == "relu":
        x = tl.maximum(x, 0.0)
    elif KIND == "gelu":
        x = 0.5 * x * (1 + tl.erf(x * 0.7071067811865476))
    else:
        angle = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = 0.5 * x * (2 - 2 / (tl.exp(2 * angle) + 1))
    found = x.to(given.dtype)
    if GATED:
        value = tl.load(inner + start + SIZE + at, mask=there, other=0.0)
        found = (found.to(tl.float32) * value.to(tl.float32)).to(given.dtype)
    tl.store(out + row * SIZE + at, found, mask=there)
