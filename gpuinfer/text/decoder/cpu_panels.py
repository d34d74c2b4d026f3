"""Weights in the layout that products read, panels of 16 columns side by side for each term of their sums; memory in
large pages for them and for the cache; and what multiplies bfloat16 here: the processor's matrix unit (AMX), its
vectors (AVX512-BF16), or nothing.

A weight [out, in] of float32 is [out / 16, in, 16]; of bfloat16 [out / 16, in / 2, 16, 2], pairs of terms side by side,
as the processor's products of bfloat16 take them. There are zeros behind the last row, and behind the last term of
bfloat16 up to a multiple of 32, which is what a tile of the matrix unit holds.

Large pages take fewer entries of the processor's page table cache, and fewer page faults. Which unit multiplies follows
from what Numba compiles for, other libraries' switches, and the system's permission, never from a measurement: a run
that is resumed computes as it began.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import platform
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, Literal

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from gpuinfer.host import machine
from gpuinfer.host.process_memory import consecutive_runs, give_back
from gpuinfer.models import processor
from gpuinfer.models.kernel_cache import c_compiler
from gpuinfer.text.decoder.cpu_math import BITS, FEATURES, I32, I64, SOURCES, TILE

LINE = 64  # bytes: pages of a cache begin where a line of the processor's does
LARGE = 1 << 21  # bytes: a large page of memory
CHUNK = 64 << 20  # bytes that an arena maps at once, at least


def map_memory(size: int) -> NDArray[np.uint8]:
    """So many bytes, zero, that begin with a large page of memory. They are resident once they are written."""
    memory = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # of a kernel that has no large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    room = np.frombuffer(memory, np.uint8)
    start = -room.ctypes.data % LARGE
    return room[start : start + size]


class MemoryArena:
    """Memory for many arrays that are given up together, one behind the other in large pages."""

    def __init__(self) -> None:
        self._left: NDArray[np.uint8] = np.zeros(0, np.uint8)

    def take(self, size: int) -> NDArray[np.uint8]:
        """So many bytes, zero, that begin where a line of the processor's cache does."""
        if size > len(self._left):
            self._left = map_memory(max(size, CHUNK))
        found = self._left[:size]
        self._left = self._left[-(-size // LINE) * LINE :]
        return found


class CachePool:
    """`pages` pages of `page_bytes` bytes each, all zero at first. Memory is resident as far as pages were written."""

    def __init__(self, pages: int, page_bytes: int) -> None:
        self.page_bytes = -(-page_bytes // LINE) * LINE
        self._pages = map_memory(pages * self.page_bytes).reshape(pages, self.page_bytes)
        self.address = self._pages.ctypes.data

    @property
    def nbytes(self) -> int:
        return self._pages.nbytes

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        for source, target in zip(sources, targets, strict=True):
            self._pages[target] = self._pages[source]

    def give_back(self, pages: Sequence[int]) -> None:
        """The system may have the memory of these pages until they are written again."""
        for first, last in consecutive_runs(pages):
            give_back(self.address + first * self.page_bytes, (last - first) * self.page_bytes)

    def fill(self) -> None:
        """Make all of it zero, and resident."""
        self._pages[...] = 0


ALIGNED = 64  # bytes: a cache line
TERMS = 32  # of bfloat16 in a row of a tile
SHARED_FROM = 1 << 20  # bytes of a weight that more than one thread packs


def panel_bytes(inner: int, size: int) -> int:
    """How many bytes one panel takes, of values of `size` bytes: 4 for float32, 2 for bfloat16."""
    terms = -(-inner // TERMS) * TERMS if size == 2 else inner
    return terms * TILE * size


def panels_of(weight: torch.Tensor, arena: MemoryArena | None = None, pool: Executor | None = None) -> NDArray[Any]:
    """A weight [out, in], float32 or bfloat16, in panels: [out / 16, `panel_bytes` / its values' size], on cache lines.

    bfloat16 is there as its bits in uint16. They lie in the `arena`, or by themselves. The threads of the `pool`, if
    there is one, share a large weight.
    """
    out, inner = weight.shape
    source = weight.detach()
    if source.stride(1) != 1:
        source = source.contiguous()
    half = source.dtype == torch.bfloat16
    size = source.element_size()
    count, each = -(-out // TILE), panel_bytes(inner, size)
    room = aligned((count * each,), np.uint8) if arena is None else arena.take(count * each)
    panels: NDArray[Any] = room.view(np.uint16 if half else np.float32).reshape(count, each // size)
    pack = _packer().ctypes

    def some(first: int, end: int) -> None:
        pack(size, out, inner, source.data_ptr(), size * source.stride(0), panels.ctypes.data, each, first, end)

    if pool is None or panels.nbytes < SHARED_FROM:
        some(0, count)
    else:
        parts = min(machine.cores(), count)
        bounds = [count * part // parts for part in range(parts + 1)]
        list(pool.map(some, bounds[:-1], bounds[1:]))
    return panels


def weight_in(panels: NDArray[Any], out: int, inner: int) -> torch.Tensor:
    """The weight [out, inner] that `panels_of` has packed, a copy."""
    half = panels.dtype == np.uint16
    pair = 2 if half else 1
    stored = torch.from_numpy(panels.view(np.int16) if half else panels).view(len(panels), -1, TILE, pair)
    found = stored.permute(0, 2, 1, 3).reshape(len(panels) * TILE, -1)[:out, :inner].contiguous()
    return found.view(torch.bfloat16) if half else found


def aligned(shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
    """An array, its values as they come, that begins where a cache line does; a large one in large pages of memory."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    if size >= 8 * LARGE:
        large: NDArray[Any] = map_memory(size).view(dtype).reshape(shape)
        return large
    room = np.empty(size + ALIGNED, np.uint8)
    start = -room.ctypes.data % ALIGNED
    found: NDArray[Any] = room[start : start + size].view(dtype).reshape(shape)
    return found


@functools.cache
def _packer() -> Any:
    """void pack(size, out, inner, source, stride, panels, each, first, end): panels from `first` to before `end`, each
    of so many bytes, of a weight [out, inner] whose rows lie `stride` bytes apart.
    """
    return c_compiler(SOURCES, types.void(*[types.int64] * 9), _nrt=False, error_model="numpy")(_pack)


def _pack(size, out, inner, source, stride, panels, each, first, end):  # type: ignore[no-untyped-def]
    words, line = inner * size // 4, 4 * TILE  # a word is one float32, or a pair of bfloat16
    for panel in range(first, end):
        rows = min(TILE, out - panel * TILE)
        begin, into = source + panel * TILE * stride, panels + panel * each
        if rows == TILE:
            for word in range(words):
                put_column(begin + 4 * word, stride, into + line * word)
        else:
            for word in range(words):
                for row in range(TILE):
                    put_word(begin + row * stride + 4 * word, row < rows, 4, into + line * word + 4 * row)
        for word in range(words, each // line):
            for row in range(TILE):
                odd = row < rows and word == words and inner * size % 4 != 0
                put_word(begin + row * stride + 4 * word, odd, 2, into + line * word + 4 * row)


@intrinsic
def put_column(typing, source, stride, target):  # type: ignore[no-untyped-def]
    """Put 16 words that lie `stride` bytes apart side by side, past the caches: they are not read soon."""

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        source, stride, target = values
        words = ir.Constant(BITS, ir.Undefined)
        for row in range(TILE):
            place = builder.add(source, builder.mul(stride, ir.Constant(I64, row)))
            word = builder.load(builder.inttoptr(place, ir.PointerType(I32)), align=2)
            words = builder.insert_element(words, word, ir.Constant(I32, row))
        stored = builder.store(words, builder.inttoptr(target, ir.PointerType(BITS)), align=ALIGNED)
        stored.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(I32, 1)]))
        return context.get_dummy_value()

    return types.void(*[types.int64] * 3), generate


@intrinsic
def put_word(typing, source, there, size, target):  # type: ignore[no-untyped-def]
    """Put the word at an address, 4 bytes or the 2 bytes of a lower half, or zero where nothing is there to read."""
    if not isinstance(size, types.IntegerLiteral):
        return None

    def generate(context, builder, signature, values):  # type: ignore[no-untyped-def]
        source, there, _, target = values
        kind = ir.IntType(8 * size.literal_value)
        place = builder.inttoptr(target, ir.PointerType(I32))
        builder.store(ir.Constant(I32, 0), place)
        with builder.if_then(there):
            value = builder.load(builder.inttoptr(source, ir.PointerType(kind)), align=2)
            builder.store(builder.zext(value, I32) if kind != I32 else value, place)
        return context.get_dummy_value()

    return types.void(types.int64, types.boolean, size, types.int64), generate


ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18  # Linux, x86-64: asm/prctl.h
WITHOUT_AMX: Mapping[str, frozenset[str]] = {
    "ATEN_CPU_CAPABILITY": frozenset({"avx512"}),
    "ONEDNN_MAX_CPU_ISA": frozenset({"avx512_core_bf16", "avx512_core_fp16", "avx10_1_512"}),
    "MKL_ENABLE_INSTRUCTIONS": frozenset({"avx512_e3", "avx512_e5"}),
}
"""Settings by which other libraries leave the matrix unit unused, though not bfloat16
(`models/processor.WITHOUT_BFLOAT16`): ours does so too, so that all are of one processor."""


@functools.cache
def kind_of_bfloat16() -> Literal["amx", "avx512", "none"]:
    """Which of our products of bfloat16 (`cpu_product`) this process can have computed. The system is asked for the
    matrix unit, for all threads of this process.
    """
    if processor.excludes_bfloat16():
        return "none"
    features = frozenset(FEATURES.split(","))
    excluded = any(os.environ.get(name, "").lower() in values for name, values in WITHOUT_AMX.items())
    here = platform.system() == "Linux" and platform.machine() == "x86_64"
    if {"+amx-bf16", "+amx-tile", "+avx512f"} <= features and here and not excluded:
        refused = ctypes.CDLL(None).syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)
        if not refused:
            return "amx"
    return "avx512" if {"+avx512bf16", "+avx512f"} <= features else "none"
