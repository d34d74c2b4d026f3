"""Whether an error says that a device is gone, and not that a batch was bad."""

from __future__ import annotations

import torch

from gpuinfer.host import spoken
from gpuinfer.models.memory import is_out_of_memory

# What CUDA, its libraries and torch say when nothing works on the device afterwards.
WORDS = ("cuda error", "device-side assert", "illegal memory access", "unspecified launch failure", "nccl")
ROWS_FAULT = "device-side assert"  # code of the model's own saw a value that it cannot take, such as an index


def says_lost(error: BaseException) -> bool:
    """Whether these are the words for it. Out of memory is something else, whatever words say it."""
    return not is_out_of_memory(error) and any(word in spoken.said(error).lower() for word in WORDS)


def is_lost(error: BaseException, device: torch.device) -> bool:
    """Whether `device` is gone. CUDA says some errors once, such as a launch of too many threads, and others for ever:
    so a device whose error may be of the second kind is asked for a sign of life.
    """
    return says_lost(error) and (device.type != "cuda" or not answers(device))


def answers(device: torch.device) -> bool:
    """Whether a CUDA device still does anything."""
    try:
        with torch.cuda.device(device):
            torch.zeros(1, device=device).add_(1).item()
    except Exception:  # noqa: BLE001 (whatever it says, it does not work)
        return False
    return True


def is_the_rows_fault(error: BaseException) -> bool:
    """Whether the rows took the device along, as they would any other."""
    return ROWS_FAULT in spoken.said(error).lower()
