"""Which rows a device may fetch from where they lie, and which go by way of the staging buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import numpy as np
from torch import Tensor

from gpuinfer.models.staging import Block, as_tensor

WORTH_A_COPY = 64 << 10  # bytes; queueing one more copy to the device takes as long as staging about so many


def lies_pinned(piece: Block) -> bool:
    """Whether `piece` lies in memory that the device reads by itself, and is large enough for a copy of its own."""
    return piece.nbytes >= WORTH_A_COPY and as_tensor(piece).is_pinned()


def sources(
    pieces: Sequence[Block], staging: Tensor, pinned: Callable[[Block], bool] = lies_pinned
) -> Iterator[tuple[int, Tensor]]:
    """What to copy to the device for a batch, each part with its first row there: pinned pieces as they are, and what
    lies between them together, staged at the same rows of `staging`.
    """
    at = 0
    for straight, group in groupby(pieces, pinned):
        run = list(group)
        for part in map(as_tensor, run) if straight else [staged(run, staging[at:])]:
            yield at, part
            at += len(part)


def staged(pieces: Sequence[Block], room: Tensor) -> Tensor:
    part = room[: sum(map(len, pieces))]
    if len(pieces) == 1:
        return part.copy_(as_tensor(pieces[0]))  # with all of torch's threads
    np.concatenate(pieces, out=part.numpy())
    return part
