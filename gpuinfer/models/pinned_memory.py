"""Pinned memory: arrays of others, such as shared blocks, that a CUDA device reads and writes directly.

Decides which rows a device fetches from where they lie, which answers it writes in place, and which of both go through
a staging buffer; pins small arrays for their one copy.
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
    """A pinned array, referenced for as long as the device may read and write it."""

    def __init__(self, array: NDArray[Any] | None = None) -> None:
        self._array = array

    @property
    def pinned(self) -> bool:
        return self._array is not None

    def close(self) -> None:
        """Unpin, while the memory is mapped and no batch in flight uses it. Does nothing the second time."""
        array, self._array = self._array, None
        if array is not None:
            failure = runtime_call("cudaHostUnregister", array.ctypes.data)
            logger.debug("unpinned %d MiB (error %d)", array.nbytes >> 20, failure)


def register(array: NDArray[Any], device: torch.device) -> Registration:
    """Pin the memory of a contiguous array for a CUDA device; does nothing for a CPU.

    Where the system refuses, a warning is logged, and rows and answers go through a staging buffer.
    """
    if device.type != "cuda" or not array.nbytes:
        return Registration()
    with torch.cuda.device(device):
        failure = runtime_call("cudaHostRegister", array.ctypes.data, array.nbytes, PORTABLE)
    if not failure:
        return Registration(array)
    logger.warning(
        "CUDA cannot pin %d MiB of shared memory (error %d): rows and answers are copied once more on their way to the "
        "device and back. Raise the limit of locked memory (`ulimit -l`).",
        array.nbytes >> 20,
        failure,
    )
    return Registration()


def runtime_call(function: str, *arguments: int) -> int:
    """CUDA's error code, 0 for success."""
    failure = int(getattr(torch.cuda.cudart(), function)(*arguments))  # type: ignore[no-untyped-call]
    if failure:
        forget()
    return failure


def forget() -> None:
    """Clear CUDA's last error, which the next launch would otherwise raise again."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


WORTH_A_COPY = 64 << 10  # bytes; queueing one more copy takes as long as staging about so many, in either direction


def lies_pinned(piece: Block) -> bool:
    """Whether `piece` lies in pinned memory, and is large enough for a copy of its own."""
    return piece.nbytes >= WORTH_A_COPY and as_tensor(piece).is_pinned()


def copy_plan(
    pieces: Sequence[Block], staging: Tensor, pinned: Callable[[Block], bool] = lies_pinned
) -> Iterator[tuple[int, Tensor]]:
    """What to copy to the device for a batch, as (first row, tensor): pinned pieces as they are, consecutive others
    together, staged at the same rows of `staging`.
    """
    at = 0
    for straight, group in groupby(pieces, pinned):
        run = list(group)
        for part in map(as_tensor, run) if straight else [staged_rows(run, staging[at:])]:
            yield at, part
            at += len(part)


def staged_rows(pieces: Sequence[Block], room: Tensor) -> Tensor:
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
    """Queue the copies of `answers`, rows on a device, to `targets`, which have as many rows together: directly to
    pinned targets, for the others to `room(rows)`, pinned staging memory.

    Returns what `unstage` must copy once the device is done.
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
    """A copy of the array on the device, in the order of its current stream; the host does not wait for the copy."""
    tensor = as_tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
