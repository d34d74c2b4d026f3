"""From a step to the batch that the device works on: sizes as they come, everything sent over in one copy."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.text.decoder.torch_attention import Batch, Group, Window, mask
from gpuinfer.models.text.decoder.torch_cache import SlotCache
from gpuinfer.models.text.decoder.torch_plan import Integers, Part, parts_of, positions_of
from gpuinfer.models.text.step import Step


def batch_of(step: Step, cache: SlotCache, windows: Collection[Window]) -> Batch:
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
    return Batch(tokens, where, into, tuple(groups), backward)


def rows_of(step: Step, part: Part) -> Integers:
    """The rows that ask, [segments, width]: a shorter segment's last token again and again."""
    firsts = (np.cumsum(step.lengths, dtype=np.int64) - step.lengths)[part.segments]
    return firsts[:, None] + np.minimum(np.arange(part.width), step.lengths[part.segments, None] - 1)


def places(step: Step, positions: Integers, room: int) -> Integers:
    """Where in the cache the keys of each token go."""
    return np.repeat(step.slots.astype(np.int64) * room, step.lengths) + positions


def back(step: Step, parts: Sequence[Part], rows: Sequence[Integers]) -> Integers:
    """Where each row is in what the groups give, one after another."""
    found = np.empty(len(step.tokens), np.int64)
    given = 0
    for part, asking in zip(parts, rows, strict=True):
        real = np.arange(part.width) < step.lengths[part.segments, None]
        found[asking[real]] = given + np.flatnonzero(real)
        given += asking.size
    return found


def where_to_read(part: Part, step: Step, slots: Tensor) -> Tensor | slice:
    """Slots side by side, or one alone, are read where they lie; of others a copy is made."""
    numbers = step.slots[part.segments]
    first, count = int(numbers[0]), len(numbers)
    return slice(first, first + count) if np.array_equal(numbers, np.arange(first, first + count)) else slots


def mask_of(part: Part, positions: Tensor, window: Window, dtype: torch.dtype) -> Tensor | None:
    if part.fresh and (window is None or window >= part.width):
        return None
    return mask(positions.view(-1, part.width), part.reach, window, dtype)


def sent(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Each array as int64 on the device, all in one copy."""
    together = torch.from_numpy(np.concatenate(arrays, dtype=np.int64))
    return list(torch.split(together.to(device), [len(array) for array in arrays]))
