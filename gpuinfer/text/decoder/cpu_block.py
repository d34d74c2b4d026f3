"""The inner loop of a matrix product: the sums of some rows times some panels of 16 columns, kept in registers.

Of each number of rows up to `most_rows` there is one function, so that no work is done for rows that are not there.
Every sum takes its terms one by one, in order: its bits depend on its row and its column alone, neither on what else is
in the block nor on how wide the processor's vectors are.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from gpuinfer.text.decoder.cpu_math import (
    BITS,
    F32,
    I32,
    I64,
    TILE,
    VOID,
    WIDE,
    WIDE_VECTORS,
    own_function,
    splat,
    sum_of_none,
)

BYTE, I16, BIT = ir.IntType(8), ir.IntType(16), ir.IntType(1)
ADDRESS = ir.PointerType(BYTE)
LINE = 64  # bytes of a cache line: 16 columns of float32, or of a pair of bfloat16
MASK = ir.VectorType(BIT, TILE)
LINES_AHEAD = 16  # in a panel, where it is read once: processors look ahead within 4 KiB by themselves
PER_POINTER = 3  # rows that one pointer serves: x86 adds once or twice a register to it for nothing

MOST_ROWS = 12 if WIDE_VECTORS else 6
"""Sums fill 24 of 32 registers with two panels, or 12 of 16 with one whose columns take two."""


def panels_for(rows: int) -> int:
    """How many panels a block of so many rows takes: at least 8 sums are under way at once, as an addition takes 4
    cycles and two begin in each. Blocks of the same product take equally many: those of half of `MOST_ROWS` and more.
    """
    wide = {1: 8, 2: 8, 3: 4, 4: 4}
    narrow = {1: 4, 2: 2}
    return wide.get(rows, 2) if WIDE_VECTORS else narrow.get(rows, 1)


@intrinsic
def block(typing, kind, rows, inner, a, lda, panels, apart, c, ldc, columns, fresh, ahead, gap, stride):
    """c = a · panels where `fresh` is 1, c += a · panels where it is 0, with `rows` from 1 to `MOST_ROWS`.

    kind:    a literal, "float32", "widened" or "avx512" (`cpu_product`)
    inner:   terms of each sum
    a, c:    addresses of the first row; rows lie `lda` and `ldc` bytes apart
    panels:  address of the first of `panels_for(rows)` panels, which lie `apart` bytes from one another
    columns: how many there are from the first panel on; panels and columns beyond are neither read nor written
    ahead:   address of what is needed next: with each line of a panel the cache lines `stride` bytes further, and
             `gap` bytes from there, are asked for; but for some few rows, which look ahead in these panels themselves
    """
    if not isinstance(kind, types.StringLiteral):
        return None

    def generate(context, builder, signature, values):
        done = builder.append_basic_block("done")
        choice = builder.switch(values[1], done)
        for count in range(1, MOST_ROWS + 1):
            case = builder.append_basic_block(f"rows{count}")
            choice.add_case(llvm_number(count), case)
            builder.position_at_end(case)
            write = partial(_write, kind.literal_value, count, panels_for(count))
            builder.call(own_function(builder.module, f"block_{kind.literal_value}_{count}", 12, write), values[2:])
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 13), generate


def _write(kind, rows, panels, builder, inner, a, lda, weight, apart, c, ldc, columns, fresh, ahead, gap, stride):
    there = builder.udiv(builder.add(columns, llvm_number(TILE - 1)), llvm_number(TILE))
    sides = Pointers.of_rows(builder, a, lda, rows)
    weights = Pointers.of_panels(builder, weight, apart, panels, there)
    next_lines = _Moving(builder, ahead)
    targets = [builder.add(c, builder.mul(ldc, llvm_number(row))) for row in range(rows)]
    sums = [[sum_of_none(builder) for _ in range(panels)] for _ in range(rows)]
    whole = builder.icmp_signed(">=", columns, llvm_number(panels * TILE))
    with builder.if_then(builder.icmp_unsigned("==", fresh, llvm_number(0))):
        # Sums go on from what stands in c.
        each_sum(
            builder, targets, sums, columns, whole,
            lambda place, total: builder.store(builder.load(place, align=4), total),
            lambda place, total, mask: builder.store(load_some(builder, place, mask), total),
        )  # fmt: skip
    terms = 1 if kind == "float32" else 2
    steps = builder.udiv(inner, llvm_number(terms))
    with cgutils.for_range_slice(builder, llvm_number(0), steps, llvm_number(1)):
        _add(builder, kind, sides, weights, sums)
        if panels > 2:  # so few rows that a panel is read once
            asked = [builder.gep(place, [llvm_number(LINE * LINES_AHEAD)]) for place in weights.places()]
        else:
            asked = [next_lines.value(), builder.gep(next_lines.value(), [gap])][:panels]
        for place in asked:
            prefetch(builder, builder.ptrtoint(place, I64))
        next_lines.move(stride)
        sides.move(llvm_number(4 if kind in ("float32", "avx512") else 8))
        weights.move(llvm_number(LINE))
    if terms == 2:
        odd = builder.icmp_unsigned("!=", builder.and_(inner, llvm_number(1)), llvm_number(0))
        with builder.if_then(odd, likely=False):
            _add(builder, kind, sides, weights, sums, last=True)
    each_sum(
        builder, targets, sums, columns, whole,
        lambda place, total: builder.store(builder.load(total), place, align=4),
        lambda place, total, mask: store_some(builder, builder.load(total), place, mask),
    )  # fmt: skip


def each_sum(builder, targets, sums, columns, whole, plainly, masked):
    """Between c and the sums: `plainly(place, total)` of whole panels, else `masked(place, total, mask)`. Masks are for
    the last columns alone: AVX2 is slow at them.
    """

    def places():
        for target, totals in zip(targets, sums, strict=True):
            for panel, total in enumerate(totals):
                at = builder.add(target, llvm_number(LINE * panel))
                yield builder.inttoptr(at, ir.PointerType(WIDE)), total, panel

    with builder.if_else(whole) as (all_columns, some_columns):
        with all_columns:
            for place, total, _ in places():
                plainly(place, total)
        with some_columns:
            masks = [mask_of(builder, columns, panel) for panel in range(len(sums[0]))]
            for place, total, panel in places():
                masked(place, total, masks[panel])


def _add(builder, kind, sides, weights, sums, last=False):
    """Add the next term of every sum, or the next two."""
    lines = [builder.load(_cast(builder, place, _stored(kind)), align=4) for place in weights.places()]
    if kind == "avx512":
        for place, totals in zip(sides.places(), sums, strict=True):
            pair = _spread(builder, _pair(builder, place, last))
            for total, line in zip(totals, lines, strict=True):
                builder.store(_products_of_pairs(builder, builder.load(total), pair, line), total)
        return
    parts = [lines] if kind == "float32" else [[_even(builder, line) for line in lines]]
    if kind == "widened" and not last:
        parts.append([_odd(builder, line) for line in lines])
    for part, terms in enumerate(parts):
        for place, totals in zip(sides.places(), sums, strict=True):
            at = builder.gep(place, [llvm_number(4 * part)])
            value = splat(builder, builder.load(_cast(builder, at, F32), align=4))
            for total, term in zip(totals, terms, strict=True):
                builder.store(call(builder, "llvm.fma.v16f32", WIDE, value, term, builder.load(total)), total)


def _stored(kind):
    return WIDE if kind == "float32" else BITS


def _even(builder, line):
    return builder.bitcast(builder.shl(line, ir.Constant(BITS, [16] * TILE)), WIDE)


def _odd(builder, line):
    return builder.bitcast(builder.and_(line, ir.Constant(BITS, [0xFFFF0000] * TILE)), WIDE)


def _pair(builder, place, last):
    """Two values of bfloat16 of a row, or the last one and a zero."""
    if not last:
        return builder.load(_cast(builder, place, I32), align=2)
    return builder.zext(builder.load(_cast(builder, place, I16), align=2), I32)


def _spread(builder, word):
    first = builder.insert_element(ir.Constant(BITS, ir.Undefined), word, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(BITS, ir.Undefined), ir.Constant(BITS, [0] * TILE))


class _BFloat16(ir.Type):
    """llvmlite has no name for it."""

    def _to_string(self):
        return "bfloat"

    def __eq__(self, other):
        return isinstance(other, _BFloat16)

    def __hash__(self):
        return hash(_BFloat16)


PAIRS = ir.VectorType(_BFloat16(), 2 * TILE)


def _products_of_pairs(builder, total, pair, line):
    given = [builder.bitcast(pair, PAIRS), builder.bitcast(line, PAIRS)]
    return call(builder, "llvm.x86.avx512bf16.dpbf16ps.512", WIDE, total, *given)


def load_some(builder, place, mask):
    """The values of 16 that the mask has, zeros for the others, which are not read."""
    zeros = ir.Constant(WIDE, [0.0] * TILE)
    return call(builder, "llvm.masked.load.v16f32.p0", WIDE, place, ir.Constant(I32, 4), mask, zeros)


def store_some(builder, vector, place, mask):
    call(builder, "llvm.masked.store.v16f32.p0", VOID, vector, place, ir.Constant(I32, 4), mask)


def mask_of(builder, columns, panel):
    """Which of a panel's 16 columns are there."""
    lanes = ir.VectorType(I64, TILE)
    first = builder.insert_element(ir.Constant(lanes, ir.Undefined), columns, ir.Constant(I32, 0))
    spread = builder.shuffle_vector(first, ir.Constant(lanes, ir.Undefined), ir.Constant(BITS, [0] * TILE))
    numbers = ir.Constant(lanes, [panel * TILE + lane for lane in range(TILE)])
    return builder.icmp_signed("<", numbers, spread)


def prefetch(builder, address):
    """Have the cache line with this address brought to the second-level cache."""
    read, second_level, data = ir.Constant(I32, 0), ir.Constant(I32, 2), ir.Constant(I32, 1)
    call(builder, "llvm.prefetch.p0", VOID, builder.inttoptr(address, ADDRESS), read, second_level, data)


class _Moving:
    """A pointer that moves on with each step."""

    def __init__(self, builder, address):
        self._builder = builder
        self._kept = cgutils.alloca_once_value(builder, builder.inttoptr(address, ADDRESS))

    def value(self):
        return self._builder.load(self._kept)

    def move(self, step):
        self._builder.store(self._builder.gep(self.value(), [step]), self._kept)


@dataclass
class Pointers:
    """Pointers to rows, or panels, that move on together: one for each three, and distances from it."""

    builder: ir.IRBuilder
    moving: list[_Moving]
    offsets: list[tuple[int, ir.Value]]  # of each row: its pointer's number, and the distance from there

    @classmethod
    def of_rows(cls, builder, a, lda, rows):
        firsts = range(0, rows, PER_POINTER)
        moving = [_Moving(builder, builder.add(a, builder.mul(lda, llvm_number(row)))) for row in firsts]
        distances = [llvm_number(0), lda, builder.mul(lda, llvm_number(2))]
        return cls(builder, moving, [(row // PER_POINTER, distances[row % PER_POINTER]) for row in range(rows)])

    @classmethod
    def of_panels(cls, builder, weight, apart, panels, there):
        """The last panel again for those that are not there."""
        last = builder.sub(there, llvm_number(1))
        moving = []
        for panel in range(panels):
            within = builder.icmp_signed("<", llvm_number(panel), last)
            at = builder.select(within, llvm_number(panel), last)
            moving.append(_Moving(builder, builder.add(weight, builder.mul(at, apart))))
        return cls(builder, moving, [(panel, llvm_number(0)) for panel in range(panels)])

    def places(self):
        starts = [pointer.value() for pointer in self.moving]
        return [self.builder.gep(starts[number], [distance]) for number, distance in self.offsets]

    def move(self, step):
        for pointer in self.moving:
            pointer.move(step)


def _cast(builder, place, kind):
    return builder.bitcast(place, ir.PointerType(kind))


def call(builder, name, result, *values):
    """Call a function of LLVM by its name."""
    kind = ir.FunctionType(result, [value.type for value in values])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), values)


def llvm_number(value):
    return ir.Constant(I64, value)
