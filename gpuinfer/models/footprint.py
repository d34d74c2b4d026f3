"""What a module of rows takes: its weights as they are held, and what a call of it asks of torch's allocator.

That is learnt from two small batches.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gpuinfer.models.capturing import release_cached_memory, wait_for_device
from gpuinfer.models.heap import Event, Heap

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

    def at(self, rows: int) -> list[Event]:
        return [
            Event(number, -1 if fixed < 0 and not each else max(0, round(fixed + each * rows)))
            for number, fixed, each in self.pieces
        ]

    def resident_bytes(self, rows: int, before: Sequence[Event] = ()) -> int:
        """The most that a process holds for calls of so many rows, one after the other, on the CPU.

        Without what is left of the events `before`.
        """
        heap, events = Heap(), self.at(rows)
        heap.replay(before)
        kept = heap.taken
        for call in range(1, FORWARDS + 1):
            heap.replay([Event(call * KEPT + one.piece, one.size) for one in events])
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


def traced(call: Callable[[], Any]) -> list[Event]:
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
    events: list[Event] = []
    for one in found:
        place, size = one.extra_fields.ptr, one.extra_fields.alloc_size
        if size >= 0:
            alive[place] = len(events)
            events.append(Event(len(events), size))
        elif place in alive:  # else it was there before
            events.append(Event(alive.pop(place), -1))
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
