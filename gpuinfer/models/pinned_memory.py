"""Memory that others have made, such as shared blocks, pinned so that a CUDA device reads and writes it by itself.

Which rows a device may fetch from where they lie, which answers it may write to their place, and which of both go by
way of a staging buffer; small arrays that are pinned for their one copy.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.row_blocks import Block, as_tensor

logger = logging.getLogger("gpuinfer")

PORTABLE = 1  # cudaHostRegisterPortable, of CUDA's driver_types.h: pinned for every device


class Registration:
    """Holds on to an array for as long as the device may read and write it."""

    def __init__(self, array: NDArray[Any] | None = None) -> None:
        self._array = array

    @property
    def pinned(self) -> bool:
        return self._array is not None

    def close(self) -> None:
        """Unpin, while the memory is still mapped and no batch in flight uses it. A second time: nothing."""
        array, self._array = self._array, None
        if array is not None:
            failure = call("cudaHostUnregister", array.ctypes.data)
            logger.debug("unpinned %d MiB (error %d)", array.nbytes >> 20, failure)


def register(array: NDArray[Any], device: torch.device) -> Registration:
    """Pin the memory of a contiguous array for a CUDA device; nothing is done for a CPU.

    Where the system refuses, a warning says so, and rows and answers take the longer way by a staging buffer.
    """
    if device.type != "cuda" or not array.nbytes:
        return Registration()
    with torch.cuda.device(device):
        failure = call("cudaHostRegister", array.ctypes.data, array.nbytes, PORTABLE)
    if not failure:
        return Registration(array)
    logger.warning(
        "CUDA cannot pin %d MiB of shared memory (error %d): rows and answers are copied once more on their way to the "
        "device and back. Raise the limit of locked memory (`ulimit -l`).",
        array.nbytes >> 20,
        failure,
    )
    return Registration()


def call(function: str, *arguments: int) -> int:
    """CUDA's error code, 0 for success."""
    failure = int(getattr(torch.cuda.cudart(), function)(*arguments))  # type: ignore[no-untyped-call]
    if failure:
        forget()
    return failure


def forget() -> None:
    """CUDA hands an error out once more, to whoever launches next: let that be somebody who does not mind."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


WORTH_A_COPY = 64 << 10  # bytes; queueing one more copy takes as long as staging about so many, in either direction


def lies_pinned(piece: Block) -> bool:
    """Whether `piece` lies in memory that the device uses by itself, and is large enough for a copy of its own."""
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


def deliver(
    answers: Tensor,
    targets: Sequence[Block],
    room: Callable[[int], Tensor],
    pinned: Callable[[Block], bool] = lies_pinned,
) -> list[tuple[Sequence[Block], Block]]:
    """Queue the copies of `answers`, rows on a device, to `targets`, which have as many together: straight to those
    that are pinned, and for the others to `room(rows)`, staging memory that is.

    Returns what `unstage` is to copy to the others once the device is done.
    """
    runs = [(straight, list(group)) for straight, group in groupby(targets, pinned)]
    count = sum(sum(map(len, run)) for straight, run in runs if not straight)
    staging = room(count) if count else answers
    later: list[tuple[Sequence[Block], Block]] = []
    at = used = 0
    for straight, run in runs:
        rows = sum(map(len, run))
        if straight:
            for target in run:
                as_tensor(target).copy_(answers[at : at + len(target)], non_blocking=True)
                at += len(target)
            continue
        part = staging[used : used + rows]
        part.copy_(answers[at : at + rows], non_blocking=True)
        later.append((run, part.numpy()))
        at, used = at + rows, used + rows
    return later


def unstage(later: Sequence[tuple[Sequence[Block], Block]]) -> None:
    """Copy each array to the targets that have as many rows together."""
    for targets, rows in later:
        at = 0
        for target in targets:
            np.copyto(target, rows[at : at + len(target)])
            at += len(target)


def queued(array: NDArray[Any], device: torch.device) -> Tensor:
    """The array on the device, to be used in the order of its current stream. The host does not wait for the copy."""
    tensor = as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
