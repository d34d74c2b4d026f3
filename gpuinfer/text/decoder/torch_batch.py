"""From a step to the batch that a device computes, sent over in one copy: which segments go through attention together,
and in which sizes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.cuda_graphs import event_behind
from gpuinfer.text.decoder.attention_plan import Integers, ends_of, firsts_of, positions_of, sees_of, segments_of
from gpuinfer.text.decoder.torch_cache import PageCache, table_of
from gpuinfer.text.decoder.torch_layers import PaddedGroup, StepBatch, Tiles, Window, mask
from gpuinfer.text.transformer import PAGE, Step

LEAST_REACH = 128  # positions: the smallest portion of the cache that a batch of fixed size reads
LARGEST_GROUP = 1 << 25  # values of a mask: segments × tokens × positions read
LONG = 128  # tokens of a segment: with fewer a kernel of its own takes longer to launch than it saves
FINE = 16  # what is read is a multiple of it; masks of other widths are copied by the kernels


Order = Literal["causal", "whole", "mask"]
"""Who sees what of a part: each of its tokens, from position 0 on, those up to itself; all of them all that is read;
or as a mask must tell. Windows take away from it.
"""


@dataclass(frozen=True)
class BatchPart:
    """Segments, by their numbers in the step, that are padded to `width` tokens and read `reach` positions."""

    segments: Integers
    width: int
    reach: int
    order: Order


def parts_of(step: Step, room: int, sharing: int = 1, copied: int = LARGEST_GROUP) -> Iterator[BatchPart]:
    """All segments, those of about the same length and about the same number of positions to read together.

    Long ones of which each token sees all are together only with those that see as many: then they need no mask, which
    has a faster kernel. `sharing`: heads that have their keys in common; `copied`: positions of the cache that are
    copied for attention at once.
    """
    ends = ends_of(step)
    if step.sees is None:
        plain, same = (step.starts == 0) & (step.lengths > 1), np.zeros_like(ends)
    else:
        plain = np.minimum.reduceat(step.sees, firsts_of(step)) == ends
        same = np.where(plain & (step.lengths >= LONG), ends, 0)
    kinds = np.stack((powers(step.lengths), powers(np.maximum(ends, LEAST_REACH)), plain, same))
    for kind in np.unique(kinds, axis=1).T:
        members = np.flatnonzero((kinds == kind[:, None]).all(0))
        width, reach = int(step.lengths[members].max()), int(ends[members].max())
        order: Order = "mask" if not kind[2] else "causal" if step.sees is None else "whole"
        if order == "whole" and (ends[members] != reach).any():
            order = "mask"
        reach = min(room, -(-reach // FINE) * FINE) if order == "mask" else reach
        together = max(1, min(LARGEST_GROUP // (width * sharing), copied) // reach)
        for start in range(0, len(members), together):
            yield BatchPart(members[start : start + together], width, reach, order)


def powers(numbers: NDArray[np.int32] | Integers) -> Integers:
    """The exponent of the next power of two."""
    return np.ceil(np.log2(numbers)).astype(np.int64)


def row_buckets(most: int) -> list[int]:
    """Ascending numbers of rows that a decode step is padded to, the last `most`: at most half again too many."""
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        if size >= 16 and size * 3 // 2 < most:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, most]


def reach_buckets(room: int) -> list[int]:
    """Ascending numbers of positions that a batch of fixed size reads, in whole pages; the last is all of a row."""
    sizes, size = [], LEAST_REACH
    while size < room:
        sizes.append(size)
        size *= 2
    return [*sizes, room]


def tiles(sees: Integers, rows: int, reaches: Sequence[int]) -> Iterator[tuple[Integers, int]]:
    """Tokens, by their numbers, in tiles of at most `rows` that need the same bucket of `reaches`.

    What a token goes through then depends on what it sees alone. Tiles come in the order of what is seen: a token that
    sees nothing after itself finds those before it in the cache, or in its own tile.
    """
    needed = np.searchsorted(reaches, sees)
    for bucket in np.unique(needed):
        members = np.flatnonzero(needed == bucket)
        for start in range(0, len(members), rows):
            yield members[start : start + rows], reaches[bucket]


def batch_of(step: Step, cache: PageCache, windows: Collection[Window], uploads: Uploads) -> StepBatch:
    """The step as it is, padded only within groups of segments of unequal length."""
    parts = list(parts_of(step, cache.room, cache.sharing, cache.most_copied))
    positions = positions_of(step)
    rows = [rows_of(step, part) for part in parts]
    sees = sees_of(step)
    tables = [table_of(step, part.segments, -(-part.reach // PAGE), cache.blank) for part in parts]
    arrays: list[NDArray[Any]] = [step.tokens, positions, cache_places(step, positions), back(step, parts, rows)]
    for table, asking in zip(tables, rows, strict=True):
        arrays += [table.ravel(), asking.ravel(), positions[asking].ravel(), sees[asking].ravel()]
    tokens, where, into, backward, *rest = uploads.sent(arrays)
    groups = []
    for i, part in enumerate(parts):
        pages, asking_rows, asked_from, seen = rest[4 * i : 4 * i + 4]
        masks = {window: mask_of(part, asked_from, seen, window, cache) for window in windows}
        reading = side_by_side(tables[i]) or pages.view(tables[i].shape)
        groups.append(PaddedGroup(part.width, part.reach, reading, asking_rows, masks, part.order == "causal"))
    return StepBatch(tokens, where, into, tuple(groups), back=backward)


def tiled_batch_of(step: Step, cache: PageCache, uploads: Uploads, most: int) -> StepBatch:
    """The step as it is, for a kernel that takes `most` rows of a segment at once, and no padding. Tokens that come
    alone are apart from runs.
    """
    positions, sees = positions_of(step), sees_of(step)
    columns = -(-int(sees.max()) // PAGE)
    table = table_of(step, np.arange(len(step.lengths)), columns, cache.blank)
    arrays: list[NDArray[Any]] = [step.tokens, positions, cache_places(step, positions), sees, table.ravel()]
    sizes = []
    for members, size in ((np.flatnonzero(step.lengths == 1), 1), (np.flatnonzero(step.lengths > 1), most)):
        if len(members):
            arrays += attention_tiles(step, members, size)
            sizes.append(size)
    tokens, where, into, seen, pages, *rest = uploads.sent(arrays)
    pages, reach = pages.view(table.shape), int(sees.max())
    given = [(rest[3 * i], rest[3 * i + 1], rest[3 * i + 2]) for i in range(len(sizes))]
    each = bool((step.lengths == 1).all())  # then tile i is row i, and segment i
    tiles = tuple(Tiles(pages, None if each else rows, size, reach) for size, rows in zip(sizes, given, strict=True))
    return StepBatch(tokens, where, into, tiles=tiles, sees=seen)


def attention_tiles(step: Step, members: Integers, most: int) -> list[Integers]:
    """Of these segments, in tiles of at most `most` rows: each one's first row, how many, and the segment."""
    counts = -(-step.lengths[members] // most)
    segments = np.repeat(members, counts)
    before = (np.arange(len(segments)) - np.repeat(np.cumsum(counts) - counts, counts)) * most
    return [firsts_of(step)[segments] + before, np.minimum(step.lengths[segments] - before, most), segments]


def rows_of(step: Step, part: BatchPart) -> Integers:
    """The rows that ask, [segments, width]: a shorter segment's last token again and again."""
    firsts = firsts_of(step)[part.segments]
    return firsts[:, None] + np.minimum(np.arange(part.width), step.lengths[part.segments, None] - 1)


def cache_places(step: Step, positions: Integers) -> Integers:
    """Where in the cache the keys of each token go: page × PAGE + position in it."""
    found: Integers = step.pages[segments_of(step), positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
    return found


def token_columns(step: Step) -> Integers:
    """[4, tokens]: each one's number, position, place in the cache, and how many positions it sees."""
    positions = positions_of(step)
    return np.stack((step.tokens.astype(np.int64), positions, cache_places(step, positions), sees_of(step)))


def back(step: Step, parts: Sequence[BatchPart], rows: Sequence[Integers]) -> Integers:
    """Where each row is in what the groups give, one after another."""
    found = np.empty(len(step.tokens), np.int64)
    given = 0
    for part, asking in zip(parts, rows, strict=True):
        real = np.arange(part.width) < step.lengths[part.segments, None]
        found[asking[real]] = given + np.flatnonzero(real)
        given += asking.size
    return found


def side_by_side(table: Integers) -> slice | None:
    """Pages that lie one behind the other in the order in which they are read; None: they do not."""
    first = int(table[0, 0])
    return slice(first, first + table.size) if (table.ravel() == np.arange(first, first + table.size)).all() else None


def mask_of(part: BatchPart, positions: Tensor, sees: Tensor, window: Window, cache: PageCache) -> Tensor | None:
    if part.order == "causal" and (window is None or window >= part.width):
        return None
    if part.order == "whole" and (window is None or window >= part.reach):
        return None
    form, sharing = (-1, part.width), cache.sharing if part.width > 1 else 1
    return mask(positions.view(form), sees.view(form), part.reach, window, cache.dtype, sharing)


class Uploads:
    """Integers on their way to the device, written to memory that a CUDA device copies from while the host goes on.

    Two buffers in turn: one is written while the copy of the other waits for work that was queued before it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._buffers = [host_memory(0, device) for _ in range(2)]
        self._copied: list[torch.cuda.Event | None] = [None, None]
        self._turn = 0

    def room(self, count: int) -> NDArray[np.int64]:
        """Where to write the next ones, [count], once those before the last ones have been copied."""
        self._turn = 1 - self._turn
        copied = self._copied[self._turn]
        if copied is not None:
            copied.synchronize()
        if count > len(self._buffers[self._turn][0]):
            self._buffers[self._turn] = host_memory(count, self.device)
        return self._buffers[self._turn][1][:count]

    def copy(self, into: Tensor) -> None:
        """Have the first of what was written copied to `into`, int64 on the device."""
        into.copy_(self._buffers[self._turn][0][: len(into)], non_blocking=True)
        if self.device.type == "cuda":
            self._copied[self._turn] = event_behind(self.device)

    def sent(self, arrays: Sequence[NDArray[Any]]) -> list[Tensor]:
        """Each array as int64 on the device, all in one copy."""
        counts = [len(array) for array in arrays]
        np.concatenate(arrays, out=self.room(sum(counts)))
        together = torch.empty(sum(counts), dtype=torch.int64, device=self.device)
        self.copy(together)
        return list(torch.split(together, counts))


def host_memory(count: int, device: torch.device) -> tuple[Tensor, NDArray[np.int64]]:
    """Integers [count] that `device` copies from by itself; the same memory twice."""
    memory = torch.zeros(count, dtype=torch.int64, pin_memory=device.type == "cuda")
    return memory, memory.numpy()
