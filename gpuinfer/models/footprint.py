"""How much memory a module of rows takes: its weights, the activations of a forward learnt from two small batches, and
what this process holds of a device's memory while it tries something.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpuinfer.host.machine import memory_available
from gpuinfer.host.process_memory import limit_memory, peak_bytes, reset_peak, resident_bytes
from gpuinfer.models.cuda_graphs import release_cached_memory, wait_for_device

COARSE = (8192, 1024)  # rows of which tensors are large enough that torch rounds their memory up by little
FORWARDS = 3  # after so many, the memory of a process does not grow
HELD = 1.2
"""Resident memory of a process on the CPU divided by the bytes of its tensors at their peak: the C library keeps freed
pieces, and later ones do not fit into all of them. Measured: 1.02 to 1.8, 1.2 in the median (`docs/memory.md`)."""


def weight_bytes(module: nn.Module) -> int:
    """Bytes of all tensors that the module holds, each counted once: parameters, buffers, packed weights."""
    held: dict[int, int] = {}
    for part in module.modules():
        own = [*part._parameters.values(), *part._buffers.values(), *vars(part).values()]
        for tensor in own:
            if isinstance(tensor, Tensor):
                held[_place(tensor)] = tensor.numel() * tensor.element_size()
    return sum(held.values())


def _place(tensor: Tensor) -> int:
    try:
        return tensor.data_ptr() or id(tensor)
    except RuntimeError:  # packed by oneDNN, which has memory of its own
        return id(tensor)


@dataclass(frozen=True, slots=True)
class Activations:
    """Bytes of tensors at the peak of a call of n rows: `fixed + each * n`."""

    fixed: float = 0.0
    each: float = 0.0

    def resident_bytes(self, rows: int) -> int:
        """The most that a process holds for calls of so many rows, one after the other, on the CPU."""
        return round(HELD * (self.fixed + self.each * rows))


def activations(call: Callable[[int], Any], few: int, more: int) -> Activations:
    """Learnt from calls of `few` and `more` rows on the CPU, whose answers count too."""
    small, large = (traced_peak(lambda: call(rows)) for rows in (few, more))  # noqa: B023 (called at once)
    each = max(0.0, (large - small) / (more - few))
    return Activations(max(0.0, large - each * more), each)


def traced_peak(call: Callable[[], Any]) -> int:
    """The most bytes that torch's CPU allocator had handed out at once while `call` ran, its answer included."""
    from torch.profiler import ProfilerActivity, profile

    with (
        warnings.catch_warnings(action="ignore"),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        answer = call()
    tree: Any = seen.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    events = sorted(_allocations(tree), key=lambda one: one.start_time_ns)
    alive: dict[int, int] = {}
    peak = 0
    for event in events:
        address, size = event.extra_fields.ptr, event.extra_fields.alloc_size
        if size >= 0:
            alive[address] = size
            peak = max(peak, sum(alive.values()))
        else:
            alive.pop(address, None)  # pieces from before the call are not in it
    del answer
    return peak


def _allocations(nodes: Sequence[Any]) -> Iterator[Any]:
    for node in nodes:
        if str(node.tag).endswith("Allocation"):
            yield node
        yield from _allocations(node.children)


def bytes_of_a_row(call: Callable[[int], Any], device: torch.device, few: int, more: int) -> float:
    """Bytes of a CUDA device's memory that each row of a call takes, beyond what was in use before.

    Calls of `few` and `more` rows give the size of tensors; calls large enough for the allocator's large pieces give
    what it reserves, which is more where later tensors do not fit into freed pieces.
    """
    each = (device_peaks(call, device, more)[0] - device_peaks(call, device, few)[0]) / (more - few)
    many = next((rows for rows in COARSE if 4 * rows * each < torch.cuda.mem_get_info(device)[0]), None)
    if many is None:
        return each
    return max(each, (device_peaks(call, device, 2 * many)[1] - device_peaks(call, device, many)[1]) / many)


def device_peaks(call: Callable[[int], Any], device: torch.device, rows: int) -> tuple[int, int]:
    """Peaks while `call` ran, beyond what was in use before: bytes of tensors, bytes that the allocator reserved."""
    wait_for_device(device)
    release_cached_memory()
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    answer = call(rows)
    wait_for_device(device)
    del answer
    return torch.cuda.max_memory_allocated(device) - before[0], torch.cuda.max_memory_reserved(device) - before[1]


class MemoryMeter:
    """A process's memory, in bytes: resident memory of the interpreter, of libraries, of the model."""

    def free(self) -> int:
        """Available memory."""
        return memory_available()

    def held(self) -> int:
        """Memory of this process."""
        return resident_bytes()

    def forget(self) -> None:
        """Return freed memory and reset the peak."""
        gc.collect()
        reset_peak()

    def peak(self) -> int:
        """The peak since `forget`."""
        return peak_bytes()

    def bound(self, beside: int) -> None:
        """Limit this process to `beside` bytes more than it holds now."""
        limit_memory(beside)


class CudaMemoryMeter(MemoryMeter):
    """Memory that torch's allocator reserves on one device, gaps between tensors included, the
    driver's own excluded.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        torch.zeros(1, device=device)  # the driver allocates its own memory

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


def memory_meter_of(device: torch.device) -> MemoryMeter:
    return CudaMemoryMeter(device) if device.type == "cuda" else MemoryMeter()
