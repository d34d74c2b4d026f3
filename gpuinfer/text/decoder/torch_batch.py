"""From a step to the batch that the device works on: sizes as they come, everything sent over in one copy.

Which segments of a step go through attention together, and as which sizes: plain arithmetic on the host.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.decoder.torch_cache import SlotCache
from gpuinfer.text.decoder.torch_layers import Group, StepBatch, Window, mask
from gpuinfer.text.step import Step

Integers = NDArray[np.int64]

LEAST_REACH = 128  # positions: the smallest portion of the cache that a batch of fixed size reads
LARGEST_GROUP = 1 << 25  # values of a mask: segments × tokens × positions read
FINE = 16  # what is read is a multiple of it; masks of other widths are copied by the kernels


@dataclass(frozen=True)
class BatchPart:
    """Segments, by their numbers in the step, that are padded to `width` tokens and read `reach` positions."""

    segments: Integers
    width: int
    reach: int
    fresh: bool  # all begin at position 0


def positions_of(step: Step) -> Integers:
    """The position of each token of a step."""
    before = np.cumsum(step.lengths, dtype=np.int64) - step.lengths
    found: Integers = np.arange(len(step.tokens), dtype=np.int64) + np.repeat(step.starts - before, step.lengths)
    return found


def parts_of(step: Step, room: int) -> Iterator[BatchPart]:
    """All segments, those of about the same length and about the same number of positions to read together."""
    ends = step.starts + step.lengths
    fresh = (step.starts == 0) & (step.lengths > 1)
    kinds = np.stack((powers(step.lengths), powers(np.maximum(ends, LEAST_REACH)), fresh))
    for kind in np.unique(kinds, axis=1).T:
        members = np.flatnonzero((kinds == kind[:, None]).all(0))
        width, reach = int(step.lengths[members].max()), int(ends[members].max())
        reach = reach if kind[2] else min(room, -(-reach // FINE) * FINE)
        together = max(1, LARGEST_GROUP // (width * reach))
        for start in range(0, len(members), together):
            yield BatchPart(members[start : start + together], width, reach, bool(kind[2]))


def powers(numbers: NDArray[np.int32]) -> Integers:
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
    """Ascending numbers of positions that a batch of fixed size reads, the last all of a slot."""
    sizes, size = [], LEAST_REACH
    while size < room:
        sizes.append(size)
        size *= 2
    return [*sizes, room]


def tiles(positions: Integers, rows: int, reaches: Sequence[int]) -> Iterator[tuple[Integers, int]]:
    """Tokens, by their numbers, in tiles of at most `rows` that need the same bucket of `reaches`.

    What a token goes through then depends on its own position alone. Tiles come in the order of positions: a token
    finds those before it in the cache, or in its own tile.
    """
    needed = np.searchsorted(reaches, positions + 1)
    for bucket in np.unique(needed):
        members = np.flatnonzero(needed == bucket)
        for start in range(0, len(members), rows):
            yield members[start : start + rows], reaches[bucket]


def batch_of(step: Step, cache: SlotCache, windows: Collection[Window]) -> StepBatch:
    """The step as it is, padded only within groups of segments of unequal length."""
    parts = list(parts_of(step, cache.room))
    positions = positions_of(step)
    rows = [rows_of(step, part) for part in parts]
    arrays: list[NDArray[Any]] = [step.tokens, positions, places(step, positions, cache.room), back(step, parts, rows)]
    for part, asking in zip(parts, rows, strict=True):
        arrays += [step.slots[part.segments], asking.ravel(), positions[asking].ravel()]
    device, dtype = cache.keys.device, cache.keys.dtype
    tokens, where, into, backward, *rest = sent(arrays, device)
    groups = []
    for i, part in enumerate(parts):
        slots, asking_rows, asked_from = rest[3 * i : 3 * i + 3]
        masks = {window: mask_of(part, asked_from, window, dtype) for window in windows}
        groups.append(Group(part.width, part.reach, where_to_read(part, step, slots), asking_rows, masks))
    return StepBatch(tokens, where, into, tuple(groups), back=backward)


def rows_of(step: Step, part: BatchPart) -> Integers:
    """The rows that ask, [segments, width]: a shorter segment's last token again and again."""
    firsts = (np.cumsum(step.lengths, dtype=np.int64) - step.lengths)[part.segments]
    return firsts[:, None] + np.minimum(np.arange(part.width), step.lengths[part.segments, None] - 1)


def places(step: Step, positions: Integers, room: int) -> Integers:
    """Where in the cache the keys of each token go."""
    return np.repeat(step.slots.astype(np.int64) * room, step.lengths) + positions


def back(step: Step, parts: Sequence[BatchPart], rows: Sequence[Integers]) -> Integers:
    """Where each row is in what the groups give, one after another."""
    found = np.empty(len(step.tokens), np.int64)
    given = 0
    for part, asking in zip(parts, rows, strict=True):
        real = np.arange(part.width) < step.lengths[part.segments, None]
        found[asking[real]] = given + np.flatnonzero(real)
        given += asking.size
    return found


def where_to_read(part: BatchPart, step: Step, slots: Tensor) -> Tensor | slice:
    """Slots side by side, or one alone, are read where they lie; of others a copy is made."""
    numbers = step.slots[part.segments]
    first, count = int(numbers[0]), len(numbers)
    return slice(first, first + count) if np.array_equal(numbers, np.arange(first, first + count)) else slots


def mask_of(part: BatchPart, positions: Tensor, window: Window, dtype: torch.dtype) -> Tensor | None:
    if part.fresh and (window is None or window >= part.width):
        return None
    return mask(positions.view(-1, part.width), part.reach, window, dtype)


def sent(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Each array as int64 on the device, all in one copy."""
    together = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
    return list(torch.split(together.to(device), [len(array) for array in arrays]))
