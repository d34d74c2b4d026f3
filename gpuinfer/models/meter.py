"""What this process holds of a device's memory while it tries something, and a bound on that."""

from __future__ import annotations

import gc
from typing import Protocol

import torch

from gpuinfer.host.machine import memory_available
from gpuinfer.host.resident import forget_peak, peak_bytes, resident_bytes, take_at_most
from gpuinfer.models.capturing import release_cached_memory, wait_for_device


class Meter(Protocol):
    """Bytes."""

    def free(self) -> int:
        """What could still be taken."""
        ...

    def held(self) -> int:
        """What this process holds now."""
        ...

    def forget(self) -> None:
        """Give back what was freed, and begin a new peak."""
        ...

    def peak(self) -> int:
        """The most that was held since then."""
        ...

    def bound(self, beside: int) -> None:
        """From now on at most `beside` bytes more: beyond it this process is refused memory, and no other suffers."""
        ...


class CpuMeter:
    """Resident memory: of the interpreter, of libraries, of the model."""

    def free(self) -> int:
        return memory_available()

    def held(self) -> int:
        return resident_bytes()

    def forget(self) -> None:
        gc.collect()
        forget_peak()

    def peak(self) -> int:
        return peak_bytes()

    def bound(self, beside: int) -> None:
        take_at_most(beside)


class CudaMeter:
    """What torch's allocator has reserved on one device: what lies between tensors counts, not the driver's own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros(1, device=device)  # the driver takes its share

    def free(self) -> int:
        gc.collect()
        release_cached_memory()
        return int(torch.cuda.mem_get_info(self._device)[0])

    def held(self) -> int:
        return torch.cuda.memory_reserved(self._device)

    def forget(self) -> None:
        gc.collect()
        wait_for_device(self._device)
        release_cached_memory()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak(self) -> int:
        wait_for_device(self._device)
        return torch.cuda.max_memory_reserved(self._device)

    def bound(self, beside: int) -> None:
        whole = torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, (self.held() + beside) / whole), self._device)


def meter_of(device: torch.device) -> Meter:
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()
