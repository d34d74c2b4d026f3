"""Products of weights of 8 or 4 bits with rows of 8 bits, exact within each group of terms.

A row's values are whole numbers from -127 to 127 times a scale of their group of GROUP terms (`quantise_row`). So are
weights of 8 bits, each column by itself; weights of 4 bits are whole numbers from 0 to 15 times a scale, and a minimum,
of each HALF of a group. The sum of a group's products is a whole number below 2²⁴, the same however it is computed: as
int32 by the processor's products of four bytes (VNNI), by its matrix unit, by products of two bytes in int16 (AVX2), or
in float32. Then groups are added up in order, scaled, by fused multiplications and additions. So bits depend neither on
the kind of product nor on what else is among the rows, on any processor.

A panel has 16 columns. For each group it has, of 8 bits, 16 lines of [16 columns, 4 terms] bytes and a line of float32
scales; of 4 bits, for each half, 4 lines of [16 columns, 4 + 4 terms], the first four in the lower halves of bytes, and
a line of pairs of bfloat16, a scale and, above it, a minimum. There are zeros behind the last term.

A row has its values, int8 or for the products in float32 float32, and then of each group four words: scale, -128 × the
sum of the values (int32), and the scale × the sum of the values of either half.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import Any, Literal

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpuinfer.models.kernel_cache import c_compiler
from gpuinfer.text.decoder.cpu_block import (
    BYTE,
    I16,
    LINE,
    LINES_AHEAD,
    MOST_ROWS,
    Pointers,
    call,
    each_sum,
    llvm_number,
    mask_of,
    panels_for,
    prefetch,
    store_some,
)
from gpuinfer.text.decoder.cpu_math import (
    BITS,
    F32,
    FEATURES,
    I32,
    I64,
    SOURCES,
    TILE,
    VOID,
    WIDE,
    WIDE_VECTORS,
    across,
    called,
    data_of,
    float_of,
    inlined,
    load_vector,
    own_function,
    splat,
    sum_of_none,
)
from gpuinfer.text.decoder.cpu_panels import kind_of_bfloat16
from gpuinfer.text.decoder.cpu_product import WIDTHS, configure, load_tile, release, store_tile
from gpuinfer.text.decoder.rounding import GROUP, HALF, LARGEST, TINY

WeightBits = Literal[8, 4]
RowKind = Literal["bytes", "floats"]
ProductKind = Literal["tiles", "vnni", "pairs", "floats"]
LINES = {8: 17, 4: 10}  # of a group of a panel
FACTS = 4  # words of a group of a row
VNNI = {"+avx512vnni", "+avxvnni"} & set(FEATURES.split(","))


def product_kinds(bits: WeightBits) -> list[ProductKind]:
    """How this processor can multiply rows with weights of so many bits, the fastest first."""
    kinds: list[ProductKind] = ["tiles"] if bits == 8 and VNNI and has_tiles() else []
    kinds += ["vnni"] if VNNI else []
    kinds += ["pairs"] if "+avx2" in FEATURES.split(",") else []
    return [*kinds, "floats"]


def row_kind(kind: ProductKind | None = None) -> RowKind:
    """What a kind of product takes rows as; None: the fastest here."""
    return "floats" if (kind or product_kinds(4)[0]) == "floats" else "bytes"


def groups_of(inner: int) -> int:
    return -(-inner // GROUP)


def row_length(inner: int, kind: RowKind) -> int:
    """Values that a row of so many terms takes, with what is behind them: whole cache lines."""
    size = 1 if kind == "bytes" else 4
    return -(-groups_of(inner) * (GROUP * size + 4 * FACTS) // LINE) * LINE // size


def quantised_panel_bytes(inner: int, bits: WeightBits) -> int:
    return groups_of(inner) * LINES[bits] * LINE


@called
def quantise_row(source, inner, out):
    """Put a row of so many terms, float32 or bfloat16, in `out`, int8 or float32 [`row_length`]. A group that has
    something else than finite numbers has a scale of NaN.
    """
    groups = (inner + GROUP - 1) // GROUP
    facts = out.ctypes.data + out.itemsize * GROUP * groups
    for group in range(groups):
        begin = group * GROUP
        quantise_group(source, begin, min(GROUP, inner - begin), out, facts + 4 * FACTS * group)


@intrinsic
def quantise_group(typing, source, begin, count, out, facts):
    """Of a row's group of `count` terms from `begin` on: its values, at the same place of `out`, and its four words at
    the address `facts`.
    """
    if not (isinstance(source, types.Array) and isinstance(out, types.Array)):
        return None

    def generate(context, builder, signature, values):
        given = data_of(context, builder, signature, values, 0)
        into, begin = data_of(context, builder, signature, values, 3), values[1]
        largest, numbers = _largest_of_group(builder, given, begin, values[2])
        bits = builder.bitcast(largest, I32)
        odd = builder.icmp_signed(">=", bits, ir.Constant(I32, 0x7F800000))
        none = builder.fcmp_ordered("<=", largest, ir.Constant(F32, float(np.float32(TINY))))
        top = ir.Constant(F32, float(LARGEST))
        scale = builder.select(none, ir.Constant(F32, 0.0), builder.fdiv(largest, top))
        scale = builder.select(odd, ir.Constant(F32, float("nan")), scale)
        inverse = builder.select(builder.or_(odd, none), ir.Constant(F32, 0.0), builder.fdiv(top, largest))
        sums = []
        for number, value in enumerate(numbers):
            value = builder.fmul(builder.select(odd, ir.Constant(WIDE, [0.0] * TILE), value), splat(builder, inverse))
            sign = builder.and_(builder.bitcast(value, BITS), _words(-0x80000000))
            half = builder.bitcast(builder.or_(sign, _words(0x3F000000)), WIDE)  # 0.5 of the value's sign
            whole = builder.fptosi(builder.fadd(value, half), BITS)
            place = builder.gep(into, [builder.add(begin, llvm_number(TILE * number))])
            stored = builder.sitofp(whole, WIDE) if out.dtype == types.float32 else builder.trunc(whole, BYTES)
            builder.store(stored, builder.bitcast(place, ir.PointerType(stored.type)), align=out.dtype.bitwidth // 8)
            sums.append(whole)
        low, upper = (
            across(builder, builder.add(first, second), builder.add) for first, second in (sums[:2], sums[2:])
        )
        offset = builder.mul(builder.add(low, upper), ir.Constant(I32, -128))
        scaled = [builder.fmul(scale, builder.sitofp(one, F32)) for one in (low, upper)]
        for number, word in enumerate((scale, offset, *scaled)):
            place = builder.inttoptr(builder.add(values[4], llvm_number(4 * number)), ir.PointerType(word.type))
            builder.store(word, place, align=4)
        return context.get_dummy_value()

    return types.void(source, types.int64, types.int64, out, types.int64), generate


BYTES = ir.VectorType(BYTE, TILE)
PAIRS_OF_BYTES = ir.VectorType(I16, 2 * TILE)


def _largest_of_group(builder, given, begin, count):
    """The largest magnitude of a group, and its values in four vectors of float32, zeros behind the last."""
    kept = [cgutils.alloca_once(builder, WIDE) for _ in range(GROUP // TILE)]
    with builder.if_else(builder.icmp_signed("==", count, llvm_number(GROUP))) as (full, part):
        with full:
            for number, place in enumerate(kept):
                builder.store(load_vector(builder, given, builder.add(begin, llvm_number(TILE * number))), place)
        with part:
            room = cgutils.alloca_once(builder, ir.ArrayType(given.type.pointee, GROUP))
            builder.store(ir.Constant(room.type.pointee, None), room)
            first = builder.gep(room, [ir.Constant(I32, 0), ir.Constant(I32, 0)])
            with cgutils.for_range(builder, count) as loop:
                value = builder.load(builder.gep(given, [builder.add(begin, loop.index)]))
                builder.store(value, builder.gep(first, [loop.index]))
            for number, place in enumerate(kept):
                builder.store(load_vector(builder, first, llvm_number(TILE * number)), place)
    numbers = [builder.load(place) for place in kept]
    top = None
    for value in numbers:  # as whole numbers, bits of magnitudes are in the same order
        magnitude = builder.and_(builder.bitcast(value, BITS), _words(0x7FFFFFFF))
        top = magnitude if top is None else _larger(builder, top, magnitude)
    return builder.bitcast(across(builder, top, partial(_larger, builder)), F32), numbers


def _larger(builder, a, b):
    return builder.select(builder.icmp_signed(">", a, b), a, b)


@inlined
def panel_value(panel, term, column, bits):
    """A value of a weight, float32, from its panel's address."""
    group, place = term // GROUP, term % GROUP
    if bits == 8:
        begin = panel + group * (17 * LINE)
        whole = load_as(begin + place // 4 * LINE + column * 4 + place % 4, np.int8)
        return np.float32(whole) * load_as(begin + 16 * LINE + 4 * column, np.float32)
    begin = panel + group * (10 * LINE) + place // HALF * (5 * LINE)
    place %= HALF
    byte = np.int32(load_as(begin + place // 8 * LINE + column * 4 + place % 4, np.uint8))
    whole = (byte >> (place // 4 % 2 * 4)) & 15
    pair = load_as(begin + 4 * LINE + 4 * column, np.int32)
    scale, least = float_of(pair << np.int32(16)), float_of(pair & np.int32(-65536))
    return np.float32(whole) * scale + least


@intrinsic
def load_as(typing, address, kind):
    """The number of this type at an address."""
    if not isinstance(kind, types.NumberClass):
        return None

    def generate(context, builder, signature, values):
        pointer = builder.inttoptr(values[0], ir.PointerType(context.get_data_type(kind.instance_type)))
        return builder.load(pointer, align=1)

    return kind.instance_type(types.int64, kind), generate


TILED_ROWS = 4  # with fewer, vectors are as fast as the matrix unit


@functools.cache
def quantised_product(bits: WeightBits, kind: ProductKind | None = None) -> Any:
    """The compiled product, as those of `cpu_product`: `lda` in values of a row. None: of the fastest kind here."""
    functions = {
        (8, "tiles"): product_8_tiles,
        (8, "vnni"): product_8_vnni,
        (8, "pairs"): product_8_pairs,
        (8, "floats"): product_8_floats,
        (4, "vnni"): product_4_vnni,
        (4, "pairs"): product_4_pairs,
        (4, "floats"): product_4_floats,
    }
    function = functions[bits, kind or product_kinds(bits)[0]]
    return c_compiler(SOURCES, types.void(*[types.int64] * 8), _nrt=False, error_model="numpy")(function)


def product_8_tiles(rows, columns, inner, a, lda, panels, c, ldc):
    if rows < TILED_ROWS:
        blocks(8, "vnni", 1, rows, columns, inner, a, lda, panels, c, ldc)
        return
    groups, configured = (inner + GROUP - 1) // GROUP, 0
    apart = groups * (17 * LINE)
    for column in range(0, columns, 2 * TILE):
        weight = panels + column // TILE * apart
        for row in range(0, rows, 2 * TILE):
            height = min(2 * TILE, rows - row)
            if height != configured:
                configure(height)
                configured = height
            into = c + 4 * (row * ldc + column)
            tiled_block(height, groups, a + row * lda, lda, weight, apart, into, 4 * ldc, columns - column)
    release()


def product_8_vnni(rows, columns, inner, a, lda, panels, c, ldc):
    blocks(8, "vnni", 1, rows, columns, inner, a, lda, panels, c, ldc)


def product_8_pairs(rows, columns, inner, a, lda, panels, c, ldc):
    blocks(8, "pairs", 1, rows, columns, inner, a, lda, panels, c, ldc)


def product_8_floats(rows, columns, inner, a, lda, panels, c, ldc):
    blocks(8, "floats", 4, rows, columns, inner, a, lda, panels, c, ldc)


def product_4_vnni(rows, columns, inner, a, lda, panels, c, ldc):
    blocks(4, "vnni", 1, rows, columns, inner, a, lda, panels, c, ldc)


def product_4_pairs(rows, columns, inner, a, lda, panels, c, ldc):
    blocks(4, "pairs", 1, rows, columns, inner, a, lda, panels, c, ldc)


def product_4_floats(rows, columns, inner, a, lda, panels, c, ldc):
    blocks(4, "floats", 4, rows, columns, inner, a, lda, panels, c, ldc)


@inlined
def blocks(bits, kind, size, rows, columns, inner, a, lda, panels, c, ldc):
    """The product in blocks of equal height, within a row. `size`: bytes of a row's value."""
    count = (rows + MOST_ROWS - 1) // MOST_ROWS
    if count == 0:
        return
    groups = (inner + GROUP - 1) // GROUP
    apart = groups * ((17 if bits == 8 else 10) * LINE)
    step = WIDTHS[(rows + count - 1) // count] * TILE
    for column in range(0, columns, step):
        weight = panels + column // TILE * apart
        for number in range(count):
            first, last = rows * number // count, rows * (number + 1) // count
            quantised_block(
                bits, kind, last - first, groups, a + first * lda * size, lda * size, weight, apart,
                c + 4 * (first * ldc + column), 4 * ldc, columns - column,
            )  # fmt: skip


@functools.cache
def has_tiles() -> bool:
    """Whether the processor's matrix unit multiplies bytes, and may be used."""
    return "+amx-int8" in FEATURES.split(",") and kind_of_bfloat16() == "amx"


@intrinsic
def tiled_block(typing, rows, groups, a, lda, panels, apart, c, ldc, columns):
    """c = a · two panels of 8 bits, of 1 to 32 rows, by the matrix unit: `configure` has been called for them."""

    def generate(context, builder, signature, values):
        tall = builder.icmp_signed(">", values[0], llvm_number(TILE))
        with builder.if_else(tall) as (two, one):
            for count, branch in ((2, two), (1, one)):
                with branch:
                    write = partial(_write_tiled, count)
                    builder.call(own_function(builder.module, f"tiled_block_{count}", 9, write), values)
        return context.get_dummy_value()

    return types.void(*[types.int64] * 9), generate


def _write_tiled(tall, builder, rows, groups, a, lda, weight, apart, c, ldc, columns):
    """Tiles of whole numbers go by way of memory into sums of float32, group by group, as `_add_group` adds them."""
    number, size = llvm_number, TILE * LINE
    kinds = (BITS, WIDE)
    whole, sums = (cgutils.alloca_once(builder, ir.ArrayType(kind, 2 * tall * TILE)) for kind in kinds)
    for room in (whole, sums):
        room.align = LINE
    builder.store(ir.Constant(sums.type.pointee, None), sums)
    whole_at, sums_at = (builder.ptrtoint(room, I64) for room in (whole, sums))
    lone = builder.icmp_signed("<=", columns, number(TILE))  # the second panel is not there: the first again
    weights = [weight, builder.add(weight, builder.select(lone, number(0), apart))]
    heights = [rows] if tall == 1 else [number(TILE), builder.sub(rows, number(TILE))]
    facts = builder.add(a, builder.mul(groups, number(GROUP)))
    with cgutils.for_range(builder, groups) as loop:
        line = builder.mul(loop.index, number(LINE))
        begin = builder.mul(loop.index, number(LINES[8] * LINE))
        for tile in range(tall):
            place = builder.add(builder.add(a, builder.mul(lda, number(TILE * tile))), line)
            load_tile(builder, 4 + tile, place, lda)
        for panel in range(2):
            load_tile(builder, 6 + panel, builder.add(weights[panel], begin), number(LINE))
            for tile in range(tall):
                register = 2 * tile + panel
                call(builder, "llvm.x86.tilezero", VOID, ir.Constant(BYTE, register))
                given = [ir.Constant(BYTE, one) for one in (register, 4 + tile, 6 + panel)]
                call(builder, "llvm.x86.tdpbssd", VOID, *given)
                store_tile(builder, register, builder.add(whole_at, number(register * size)), number(LINE))
        scales = []
        for panel in range(2):
            at = builder.add(builder.add(weights[panel], begin), number(16 * LINE))
            scales.append(builder.load(builder.inttoptr(at, ir.PointerType(WIDE)), align=4))
        own = builder.add(facts, builder.mul(loop.index, number(4 * FACTS)))
        for tile in range(tall):
            first = builder.add(own, builder.mul(lda, number(TILE * tile)))
            with cgutils.for_range(builder, heights[tile]) as row:
                place = builder.add(first, builder.mul(row.index, lda))
                scale = splat(builder, builder.load(builder.inttoptr(place, ir.PointerType(F32)), align=4))
                offset = builder.mul(row.index, number(LINE))
                for panel in range(2):
                    there = builder.add(offset, number((2 * tile + panel) * size))
                    read = builder.inttoptr(builder.add(whole_at, there), ir.PointerType(BITS))
                    total = builder.inttoptr(builder.add(sums_at, there), ir.PointerType(WIDE))
                    found = builder.sitofp(builder.load(read, align=LINE), WIDE)
                    both = builder.fmul(scales[panel], scale)
                    builder.store(_fused(builder, found, both, builder.load(total, align=LINE)), total, align=LINE)
    masks = [mask_of(builder, columns, panel) for panel in range(2)]
    for tile in range(tall):
        target = builder.add(c, builder.mul(ldc, number(TILE * tile)))
        with cgutils.for_range(builder, heights[tile]) as row:
            place, offset = builder.add(target, builder.mul(row.index, ldc)), builder.mul(row.index, number(LINE))
            for panel in range(2):
                there = builder.add(offset, number((2 * tile + panel) * size))
                total = builder.load(builder.inttoptr(builder.add(sums_at, there), ir.PointerType(WIDE)), align=LINE)
                into = builder.inttoptr(builder.add(place, number(panel * LINE)), ir.PointerType(WIDE))
                store_some(builder, total, into, masks[panel])


@intrinsic
def quantised_block(typing, bits, kind, rows, groups, a, lda, panels, apart, c, ldc, columns):
    """c = a · panels, as `cpu_block.block`, of weights of so many `bits` by a `kind` of product, both literals."""
    if not isinstance(bits, types.IntegerLiteral) or not isinstance(kind, types.StringLiteral):
        return None

    def generate(context, builder, signature, values):
        done = builder.append_basic_block("done")
        choice = builder.switch(values[2], done)
        for count in range(1, MOST_ROWS + 1):
            case = builder.append_basic_block(f"rows{count}")
            choice.add_case(llvm_number(count), case)
            builder.position_at_end(case)
            name = f"quantised_{bits.literal_value}_{kind.literal_value}_{count}"
            write = partial(_write, bits.literal_value, kind.literal_value, count, panels_for(count))
            builder.call(own_function(builder.module, name, 8, write), values[3:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(bits, kind, *[types.int64] * 9), generate


def _write(bits, kind, rows, panels, builder, groups, a, lda, weight, apart, c, ldc, columns):
    """A group's sums are kept in registers, and added to those of all groups at its end."""
    there = builder.udiv(builder.add(columns, llvm_number(TILE - 1)), llvm_number(TILE))
    size = 4 if kind == "floats" else 1
    values = Pointers.of_rows(builder, a, lda, rows)
    behind = builder.add(a, builder.mul(groups, llvm_number(size * GROUP)))
    facts = Pointers.of_rows(builder, behind, lda, rows)
    weights = Pointers.of_panels(builder, weight, apart, panels, there)
    sums = [[sum_of_none(builder) for _ in range(panels)] for _ in range(rows)]
    part_kind = {"floats": WIDE, "vnni": BITS, "pairs": BITS if bits == 8 else PAIRS_OF_BYTES}[kind]
    parts = [[cgutils.alloca_once(builder, part_kind) for _ in range(panels)] for _ in range(rows)]
    lines = 16 if bits == 8 else 4
    with cgutils.for_range_slice(builder, llvm_number(0), groups, llvm_number(1)):
        for half in range(1 if bits == 8 else 2):
            for place, row in zip(facts.places(), parts, strict=True):
                begin = ir.Constant(part_kind, None)
                if bits == 8 and kind == "vnni":
                    begin = _splat_word(builder, _at(builder, place, 4, I32))
                for part in row:
                    builder.store(begin, part)
            with cgutils.for_range_slice(builder, llvm_number(0), llvm_number(lines), llvm_number(1)) as (line, _):
                offset = builder.mul(line, llvm_number(LINE))
                places = [builder.gep(place, [offset]) for place in weights.places()]
                read = [builder.load(builder.bitcast(place, ir.PointerType(BITS)), align=4) for place in places]
                if panels > 2 or rows <= 2:
                    for place in places:
                        prefetch(builder, builder.ptrtoint(builder.gep(place, [llvm_number(LINE * LINES_AHEAD)]), I64))
                terms = builder.mul(line, llvm_number(size * (4 if bits == 8 else 8)))
                _add_line(builder, bits, kind, [builder.gep(place, [terms]) for place in values.places()], read, parts)
            _add_group(builder, bits, half, facts.places(), weights.places(), parts, sums)
            values.move(llvm_number(size * (GROUP if bits == 8 else HALF)))
            weights.move(llvm_number(LINE * (LINES[8] if bits == 8 else LINES[4] // 2)))
        facts.move(llvm_number(4 * FACTS))
    targets = [builder.add(c, builder.mul(ldc, llvm_number(row))) for row in range(rows)]
    whole = builder.icmp_signed(">=", columns, llvm_number(panels * TILE))
    each_sum(
        builder, targets, sums, columns, whole,
        lambda place, total: builder.store(builder.load(total), place, align=4),
        lambda place, total, mask: store_some(builder, builder.load(total), place, mask),
    )  # fmt: skip


def _add_line(builder, bits, kind, values, read, parts):
    """Add the products of a line's terms: 4 of 8 bits, or 4 and 4 of 4 bits."""
    if kind == "floats":
        _add_floats(builder, bits, values, read, parts)
        return
    if bits == 8:
        sides = [read]
        if kind == "vnni":  # which takes weights from 0 to 255
            sides = [[builder.xor(line, _words(-0x7F7F7F80)) for line in read]]
    else:
        low = [builder.and_(line, _words(0x0F0F0F0F)) for line in read]
        sides = [low, [builder.and_(builder.lshr(line, _words(4)), _words(0x0F0F0F0F)) for line in read]]
    add = {("vnni", 8): _fours_added, ("vnni", 4): _fours_added, ("pairs", 8): _signed_pairs_added}
    for number, side in enumerate(sides):
        for place, row in zip(values, parts, strict=True):
            four = _splat_word(builder, _at(builder, place, 4 * number, I32))
            for part, line in zip(row, side, strict=True):
                found = add.get((kind, bits), _pairs_added)(builder, builder.load(part), line, four)
                builder.store(found, part)


def _add_floats(builder, bits, values, read, parts):
    for term in range(4 if bits == 8 else 8):
        if bits == 8:
            spread = [builder.shl(line, _words(24 - 8 * term)) for line in read]
            floats = [builder.sitofp(builder.ashr(line, _words(24)), WIDE) for line in spread]
        else:
            shift = _words(8 * (term % 4) + term // 4 * 4)
            spread = [builder.and_(builder.lshr(line, shift), _words(15)) for line in read]
            floats = [builder.sitofp(line, WIDE) for line in spread]
        for place, row in zip(values, parts, strict=True):
            value = splat(builder, _at(builder, place, 4 * term, F32))
            for part, weight in zip(row, floats, strict=True):
                builder.store(_fused(builder, value, weight, builder.load(part)), part)


def _add_group(builder, bits, half, facts, weights, parts, sums):
    """sums += the group's sums, scaled by the scales of row and column; of 4 bits with what the minimum adds."""
    scales, least = [], []
    for place in weights:
        at = builder.gep(place, [llvm_number(LINE * (16 if bits == 8 else 4))])
        word = builder.load(builder.bitcast(at, ir.PointerType(BITS)), align=4)
        if bits == 8:
            scales.append(builder.bitcast(word, WIDE))
        else:
            scales.append(builder.bitcast(builder.shl(word, _words(16)), WIDE))
            least.append(builder.bitcast(builder.and_(word, _words(-65536)), WIDE))
    for place, row, totals in zip(facts, parts, sums, strict=True):
        scale = splat(builder, _at(builder, place, 0, F32))
        for panel, (part, total) in enumerate(zip(row, totals, strict=True)):
            found = builder.load(part)
            if found.type == PAIRS_OF_BYTES:
                found = _sums_of_pairs(builder, found)
            found = found if found.type == WIDE else builder.sitofp(found, WIDE)
            both = _fused(builder, found, builder.fmul(scales[panel], scale), builder.load(total))
            if bits == 4:
                side = splat(builder, _at(builder, place, 8 + 4 * half, F32))
                both = _fused(builder, least[panel], side, both)
            builder.store(both, total)


def _fours_added(builder, total, unsigned, signed):
    """total int32 + the sums of four products of bytes each."""
    if WIDE_VECTORS and "+avx512vnni" in VNNI:
        return call(builder, "llvm.x86.avx512.vpdpbusd.512", BITS, total, unsigned, signed)
    return _by_halves(builder, "llvm.x86.avx512.vpdpbusd.256", I32, total, unsigned, signed)


def _pairs_added(builder, total, unsigned, signed):
    """total int16 + the sums of two products of bytes each. 16 of at most 15 · 127 are below 2¹⁵."""
    found = _by_halves(
        builder, "llvm.x86.avx2.pmadd.ub.sw", I16, *(_as(builder, one, BYTE) for one in (unsigned, signed))
    )
    return builder.add(total, found)


def _signed_pairs_added(builder, total, weight, signed):
    """total int32 + the sums of four products of bytes each. Two of at most 127² are below 2¹⁵: the weight's sign goes
    to the other factor.
    """
    weight, signed = _as(builder, weight, BYTE), _as(builder, signed, BYTE)
    magnitude = call(builder, "llvm.abs.v64i8", weight.type, weight, ir.Constant(ir.IntType(1), 0))
    turned = _by_halves(builder, "llvm.x86.avx2.psign.b", BYTE, signed, weight)
    found = _by_halves(builder, "llvm.x86.avx2.pmadd.ub.sw", I16, magnitude, turned)
    return builder.add(total, _sums_of_pairs(builder, found))


def _sums_of_pairs(builder, found):
    """int32: of int16, each two side by side."""
    return _by_halves(builder, "llvm.x86.avx2.pmadd.wd", I32, found, ir.Constant(found.type, [1] * found.type.count))


def _by_halves(builder, name, kind, *vectors):
    """What a function of vectors of 32 bytes gives, values of `kind`, of vectors of 64."""
    found = []
    for half in range(2):
        given = []
        for vector in vectors:
            count = vector.type.count // 2
            places = ir.Constant(ir.VectorType(I32, count), list(range(half * count, (half + 1) * count)))
            given.append(builder.shuffle_vector(vector, vector, places))
        found.append(call(builder, name, ir.VectorType(kind, 256 // kind.width), *given))
    count = 512 // kind.width
    return builder.shuffle_vector(*found, ir.Constant(ir.VectorType(I32, count), list(range(count))))


def _as(builder, vector, kind):
    return builder.bitcast(vector, ir.VectorType(kind, 512 // kind.width))


def _fused(builder, a, b, c):
    return call(builder, "llvm.fma.v16f32", WIDE, a, b, c)


def _at(builder, place, offset, kind):
    return builder.load(builder.bitcast(builder.gep(place, [llvm_number(offset)]), ir.PointerType(kind)), align=4)


def _splat_word(builder, word):
    first = builder.insert_element(ir.Constant(BITS, ir.Undefined), word, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(BITS, ir.Undefined), _words(0))


def _words(value):
    return ir.Constant(BITS, [value] * TILE)
