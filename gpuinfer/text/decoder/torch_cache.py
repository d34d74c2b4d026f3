"""Keys and values in pages, in memory that is taken once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.host.process_memory import consecutive_runs, give_back
from gpuinfer.models.pinned_memory import queued
from gpuinfer.text.checkpoint.memory_estimate import SPARE_PAGES, most_copied, row_pages
from gpuinfer.text.decoder.attention_plan import Integers, ends_of
from gpuinfer.text.transformer import PAGE, Shape, Step


class PageCache:
    """`keys` and `values` [layers, pages + 2, PAGE, kv_heads, head_dim]. Two pages belong to no row: `spare`, where
    rows that only pad a batch write, and `blank`, which is always zero and stands in tables behind a row's last page.

    What a row reads behind its last position is always zero. Attention multiplies it with zero, and zero times the NaN
    of an earlier row would be NaN.
    """

    def __init__(self, shape: Shape, pages: int, length: int, device: torch.device, dtype: torch.dtype) -> None:
        self.pages, self.columns = pages, row_pages(length)
        self.room = self.columns * PAGE  # positions of a row, at most
        self.spare, self.blank = pages, pages + 1
        self.sharing = shape.heads // shape.kv_heads  # heads that have their keys in common
        self.width = shape.kv_heads * shape.head_dim  # values that a layer keeps of a position's keys
        self.most_copied = most_copied(device) // self.width  # positions
        self.dtype = dtype
        form = (shape.layers, pages + SPARE_PAGES, PAGE, shape.kv_heads, shape.head_dim)
        self.keys, self.values = zeros(form, device, dtype), zeros(form, device, dtype)
        self._flat_keys, self._flat_values = self.keys.flatten(1, 2), self.values.flatten(1, 2)
        self._filled = np.zeros(pages, np.int64)  # of each page: positions before it may hold something
        self._copies = (torch.empty(0, dtype=dtype), torch.empty(0, dtype=dtype))

    def begin(self, step: Step, in_parts: bool) -> None:
        """Forget what the pages that `step` writes into hold behind what it brings and sees: an earlier row's, or of
        positions that were taken back. `in_parts`: some of it is read before all is written, so that what it writes
        over is forgotten too.
        """
        firsts, counts = step.starts // PAGE, (step.starts + step.lengths - 1) // PAGE + 1 - step.starts // PAGE
        segments = np.repeat(np.arange(len(counts)), counts)
        columns = firsts[segments] + np.arange(len(segments)) - np.repeat(np.cumsum(counts) - counts, counts)
        pages = step.pages[segments, columns]
        kept = np.clip(ends_of(step)[segments] - columns * PAGE, 0, PAGE)
        gone = np.clip(step.starts[segments] - columns * PAGE, 0, PAGE) if in_parts else kept
        stale = np.flatnonzero(gone < self._filled[pages])
        if len(stale):
            self._clear(pages[stale], gone[stale], self._filled[pages[stale]])
        self._filled[pages] = kept

    def write(self, layer: int, places: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put `keys` and `values` [rows, kv_heads, head_dim] at `places` [rows]: page × PAGE + position in it."""
        self._flat_keys[layer].index_copy_(0, places, keys)
        self._flat_values[layer].index_copy_(0, places, values)

    def read(self, layer: int, pages: Tensor | slice, segments: int, reach: int) -> tuple[Tensor, Tensor]:
        """Keys and values [segments, reach, kv_heads, head_dim] of pages [segments, columns], or of as many for each
        segment side by side, which are read where they lie. Others are copied: the next call may overwrite them.
        """
        if isinstance(pages, slice):
            found = self.keys[layer, pages], self.values[layer, pages]
        else:
            numbers = pages.flatten()
            if self.keys.device.type == "cpu":
                found = self._copied(layer, numbers)
            else:
                found = self.keys[layer].index_select(0, numbers), self.values[layer].index_select(0, numbers)
        form = (segments, -1, *self.keys.shape[3:])
        return found[0].view(form)[:, :reach], found[1].view(form)[:, :reach]

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """See `step.Decoder.copy_pages`."""
        if not len(targets):
            return
        from_pages, into = (queued(np.array(given, np.int64), self.keys.device) for given in (sources, targets))
        for held in (self.keys, self.values):
            held.index_copy_(1, into, held.index_select(1, from_pages))
        self._filled[targets] = self._filled[sources]

    def empty(self) -> None:
        """Forget everything."""
        self.keys.zero_()
        self.values.zero_()
        self._filled[:] = 0

    def give_back(self, pages: Sequence[int]) -> None:
        """See `step.Decoder.give_back`; on a CPU."""
        layers = range(len(self.keys))
        give_back_of([held[layer] for held in (self.keys, self.values) for layer in layers], pages)
        self._filled[list(pages)] = 0

    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    def _copied(self, layer: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Copies in memory of their own: what the system gives anew for each takes longer than the copying."""
        needed = len(numbers) * PAGE * self.width
        if needed > len(self._copies[0]):
            self._copies = (self._copies[0].new_empty(needed), self._copies[1].new_empty(needed))
        form = (len(numbers), *self.keys.shape[2:])
        keys, values = (copy[:needed].view(form) for copy in self._copies)
        torch.index_select(self.keys[layer], 0, numbers, out=keys)
        torch.index_select(self.values[layer], 0, numbers, out=values)
        return keys, values

    def _clear(self, pages: NDArray[np.int32], starts: Integers, ends: Integers) -> None:
        counts = ends - starts
        offsets = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        places = queued(np.repeat(pages * np.int64(PAGE) + starts, counts) + offsets, self.keys.device)
        self._flat_keys.index_fill_(1, places, 0)
        self._flat_values.index_fill_(1, places, 0)


def give_back_of(parts: Sequence[Tensor], pages: Sequence[int]) -> None:
    """The system may have the memory of these pages [pages, ...] of each part, all of them on a CPU."""
    for first, last in consecutive_runs(pages):
        for part in parts:
            some = part[first:last]
            give_back(some.data_ptr(), some.nbytes)


def table_of(step: Step, segments: Integers, columns: int, blank: int) -> Integers:
    """The first `columns` pages of these segments, [segments, columns]; `blank` behind what they bring and see."""
    found = np.full((len(segments), columns), blank, np.int64)
    given = step.pages[segments, :columns]
    found[:, : given.shape[1]] = given
    found[np.arange(columns) * PAGE >= ends_of(step)[segments, None]] = blank
    return found


def zeros(form: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    """As `torch.zeros`, but that on a CPU memory is taken page by page, when it is first written."""
    if device.type != "cpu":
        return torch.zeros(form, device=device, dtype=dtype)
    count = int(np.prod(form)) * dtype.itemsize
    return torch.from_numpy(np.zeros(max(count, 1), np.uint8))[:count].view(dtype).view(form)
