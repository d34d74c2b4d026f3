"""Products of bfloat16 by the processor's matrix unit (Intel's Advanced Matrix Extensions, AMX).

A tile register holds up to 16 rows of 64 bytes: of `a` 16 rows of 32 terms, of a panel 16 pairs of terms of 16 columns,
of sums 16 rows of 16 columns. One instruction adds the products of two tiles to a third. Two tiles of rows times two
panels use all eight registers: four of sums, two and two of what is multiplied. Up to 16 rows meet four panels at once.

A row's sums are the same whatever else is in its tile: one row alone is a tile of one row.

Matrix products of compiled kernels: a row's result has the same bits among any number of rows, and for any share of
the columns.

Of four kinds, by what rows and weights are stored as and by what the processor does (`cpu_bfloat16`):

    float32     both float32. One fused multiplication and addition for each term, in order, from 0 on: the same bits on
                any processor
    widened     rows of float32, weights of bfloat16, which are widened as they are read: the same bits on any processor
    avx512      both bfloat16, by the processor's products of pairs
    amx         both bfloat16, by its matrix unit

Every function is called by its address, `product(rows, columns, inner, a, lda, panels, c, ldc)`, all int64: c [rows,
columns] float32 = a [rows, inner] · the weight that `panels_of` gave; `a`, `panels` and `c` are addresses, rows of `a`
and `c` lie `lda` and `ldc` values apart. What is not among these rows, terms and columns is neither read nor written. A
share of the columns begins at a multiple of 16: `panels` at a multiple of `panel_bytes`.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpuinfer.models.kernel_cache import c_compiler
from gpuinfer.text.decoder.cpu_block import (
    ADDRESS,
    LINE,
    LINES_AHEAD,
    MOST_ROWS,
    block,
    call,
    llvm_number,
    load_some,
    mask_of,
    panels_for,
    prefetch,
    store_some,
)
from gpuinfer.text.decoder.cpu_math import I64, SOURCES, TILE, VOID, WIDE, inlined, own_function
from gpuinfer.text.decoder.cpu_panels import TERMS

I8, I16 = ir.IntType(8), ir.IntType(16)
TILE_BYTES = TILE * LINE
SIDES, WEIGHTS = (4, 5), (6, 7)  # numbers of registers; sums are those from 0 on
GROUP = 4
"""Panels that all rows meet before the next panels: they stay in the second-level cache."""
TILES_AHEAD = 2
"""In a panel, where it is read once: processors look ahead within 4 KiB by themselves."""
DEPTH = 48
"""Steps of 32 terms before the next panels' turn: the rows' part of so many stays in the second-level cache too."""


def product_amx(rows, columns, inner, a, lda, panels, c, ldc):
    """The product of bfloat16 with bfloat16, as `cpu_product` says."""
    steps = (inner + TERMS - 1) // TERMS
    apart = TILE_BYTES * steps
    depth = DEPTH if rows > 2 * TILE else max(steps, 1)
    configured = 0
    for begin in range(0, max(steps, 1), depth):
        some = min(depth, steps - begin)
        terms = min(TERMS * some, inner - TERMS * begin)
        for column in range(0, columns, GROUP * TILE):
            weight = panels + column // TILE * apart + TILE_BYTES * begin
            ahead = weight + GROUP * apart if rows > TILE else 0
            lines = (
                GROUP * TILE // ((rows + TILE - 1) // TILE) if rows > TILE and column + GROUP * TILE < columns else 0
            )
            for row in range(0, rows, 2 * TILE):
                height = min(2 * TILE, rows - row)
                if height != configured:
                    configure(height)
                    configured = height
                source, into = a + 2 * (row * lda + TERMS * begin), c + 4 * (row * ldc + column)
                width = min(GROUP * TILE, columns - column)
                tall = 2 if height > TILE else 1
                for side in range(0, width, GROUP // tall * TILE):
                    beside = weight + side // TILE * apart
                    tiles(
                        tall, terms, source, 2 * lda, beside, apart, into + 4 * side, 4 * ldc, height, width - side,
                        begin, ahead, lines,
                    )  # fmt: skip
                    ahead += LINE * lines * some
    if configured:
        release()


@intrinsic
def configure(typing, height):
    """Set up the registers for 1 to 32 rows: one tile of them, or two."""

    def generate(context, builder, signature, values):
        first = _least(builder, values[0], llvm_number(TILE))
        second = builder.sub(values[0], first)
        tall = builder.icmp_unsigned(">", second, llvm_number(0))
        rows = [
            first,
            first,
            *[builder.select(tall, second, first)] * 2,
            first,
            second,
            llvm_number(TILE),
            llvm_number(TILE),
        ]
        layout = cgutils.alloca_once(builder, ir.ArrayType(I8, LINE))
        layout.align = LINE
        builder.store(ir.Constant(ir.ArrayType(I8, LINE), [1] + [0] * (LINE - 1)), layout)
        place = builder.bitcast(layout, ADDRESS)
        for register, count in enumerate(rows):
            there = builder.icmp_unsigned(">", count, llvm_number(0))
            width = builder.select(there, ir.Constant(I16, LINE), ir.Constant(I16, 0))
            builder.store(
                width, builder.bitcast(builder.gep(place, [llvm_number(16 + 2 * register)]), ir.PointerType(I16))
            )
            builder.store(builder.trunc(count, I8), builder.gep(place, [llvm_number(48 + register)]))
        call(builder, "llvm.x86.ldtilecfg", VOID, place)
        return context.get_dummy_value()

    return types.void(types.int64), generate


@intrinsic
def release(typing):
    """Leave the registers empty: a thread's state is smaller then."""

    def generate(context, builder, signature, values):
        call(builder, "llvm.x86.tilerelease", VOID)
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def tiles(typing, tall, terms, a, lda, weight, apart, c, ldc, height, columns, goes_on, ahead, lines):
    """c = a · panels for `height` rows, or c += where `goes_on` is not 0: `tall` tiles of them, 1 or 2, times four
    panels or two.

    terms:   so many of each sum
    a, c:    addresses of the first row; rows lie `lda` and `ldc` bytes apart
    weight:  address of the first panel; they lie `apart` bytes from one another
    columns: how many there are from the first panel on; columns beyond are neither read nor written
    ahead:   address of what is needed next: of this, so many `lines` of the cache are asked for with each 32 terms; 0
             asks for what comes next in these panels themselves
    """

    def generate(context, builder, signature, values):
        for count in (1, 2):
            with builder.if_then(builder.icmp_signed("==", values[0], llvm_number(count))):
                write = functools.partial(_write, count, 4 // count)
                builder.call(own_function(builder.module, f"tiles_{count}_{4 // count}", 12, write), values[1:])
        return context.get_dummy_value()

    return types.void(*[types.int64] * 13), generate


def _write(tall, wide, builder, terms, a, lda, weight, apart, c, ldc, height, columns, goes_on, ahead, lines):
    room = cgutils.alloca_once(builder, ir.ArrayType(I8, tall * TILE_BYTES))
    room.align = LINE
    sums = [
        _Sums(builder, tall, wide, c, ldc, height, columns, room, row, panel)
        for row in range(tall)
        for panel in range(wide)
    ]
    fresh = builder.icmp_unsigned("==", goes_on, llvm_number(0))
    for one in sums:
        one.begin(fresh)
    last = builder.sub(builder.udiv(builder.add(columns, llvm_number(TILE - 1)), llvm_number(TILE)), llvm_number(1))
    places = [
        builder.add(weight, builder.mul(_least(builder, llvm_number(panel), last), apart)) for panel in range(wide)
    ]
    rows = [builder.add(a, builder.mul(lda, llvm_number(TILE * row))) for row in range(tall)]
    steps = builder.udiv(terms, llvm_number(TERMS))
    with cgutils.for_range(builder, steps) as loop:
        at = builder.mul(loop.index, llvm_number(LINE))
        _multiply(
            builder,
            [builder.add(row, at) for row in rows],
            lda,
            places,
            builder.mul(loop.index, llvm_number(TILE_BYTES)),
            wide,
        )
        begin = builder.add(ahead, builder.mul(builder.mul(loop.index, lines), llvm_number(LINE)))
        with builder.if_else(builder.icmp_unsigned("!=", ahead, llvm_number(0))) as (elsewhere, here):
            with elsewhere, cgutils.for_range(builder, lines) as asking:
                prefetch(builder, builder.add(begin, builder.mul(asking.index, llvm_number(LINE))))
            with here:
                offset = builder.mul(builder.add(loop.index, llvm_number(TILES_AHEAD)), llvm_number(TILE_BYTES))
                for line in range(wide * TILE):
                    place = builder.add(places[line % wide], offset)
                    prefetch(builder, builder.add(place, llvm_number(line // wide * LINE)))
    rest = builder.urem(terms, llvm_number(TERMS))
    with builder.if_then(builder.icmp_unsigned("!=", rest, llvm_number(0)), likely=False):
        _copy(builder, builder.add(a, builder.mul(steps, llvm_number(LINE))), lda, height, rest, room, tall)
        begin = builder.ptrtoint(room, I64)
        copied = [builder.add(begin, llvm_number(TILE_BYTES * row)) for row in range(tall)]
        _multiply(builder, copied, llvm_number(LINE), places, builder.mul(steps, llvm_number(TILE_BYTES)), wide)
    for one in sums:
        one.end()


def _multiply(builder, rows, stride, places, offset, wide):
    """Add the products of 32 terms to all sums."""
    for register, row in zip(SIDES, rows):  # noqa: B905 (one or two rows)
        load_tile(builder, register, row, stride)
    for panel, place in enumerate(places):
        register = WEIGHTS[panel % 2]
        load_tile(builder, register, builder.add(place, offset), llvm_number(LINE))
        for row in range(len(rows)):
            registers = [ir.Constant(I8, one) for one in (row * wide + panel, SIDES[row], register)]
            call(builder, "llvm.x86.tdpbf16ps", VOID, *registers)


def load_tile(builder, register, place, stride):
    call(builder, "llvm.x86.tileloadd64", VOID, ir.Constant(I8, register), builder.inttoptr(place, ADDRESS), stride)


def store_tile(builder, register, place, stride):
    call(builder, "llvm.x86.tilestored64", VOID, ir.Constant(I8, register), builder.inttoptr(place, ADDRESS), stride)


def _copy(builder, a, lda, height, rest, room, tall):
    """The last terms of each row, fewer than 32, with zeros behind them."""
    kind = ir.ArrayType(I8, tall * TILE_BYTES)
    builder.store(ir.Constant(kind, None), room)
    begin = builder.ptrtoint(room, I64)
    half = ir.PointerType(I16)
    with cgutils.for_range(builder, height) as row:
        source, target = builder.mul(row.index, lda), builder.mul(row.index, llvm_number(LINE))
        with cgutils.for_range(builder, rest) as term:
            at = builder.mul(term.index, llvm_number(2))
            given = builder.inttoptr(builder.add(builder.add(a, source), at), half)
            place = builder.inttoptr(builder.add(builder.add(begin, target), at), half)
            builder.store(builder.load(given, align=2), place, align=2)


class _Sums:
    """One register of sums, and where they lie in `c`: directly, or by way of `room` where columns are missing."""

    def __init__(self, builder, tall, wide, c, ldc, height, columns, room, row, panel):
        self.builder, self.register, self.ldc, self.room = builder, row * wide + panel, ldc, room
        self.place = builder.add(builder.add(c, builder.mul(ldc, llvm_number(TILE * row))), llvm_number(LINE * panel))
        self.rows = _least(builder, builder.sub(height, llvm_number(TILE * row)), llvm_number(TILE))
        self.mask = mask_of(builder, columns, panel)
        self.there = builder.icmp_signed(">", columns, llvm_number(TILE * panel))
        self.whole = builder.icmp_signed(">=", columns, llvm_number(TILE * (panel + 1)))

    def begin(self, fresh):
        builder = self.builder
        with builder.if_else(builder.or_(fresh, builder.not_(self.there))) as (new, old):
            with new:
                call(builder, "llvm.x86.tilezero", VOID, ir.Constant(I8, self.register))
            with old, builder.if_else(self.whole) as (directly, in_part):
                with directly:
                    load_tile(builder, self.register, self.place, self.ldc)
                with in_part:
                    for target, kept in self._each_row():
                        builder.store(load_some(builder, target, self.mask), kept, align=LINE)
                    load_tile(builder, self.register, builder.ptrtoint(self.room, I64), llvm_number(LINE))

    def end(self):
        builder = self.builder
        with builder.if_then(self.there), builder.if_else(self.whole) as (directly, in_part):
            with directly:
                store_tile(builder, self.register, self.place, self.ldc)
            with in_part:
                store_tile(builder, self.register, builder.ptrtoint(self.room, I64), llvm_number(LINE))
                for target, kept in self._each_row():
                    store_some(builder, builder.load(kept, align=LINE), target, self.mask)

    def _each_row(self):
        """Code for each row once: where it lies in `c` and in `room`."""
        builder = self.builder
        begin = builder.ptrtoint(self.room, I64)
        with cgutils.for_range(builder, self.rows) as loop:
            kept = builder.add(begin, builder.mul(loop.index, llvm_number(LINE)))
            yield (
                builder.inttoptr(builder.add(self.place, builder.mul(loop.index, self.ldc)), ir.PointerType(WIDE)),
                builder.inttoptr(kept, ir.PointerType(WIDE)),
            )


def _least(builder, a, b):
    return builder.select(builder.icmp_signed("<", a, b), a, b)


Kind = Literal["float32", "widened", "avx512", "amx"]
SIGNATURE = types.void(*[types.int64] * 8)
AT_ONCE = 160
"""Terms of a block's sums before the next block's turn: two panels of so many stay in the first-level cache."""

WIDTHS = (1, *[panels_for(rows) for rows in range(1, MOST_ROWS + 1)])


@functools.cache
def product_with(kind: Kind) -> Any:
    """The compiled product of this kind, to be called by its `address` (`cpu_intrinsics.call_product`)."""
    functions = {
        "float32": product_float32,
        "widened": product_widened,
        "avx512": product_avx512,
        "amx": product_amx,
    }
    return c_compiler(SOURCES, SIGNATURE, _nrt=False, error_model="numpy")(functions[kind])


def product_float32(rows, columns, inner, a, lda, panels, c, ldc):
    product("float32", rows, columns, inner, a, 4 * lda, 4, panels, LINE * inner, 1, c, 4 * ldc)


def product_widened(rows, columns, inner, a, lda, panels, c, ldc):
    apart = LINE // 2 * ((inner + TERMS - 1) // TERMS * TERMS)
    product("widened", rows, columns, inner, a, 4 * lda, 4, panels, apart, 2, c, 4 * ldc)


def product_avx512(rows, columns, inner, a, lda, panels, c, ldc):
    apart = LINE // 2 * ((inner + TERMS - 1) // TERMS * TERMS)
    product("avx512", rows, columns, inner, a, 2 * lda, 2, panels, apart, 2, c, 4 * ldc)


@inlined
def product(kind, rows, columns, inner, a, lda, size, panels, apart, terms, c, ldc):
    """The product in blocks of equal height, within a bit. `lda`, `ldc` and `apart` (of panels) in bytes; `size` is
    that of a value of `a` in bytes, and `terms` so many of each column are in a cache line of a panel.
    """
    count = (rows + MOST_ROWS - 1) // MOST_ROWS
    if count == 0:
        return
    step = WIDTHS[(rows + count - 1) // count] * TILE
    depth = AT_ONCE * terms if count > 1 else max(inner, 1)
    for begin in range(0, max(inner, 1), depth):
        some, fresh = min(depth, inner - begin), np.int64(begin == 0)
        lines = (some + terms - 1) // terms
        for column in range(0, columns, step):
            weight = panels + column // TILE * apart + LINE * (begin // terms)
            following = weight + step // TILE * apart
            if column + step >= columns:
                following = panels + LINE * ((begin + depth) // terms)
            stride, gap = LINE * (step // TILE) // count, LINE * (step // TILE) // count // 2
            if count == 1:  # nothing but memory keeps it waiting
                following, stride, gap = weight + LINE * LINES_AHEAD, LINE, apart
            for number in range(count):
                first, last = rows * number // count, rows * (number + 1) // count
                place = lines * (step // TILE) * number // count
                ahead = following + place // lines * apart + LINE * (place % lines)
                block(
                    kind, last - first, some, a + first * lda + begin * size, lda, weight, apart,
                    c + first * ldc + 4 * column, ldc, columns - column, fresh, ahead, gap, stride,
                )  # fmt: skip
