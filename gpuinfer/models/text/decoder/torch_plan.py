"""Which segments of a step go through attention together, and as which sizes: plain arithmetic on the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gpuinfer.models.text.step import Step

Integers = NDArray[np.int64]

LEAST_REACH = 128  # positions: the smallest portion of the cache that a batch of fixed size reads
LARGEST_GROUP = 1 << 25  # values of a mask: segments × tokens × positions read
FINE = 16  # what is read is a multiple of it; masks of other widths are copied by the kernels


@dataclass(frozen=True)
class Part:
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


def parts_of(step: Step, room: int) -> Iterator[Part]:
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
            yield Part(members[start : start + together], width, reach, bool(kind[2]))


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
