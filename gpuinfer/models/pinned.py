"""Memory that others have made, such as shared blocks, pinned so that a CUDA device copies from it by itself."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch
from numpy.typing import NDArray

logger = logging.getLogger("gpuinfer")

PORTABLE = 1  # cudaHostRegisterPortable, of CUDA's driver_types.h: pinned for every device


class Registration:
    """Holds on to an array for as long as the device may read it."""

    def __init__(self, array: NDArray[Any] | None = None) -> None:
        self._array = array

    @property
    def pinned(self) -> bool:
        return self._array is not None

    def close(self) -> None:
        """Unpin, while the memory is still mapped and no batch in flight reads it. A second time: nothing."""
        array, self._array = self._array, None
        if array is not None:
            failure = call("cudaHostUnregister", array.ctypes.data)
            logger.debug("unpinned %d MiB (error %d)", array.nbytes >> 20, failure)


def register(array: NDArray[Any], device: torch.device) -> Registration:
    """Pin the memory of a contiguous array for a CUDA device; nothing is done for a CPU.

    Where the system refuses, a warning says so, and rows take the longer way by a staging buffer.
    """
    if device.type != "cuda" or not array.nbytes:
        return Registration()
    with torch.cuda.device(device):
        failure = call("cudaHostRegister", array.ctypes.data, array.nbytes, PORTABLE)
    if not failure:
        return Registration(array)
    logger.warning(
        "CUDA cannot pin %d MiB of shared memory (error %d): rows are copied once more on their way to the device. "
        "Raise the limit of locked memory (`ulimit -l`).",
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
