"""What compiled code computes inside a model of transformers': its products, its norms, and its attention over pages.

Each function takes the address of a job, int64 numbers that say where everything lies, and is run by several threads at
once, which share out its pieces.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numba import types

from gpuinfer.models.kernel_cache import c_compiler
from gpuinfer.text.decoder import cpu_sizes as at
from gpuinfer.text.decoder.cpu_attention import SPAN, attend, store_key, store_value
from gpuinfer.text.decoder.cpu_math import SOURCES, atomic_add, called, narrow, store_scaled, widen
from gpuinfer.text.decoder.cpu_step import next_rows, share_product
from gpuinfer.text.decoder.cpu_threads import claim
from gpuinfer.text.decoder.openmp import (
    float_rows_at,
    floats_at,
    half_rows_at,
    halves_at,
    integer_rows_at,
    integers_at,
    number_rows_at,
    numbers_at,
)
from gpuinfer.text.transformer import PAGE

# `control`, `sizes` and `addresses` of a job as `cpu_sizes` has them; behind them what one call is.
CONTROL = at.OF_THREAD
ADDRESSES = CONTROL + at.SIZES
OWN = ADDRESSES + at.FIRST_WEIGHT

# A product's job, int64: `control`, `sizes` and `addresses` as `cpu_sizes` has them, and behind them what one call is.
RUN_BY, TALL, A, LDA, C, WIDE, INNER, WEIGHT, PRODUCT_JOB = range(OWN, OWN + 9)
# A norm's job: `control`, and these behind it. Behind the scales of a row stands eps.
NORM_ROWS, SOURCE, TARGET, WIDTH, SCALES, NORM_JOB = range(CONTROL, CONTROL + 6)


def _product(job):  # type: ignore[no-untyped-def]  # compiled
    block = numbers_at(job, PRODUCT_JOB)
    share_product(
        block[RUN_BY], block[:CONTROL], block[CONTROL:ADDRESSES], block[ADDRESSES:OWN], block[TALL], block[WIDE],
        block[INNER], block[A], block[LDA], block[WEIGHT], block[C], block[WIDE],
    )  # fmt: skip


def _norm_float32(job):  # type: ignore[no-untyped-def]  # compiled
    block = numbers_at(job, NORM_JOB)
    rows, width = block[NORM_ROWS], block[WIDTH]
    source, target = float_rows_at(block[SOURCE], rows, width), float_rows_at(block[TARGET], rows, width)
    norm_rows(block, source, floats_at(block[SCALES], width + 1), target)


def _norm_bfloat16(job):  # type: ignore[no-untyped-def]  # compiled
    block = numbers_at(job, NORM_JOB)
    rows, width = block[NORM_ROWS], block[WIDTH]
    source, target = half_rows_at(block[SOURCE], rows, width), half_rows_at(block[TARGET], rows, width)
    norm_rows(block, source, floats_at(block[SCALES], width + 1), target)


@called
def norm_rows(control, source, scales, target):  # type: ignore[no-untyped-def]  # compiled
    """RMSNorm of rows (Zhang and Sennrich 2019), in float32."""
    rows, width = source.shape
    while True:
        first, end = next_rows(control, rows)
        if first == end:
            return
        for row in range(first, end):
            squares = np.float32(0)
            for i in range(width):
                squares += widen(source[row, i]) * widen(source[row, i])
            factor = np.float32(1) / np.sqrt(squares / np.float32(width) + scales[width])
            for i in range(width):
                target[row, i] = narrow(widen(source[row, i]) * factor * scales[i], target)


# A job, int64: `control`, `sizes` and `addresses` as `cpu_sizes` has them, and behind them what a call is.
(
    JOINED,  # threads that have taken a number
    THREADS,
    ROWS,
    KEY_DIM,
    VALUE_DIM,
    WINDOW,
    SCALE,  # address of the scale of scores and of their cap (0: none), float32
    # addresses of keys, values and queries, and how far apart their rows and heads lie, in values
    QUERY, QUERY_ROW, QUERY_HEAD, KEY, KEY_ROW, KEY_HEAD, VALUE, VALUE_ROW, VALUE_HEAD,
    MIXED,  # address
    # addresses of a step's numbers: int32 of each row, and [segments, COLUMNS] pages
    POSITIONS, SEES, OWNERS, CLEARS, EVERY, PAGES, SEGMENTS, COLUMNS,
    PIECES, FIRST_PIECE, PIECE_COUNT, MEMBERS, MEMBER_COUNT,
    # addresses of scratch: of all rows, and of each thread
    QUERIES, STATE, PEAKS, TOGETHER, ROOM, GATHERED, SCORES, WEIGHTS, TOPS, PART, MORE,
    JOB,
) = range(OWN, OWN + 42)  # fmt: skip


def _store_float32(job):  # type: ignore[no-untyped-def]  # compiled
    block = numbers_at(job, JOB)
    heads, kv_heads, rows = block[CONTROL + at.HEADS], block[CONTROL + at.KV_HEADS], block[ROWS]
    store_rows(
        block,
        floats_at(block[QUERY], rows * block[QUERY_ROW] + heads * block[QUERY_HEAD]),
        floats_at(block[KEY], rows * block[KEY_ROW] + kv_heads * block[KEY_HEAD]),
        floats_at(block[VALUE], rows * block[VALUE_ROW] + kv_heads * block[VALUE_HEAD]),
        float_rows_at(block[QUERIES], rows, heads * block[CONTROL + at.PADDED_DIM]),
    )


def _store_widened(job):  # type: ignore[no-untyped-def]  # compiled
    block = numbers_at(job, JOB)
    heads, kv_heads, rows = block[CONTROL + at.HEADS], block[CONTROL + at.KV_HEADS], block[ROWS]
    store_rows(
        block,
        halves_at(block[QUERY], rows * block[QUERY_ROW] + heads * block[QUERY_HEAD]),
        halves_at(block[KEY], rows * block[KEY_ROW] + kv_heads * block[KEY_HEAD]),
        halves_at(block[VALUE], rows * block[VALUE_ROW] + kv_heads * block[VALUE_HEAD]),
        float_rows_at(block[QUERIES], rows, heads * block[CONTROL + at.PADDED_DIM]),
    )


def _store_bfloat16(job):  # type: ignore[no-untyped-def]  # compiled
    block = numbers_at(job, JOB)
    heads, kv_heads, rows = block[CONTROL + at.HEADS], block[CONTROL + at.KV_HEADS], block[ROWS]
    store_rows(
        block,
        halves_at(block[QUERY], rows * block[QUERY_ROW] + heads * block[QUERY_HEAD]),
        halves_at(block[KEY], rows * block[KEY_ROW] + kv_heads * block[KEY_HEAD]),
        halves_at(block[VALUE], rows * block[VALUE_ROW] + kv_heads * block[VALUE_HEAD]),
        half_rows_at(block[QUERIES], rows, heads * block[CONTROL + at.PADDED_DIM]),
    )


@called
def store_rows(block, asked, keys_of, values_of, queries):  # type: ignore[no-untyped-def]  # compiled
    """Put keys and values of all rows in their pages, and queries, scaled, side by side."""
    sizes, rows = block[CONTROL:ADDRESSES], block[ROWS]
    heads, kv_heads, padded = sizes[at.HEADS], sizes[at.KV_HEADS], sizes[at.PADDED_DIM]
    positions, owners = integers_at(block[POSITIONS], rows), integers_at(block[OWNERS], rows)
    clears = integers_at(block[CLEARS], rows)
    pages = integer_rows_at(block[PAGES], block[SEGMENTS], block[COLUMNS])
    room = float_rows_at(block[ROOM], block[THREADS], padded)[atomic_add(block, JOINED, 1)]
    scale = floats_at(block[SCALE], 2)[0]
    while True:
        first, end = next_rows(block, rows)
        if first == end:
            return
        for row in range(first, end):
            place = positions[row] % PAGE
            page = block[ADDRESSES + at.POOL] + pages[owners[row], positions[row] // PAGE] * sizes[at.PAGE_BYTES]
            for head in range(heads):
                take_head(asked, row * block[QUERY_ROW] + head * block[QUERY_HEAD], block[KEY_DIM], padded, room)
                store_scaled(room, 0, scale, padded, queries[row], head * padded)
            for head in range(kv_heads):
                keys = page + head * sizes[at.HEAD_BYTES]
                values = keys + sizes[at.KEY_BYTES]
                take_head(keys_of, row * block[KEY_ROW] + head * block[KEY_HEAD], block[KEY_DIM], padded, room)
                store_key(room, place, keys, sizes, keys_of)
                take_head(values_of, row * block[VALUE_ROW] + head * block[VALUE_HEAD], block[VALUE_DIM], padded, room)
                store_value(room, place, values, sizes, values_of)
                if clears[row] >= 0:
                    for d in range(padded):
                        room[d] = np.float32(0)
                    for behind in range(clears[row], PAGE):
                        store_value(room, behind, values, sizes, values_of)


@called
def take_head(values, begin, dim, padded, room):  # type: ignore[no-untyped-def]  # compiled
    for d in range(dim):
        room[d] = widen(values[begin + d])
    for d in range(dim, padded):
        room[d] = np.float32(0)


def _attend_float32(job):  # type: ignore[no-untyped-def]  # compiled
    block = numbers_at(job, JOB)
    heads, threads, together = block[CONTROL + at.HEADS], block[THREADS], block[TOGETHER]
    padded = block[CONTROL + at.PADDED_DIM]
    attend_rows(
        block,
        float_rows_at(block[QUERIES], block[ROWS], heads * padded),
        float_rows_at(block[GATHERED], threads, together * padded),
        float_rows_at(block[WEIGHTS], threads, together * SPAN),
        float_rows_at(block[MIXED], block[ROWS], heads * block[VALUE_DIM]),
    )


def _attend_widened(job):  # type: ignore[no-untyped-def]  # compiled
    block = numbers_at(job, JOB)
    heads, threads, together = block[CONTROL + at.HEADS], block[THREADS], block[TOGETHER]
    padded = block[CONTROL + at.PADDED_DIM]
    attend_rows(
        block,
        float_rows_at(block[QUERIES], block[ROWS], heads * padded),
        float_rows_at(block[GATHERED], threads, together * padded),
        float_rows_at(block[WEIGHTS], threads, together * SPAN),
        half_rows_at(block[MIXED], block[ROWS], heads * block[VALUE_DIM]),
    )


def _attend_bfloat16(job):  # type: ignore[no-untyped-def]  # compiled
    block = numbers_at(job, JOB)
    heads, threads, together = block[CONTROL + at.HEADS], block[THREADS], block[TOGETHER]
    padded = block[CONTROL + at.PADDED_DIM]
    attend_rows(
        block,
        half_rows_at(block[QUERIES], block[ROWS], heads * padded),
        half_rows_at(block[GATHERED], threads, together * padded),
        half_rows_at(block[WEIGHTS], threads, together * SPAN),
        half_rows_at(block[MIXED], block[ROWS], heads * block[VALUE_DIM]),
    )


@called
def attend_rows(block, queries, gathered, weights, mixed):  # type: ignore[no-untyped-def]  # compiled
    """Take pieces of one wave through their spans."""
    sizes, addresses, rows = block[CONTROL:ADDRESSES], block[ADDRESSES:OWN], block[ROWS]
    heads, kv_heads, padded = sizes[at.HEADS], sizes[at.KV_HEADS], sizes[at.PADDED_DIM]
    threads, together = block[THREADS], block[TOGETHER]
    every, positions = integers_at(block[EVERY], rows), integers_at(block[POSITIONS], rows)
    sees, members = integers_at(block[SEES], rows), integers_at(block[MEMBERS], block[MEMBER_COUNT])
    pages = integer_rows_at(block[PAGES], block[SEGMENTS], block[COLUMNS])
    pieces = number_rows_at(block[PIECES], block[FIRST_PIECE] + block[PIECE_COUNT], at.PIECE)
    state, peaks = float_rows_at(block[STATE], rows * heads, padded), float_rows_at(block[PEAKS], rows * heads, 2)
    cap, number = floats_at(block[SCALE], 2)[1], atomic_add(block, JOINED, 1)
    scores = float_rows_at(block[SCORES], threads, together * SPAN)[number]
    tops = float_rows_at(block[TOPS], threads, 2 * together)[number]
    part = float_rows_at(block[PART], threads, together * padded)[number]
    more = float_rows_at(block[MORE], threads, together * padded)[number]
    while True:
        piece = claim(block)
        if piece >= block[PIECE_COUNT] * kv_heads:
            return
        attend(
            pieces[block[FIRST_PIECE] + piece % block[PIECE_COUNT]], piece // block[PIECE_COUNT], 0, block[WINDOW], cap,
            members, every, positions, sees, pages, sizes, addresses, queries, state, peaks, gathered[number], scores,
            weights[number], tops, part, more, mixed,
        )  # fmt: skip


COMPILED_SOURCES = (*SOURCES, Path(__file__), Path(__file__).with_name("openmp.py"))
_compiled: dict[str, Any] = {}


def compiled_job(function: Any) -> Any:
    """A function of this file for C, compiled when it is first asked for."""
    name = function.__name__
    if name not in _compiled:
        make = c_compiler(COMPILED_SOURCES, types.void(types.int64), _nrt=False, error_model="numpy")
        _compiled[name] = make(function)
    return _compiled[name]


PRODUCT = _product
NORMS = {"float32": _norm_float32, "bfloat16": _norm_bfloat16}
STORES = {"float32": _store_float32, "widened": _store_widened, "avx512": _store_bfloat16, "amx": _store_bfloat16}
ATTENDS = {"float32": _attend_float32, "widened": _attend_widened, "avx512": _attend_bfloat16, "amx": _attend_bfloat16}
