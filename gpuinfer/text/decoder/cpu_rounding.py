"""Weights rounded to 8 or 4 bits in the panels that `cpu_quantised` reads: what `rounding` computes in torch, in one
pass of compiled code that threads share.
"""

from __future__ import annotations

import functools
from concurrent.futures import Executor
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gpuinfer.models.kernel_cache import called_only, compiler
from gpuinfer.text.decoder.cpu_block import LINE
from gpuinfer.text.decoder.cpu_math import SOURCES, TILE, bits_of, float_of
from gpuinfer.text.decoder.cpu_panels import MemoryArena
from gpuinfer.text.decoder.cpu_quantised import LINES, WeightBits, groups_of, quantised_panel_bytes
from gpuinfer.text.decoder.rounding import FINER, GROUP, HALF, LARGEST, TINY

PANELS_AT_ONCE = 64  # that a thread rounds before it asks for more
F, WORD = np.float32, np.int32
INFINITE, NAN = WORD(0x7F800000), WORD(0x7FC0)  # the bits of float32 infinity, and of a bfloat16 that is not a number
NEAREST = F(
    12_582_912
)  # 1.5 · 2²³: what is added to a float32 below 2²² is rounded to the nearest whole number, or even

as_written = called_only(_nrt=False, error_model="numpy", forceinline=True)
"""For functions whose sums stay in their order, unlike those of `cpu_math.inlined`."""


def quantised_panels(weight: torch.Tensor, bits: WeightBits, out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """A weight [out, in], rounded to so many bits, in panels: [out / 16, `quantised_panel_bytes`]. `out` is zero."""
    columns, inner = weight.shape
    size = (-(-columns // TILE), quantised_panel_bytes(inner, bits))
    panels = np.zeros(size, np.uint8) if out is None else out.reshape(size)
    if inner:
        values: NDArray[np.float32] = weight.detach().float().contiguous().numpy()
        words: NDArray[np.int32] = panels.view(np.int32)
        _rounder(bits)(values, words, np.zeros(GROUP, np.float32), np.zeros(GROUP, np.int32))
    return panels


def pack_quantised(weight: torch.Tensor, bits: WeightBits, arena: MemoryArena, pool: Executor) -> NDArray[np.uint8]:
    """As `quantised_panels`, in the arena; the pool's threads share the work."""
    columns, inner = weight.shape
    each, count = quantised_panel_bytes(inner, bits), -(-columns // TILE)
    panels = arena.take(count * each).reshape(count, each)

    def some(first: int) -> None:
        end = min(count, first + PANELS_AT_ONCE)
        quantised_panels(weight[first * TILE : end * TILE], bits, panels[first:end])

    list(pool.map(some, range(0, count, PANELS_AT_ONCE)))
    return panels


def weight_of_quantised(panels: NDArray[np.uint8], out: int, inner: int, bits: WeightBits) -> torch.Tensor:
    """The weight float32 [out, inner] that `quantised_panels` has rounded."""
    count, groups = len(panels), groups_of(inner)
    if bits == 8:
        stored = torch.from_numpy(panels).view(count, groups, LINES[8] * LINE)
        lines = stored[:, :, : GROUP * TILE].contiguous().view(torch.int8)
        whole = lines.view(count, groups, GROUP // 4, TILE, 4).permute(0, 3, 1, 2, 4).float()
        scales = stored[:, :, GROUP * TILE :].contiguous().view(torch.float32).transpose(1, 2)
        found = whole.reshape(count, TILE, groups, GROUP) * scales[..., None]
    else:
        stored = torch.from_numpy(panels).view(count, 2 * groups, LINES[4] * LINE // 2)
        lines = stored[:, :, : HALF * TILE // 2].reshape(count, 2 * groups, HALF // 8, TILE, 1, 4)
        whole = torch.cat([lines & 15, lines >> 4], 4).permute(0, 3, 1, 2, 4, 5).float()
        pairs = stored[:, :, HALF * TILE // 2 :].contiguous().view(torch.bfloat16).view(count, 2 * groups, TILE, 2)
        scales, least = pairs.float().transpose(1, 2).unbind(-1)
        found = whole.reshape(count, TILE, 2 * groups, HALF) * scales[..., None] + least[..., None]
    return found.reshape(count * TILE, groups * GROUP)[:out, :inner].contiguous()


@functools.cache
def _rounder(bits: WeightBits) -> Any:
    return compiler(SOURCES, nogil=True, _nrt=False, error_model="numpy")(round_to_8 if bits == 8 else round_to_4)


def round_to_8(weight, panels, values, whole):  # type: ignore[no-untyped-def]  # compiled
    """weight float32 [columns, inner], panels int32 [panels, words]; the others are scratch for a group."""
    columns, inner = weight.shape
    for column in range(columns):
        panel, place = panels[column // TILE], column % TILE
        for group in range((inner + GROUP - 1) // GROUP):
            load_group(weight[column], group * GROUP, inner, values)
            largest = WORD(0)
            for i in range(GROUP):  # as whole numbers, bits of magnitudes are in the same order
                largest = max(largest, bits_of(values[i]) & WORD(0x7FFFFFFF))
            scale = float_of(largest) / F(LARGEST)
            if largest < INFINITE:
                round_group(values, F(0), max(scale, F(TINY)), 0, GROUP, whole)
            else:
                for i in range(GROUP):
                    whole[i] = 0
            begin = group * (17 * TILE) + place
            for line in range(16):
                word = WORD(0)
                for i in range(4):
                    word |= (whole[4 * line + i] & WORD(255)) << WORD(8 * i)
                panel[begin + line * TILE] = word
            panel[begin + 16 * TILE] = bits_of(scale)


def round_to_4(weight, panels, values, whole):  # type: ignore[no-untyped-def]  # compiled
    """The same to 4 bits."""
    columns, inner = weight.shape
    for column in range(columns):
        panel, place = panels[column // TILE], column % TILE
        for group in range((inner + GROUP - 1) // GROUP):
            load_group(weight[column], group * GROUP, inner, values)
            for half in range(2):
                lowest, highest = WORD(0x7FFFFFFF), WORD(-0x80000000)
                for i in range(half * HALF, half * HALF + HALF):
                    ordered = in_order(bits_of(values[i]))
                    lowest, highest = min(lowest, ordered), max(highest, ordered)
                least, scale = NAN, NAN
                if lowest >= -INFINITE and highest < INFINITE:
                    low = float_of(in_order(lowest))
                    least = as_bfloat16(low)
                    low = float_of(least << WORD(16))
                    scale = as_bfloat16((float_of(in_order(highest)) - low) * F(FINER) / F(15))
                    step = float_of(scale << WORD(16))
                    round_group(values, low, max(step, F(TINY)), half * HALF, half * HALF + HALF, whole)
                begin = (2 * group + half) * (5 * TILE) + place
                for line in range(4):
                    word = WORD(0)
                    for i in range(8):
                        found = min(max(whole[half * HALF + 8 * line + i], WORD(0)), WORD(15))
                        word |= found << WORD(8 * (i % 4) + 4 * (i // 4))
                    panel[begin + line * TILE] = word
                panel[begin + 4 * TILE] = (scale & WORD(0xFFFF)) | (least << WORD(16))


@as_written
def load_group(row, begin, inner, values):  # type: ignore[no-untyped-def]
    """A group of a row, with zeros behind the last term."""
    there = min(GROUP, inner - begin)
    for i in range(there):
        values[i] = row[begin + i]
    for i in range(there, GROUP):
        values[i] = F(0)


@as_written
def round_group(values, least, scale, first, end, whole):  # type: ignore[no-untyped-def]
    for i in range(first, end):
        whole[i] = WORD(((values[i] - least) / scale + NEAREST) - NEAREST)


@as_written
def in_order(bits):  # type: ignore[no-untyped-def]
    """Bits of a float32 as a whole number that is in the order of the floats, and back."""
    return bits ^ ((bits >> WORD(31)) & WORD(0x7FFFFFFF))


@as_written
def as_bfloat16(value):  # type: ignore[no-untyped-def]
    """The bits of the nearest bfloat16 of a finite float32."""
    bits = bits_of(value)
    return ((bits + WORD(0x7FFF) + ((bits >> WORD(16)) & WORD(1))) >> WORD(16)) & WORD(0xFFFF)
