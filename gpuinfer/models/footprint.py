"""How much memory a module of rows takes: its weights, the allocations of a forward learnt from two small batches, and
what this process holds of a device's memory while it tries something. Resident memory is more than what is in use,
so the allocations are replayed by the rules of glibc's malloc (Lea 1996, "A memory allocator"; Gloger's ptmalloc): a
piece comes from the heap's smallest hole that is large enough, else from its end; where that would have to grow, a
large piece gets pages of its own, which go back to the system when it is freed.
"""

from __future__ import annotations

import gc
import warnings
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gpuinfer.host.machine import memory_available
from gpuinfer.host.process_memory import limit_memory, peak_bytes, reset_peak, resident_bytes
from gpuinfer.models.cuda_graphs import release_cached_memory, wait_for_device
from gpuinfer.models.out_of_memory import LARGEST_OF_ROWS, STEP

ALIGNED = 96  # bytes: an aligned piece is looked for as so much larger, so that the hole it leaves is too small for it


@dataclass(frozen=True, slots=True)
class HeapEvent:
    """One step of a series: `size` bytes are taken as piece number `piece`, or that piece is freed (size -1)."""

    piece: int
    size: int


class HeapReplay:
    """Starts empty. Bytes."""

    def __init__(self) -> None:
        self._holes: list[tuple[int, int]] = []  # start and size, ascending, no two of them neighbours
        self._top = self._highest = self._end = 0  # of what is in use; of all that ever was; of what the system gave
        self._apart = 0  # in pages of their own
        self._places: dict[int, tuple[int, int]] = {}  # of a piece: start (-1: apart) and size
        self.peak = 0

    @property
    def taken(self) -> int:
        """What is in use now."""
        return sum(size for _, size in self._places.values())

    def replay(self, events: Sequence[HeapEvent]) -> None:
        """What is not freed in it stays taken."""
        for event in events:
            if event.size < 0:
                self._free(event.piece)
            elif event.size:
                self._take(event.piece, event.size)

    def free_from(self, number: int) -> None:
        """All pieces of this number and above."""
        for piece in [one for one in self._places if one >= number]:
            self._free(piece)

    def _take(self, piece: int, size: int) -> None:
        start = self._place_for(size)
        self._places[piece] = start, size
        if start < 0:
            self._apart += size
        self.peak = max(self.peak, self._highest + self._apart)

    def _place_for(self, size: int) -> int:
        fitting = [hole for hole in self._holes if hole[1] >= size + ALIGNED]
        if fitting:
            hole = min(fitting, key=lambda one: one[1])
            self._holes.remove(hole)
            insort(self._holes, (hole[0] + size, hole[1] - size))
            return hole[0]
        start = self._top
        if start + size + ALIGNED > self._end:
            if size >= LARGEST_OF_ROWS:
                return -1
            self._end = start + size + STEP
        self._top += size
        self._highest = max(self._highest, self._top)
        return start

    def _free(self, piece: int) -> None:
        start, size = self._places.pop(piece, (0, 0))
        if start < 0:
            self._apart -= size
            return
        insort(self._holes, (start, size))
        joined: list[tuple[int, int]] = []
        for begin, length in self._holes:
            if joined and sum(joined[-1]) == begin:
                joined[-1] = joined[-1][0], joined[-1][1] + length
            else:
                joined.append((begin, length))
        if joined and sum(joined[-1]) == self._top:
            self._top = joined.pop()[0]
        self._holes = joined


COARSE = (8192, 1024)  # rows of which tensors are large enough that torch rounds their memory up by little
FORWARDS = 3  # after so many the heap is as it stays
KEPT = 1 << 32  # numbers of pieces below it were there before the calls


def weight_bytes(module: nn.Module) -> int:
    """Of all tensors that the module holds, each once: parameters, buffers, and what it has packed for itself."""
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


@dataclass(frozen=True)
class Allocations:
    """What a call of n rows allocates and frees, in order: of each piece `fixed + each * n` bytes; -1: it is freed."""

    pieces: Sequence[tuple[int, float, float]]  # number, fixed, each

    def at(self, rows: int) -> list[HeapEvent]:
        return [
            HeapEvent(number, -1 if fixed < 0 and not each else max(0, round(fixed + each * rows)))
            for number, fixed, each in self.pieces
        ]

    def resident_bytes(self, rows: int, before: Sequence[HeapEvent] = ()) -> int:
        """The most that a process holds for calls of so many rows, one after the other, on the CPU.

        Without what is left of the events `before`.
        """
        heap, events = HeapReplay(), self.at(rows)
        heap.replay(before)
        kept = heap.taken
        for call in range(1, FORWARDS + 1):
            heap.replay([HeapEvent(call * KEPT + one.piece, one.size) for one in events])
            heap.free_from(call * KEPT)
        return heap.peak - kept


def allocations(call: Callable[[int], Any], few: int, more: int) -> Allocations:
    """Learnt from calls of `few` and `more` rows on the CPU, whose answers count as long as they last."""
    first, second = (traced(lambda: call(rows)) for rows in (few, more))  # noqa: B023 (called at once)
    same = [(one.piece, one.size < 0) for one in first] == [(one.piece, one.size < 0) for one in second]
    if not same:  # it computes otherwise when there are more rows: then all is in proportion
        return Allocations(
            [(one.piece, -1.0, 0.0) if one.size < 0 else (one.piece, 0.0, one.size / more) for one in second]
        )
    pieces = []
    for one, other in zip(first, second, strict=True):
        each = (other.size - one.size) / (more - few)
        pieces.append((one.piece, -1.0, 0.0) if one.size < 0 else (one.piece, max(0.0, one.size - each * few), each))
    return Allocations(pieces)


def traced(call: Callable[[], Any]) -> list[HeapEvent]:
    """What torch's allocator for the CPU is asked while `call` runs. What it answers is kept."""
    from torch.profiler import ProfilerActivity, profile

    with (
        warnings.catch_warnings(action="ignore"),
        profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen,
    ):
        answer = call()
    tree: Any = seen.profiler.kineto_results.experimental_event_tree()  # type: ignore[union-attr]
    found = [one for one in _walked(tree) if str(one.tag).endswith("Allocation")]
    found.sort(key=lambda one: one.start_time_ns)
    alive: dict[int, int] = {}
    events: list[HeapEvent] = []
    for one in found:
        place, size = one.extra_fields.ptr, one.extra_fields.alloc_size
        if size >= 0:
            alive[place] = len(events)
            events.append(HeapEvent(len(events), size))
        elif place in alive:  # else it was there before
            events.append(HeapEvent(alive.pop(place), -1))
    del answer
    return events


def _walked(nodes: Sequence[Any]) -> Iterator[Any]:
    for node in nodes:
        yield node
        yield from _walked(node.children)


def bytes_of_a_row(call: Callable[[int], Any], device: torch.device, few: int, more: int) -> float:
    """What a call of n rows takes of a CUDA device's memory for each of them, beyond what was taken before.

    `few` and `more` rows tell how much tensors take; then as many as fill large pieces of memory tell how much
    torch's allocator keeps for them, which is more where later tensors do not fit into what earlier ones have left.
    """
    each = (device_peaks(call, device, more)[0] - device_peaks(call, device, few)[0]) / (more - few)
    many = next((rows for rows in COARSE if 4 * rows * each < torch.cuda.mem_get_info(device)[0]), None)
    if many is None:
        return each
    return max(each, (device_peaks(call, device, 2 * many)[1] - device_peaks(call, device, many)[1]) / many)


def device_peaks(call: Callable[[int], Any], device: torch.device, rows: int) -> tuple[int, int]:
    """The most bytes that tensors took at once while `call` ran, and that the allocator held, beyond before."""
    wait_for_device(device)
    release_cached_memory()
    before = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    answer = call(rows)
    wait_for_device(device)
    del answer
    return torch.cuda.max_memory_allocated(device) - before[0], torch.cuda.max_memory_reserved(device) - before[1]


class MemoryMeter(Protocol):
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


class CpuMemoryMeter:
    """Resident memory: of the interpreter, of libraries, of the model."""

    def free(self) -> int:
        return memory_available()

    def held(self) -> int:
        return resident_bytes()

    def forget(self) -> None:
        gc.collect()
        reset_peak()

    def peak(self) -> int:
        return peak_bytes()

    def bound(self, beside: int) -> None:
        limit_memory(beside)


class CudaMemoryMeter:
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


def memory_meter_of(device: torch.device) -> MemoryMeter:
    return CudaMemoryMeter(device) if device.type == "cuda" else CpuMemoryMeter()
