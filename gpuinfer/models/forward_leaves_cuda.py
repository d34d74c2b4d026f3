"""Runs a module on rows of any shape on a CUDA device.

Rows of a batch are stacked in pinned memory, all leaves of all rows one behind the other, and go to the device in one
copy. The device reports for each row whether its answers hold NaN or +inf; they and the answers come back to pinned
memory, and the host waits once a batch. Rows that lie on a device are joined there, and so are their answers.

Each lane has its own stream and memory, so that with two lanes one batch's copies overlap the other's kernels.
"""

from __future__ import annotations

import contextlib
import math
import queue
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from gpuinfer.api import enter_station
from gpuinfer.engine.results import CheckedResult
from gpuinfer.models.copy_overlap import CopyOverlap, TimedBatch, Untimed
from gpuinfer.models.cuda_graphs import event_behind, new_stream, wait_for_device
from gpuinfer.models.forward_leaves import LeafAnswers, LeavesForward, Rows, leaf_tensor, leaves_in
from gpuinfer.models.row_blocks import rearranged
from gpuinfer.models.row_layout import RowLayout, SingleRow

SECTION = 256  # bytes: each section of a buffer begins at a multiple of it, as what torch allocates does
LEAST_PINNED = 64 << 10  # bytes of a lane's first buffer

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype of a tensor."""


class DeviceRows:
    """Rows of which an array lies on a CUDA device: their leaves, arrays [rows, *shape]. Made by the thread whose
    current stream wrote them. `single`: one row, whose answer has no dimension of rows.
    """

    def __init__(self, leaves: Sequence[Any], rows: int, single: bool = False) -> None:
        self.leaves, self.rows, self.single = leaves, rows, single
        devices = [leaf.device for leaf in leaves if getattr(leaf, "is_cuda", False)]
        self.device = devices[0]  # where the answers go
        self.stream = torch.cuda.current_stream(self.device)
        self.written = {device: event_behind(device) for device in devices}

    def __len__(self) -> int:
        return self.rows


class PinnedBuffer:
    """Pinned memory that grows as it is needed."""

    def __init__(self) -> None:
        self._held: Tensor | None = None

    def take(self, size: int) -> Tensor:
        """The first `size` bytes, uint8; the next call gives out the same ones."""
        if self._held is None or len(self._held) < size:
            room = max(LEAST_PINNED, 1 << (size - 1).bit_length())
            self._held = None  # before the other one is made
            self._held = torch.empty(room, dtype=torch.uint8, pin_memory=True)
        return self._held[:size]


class RowLane:
    """Stream and pinned memory of one batch in flight. Used by one thread at a time."""

    def __init__(self, device: torch.device) -> None:
        self.stream = new_stream(device)
        self.done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps: callers have work to do
        self.rows, self.answers = PinnedBuffer(), PinnedBuffer()


class CudaLeavesForward(LeavesForward):
    """`LeavesForward` on a CUDA device; as many threads as `lanes` share one.

    Takes `DeviceRows` too, whose answers stay on their device: they are complete, and belong to the stream that was
    current where the rows were made, as if they had been computed there.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: RowLayout,
        device: torch.device,
        dtype: torch.dtype,
        *,
        lanes: int = 2,
        copies: CopyOverlap | None = None,
        **options: Any,
    ) -> None:
        """`options`: those of `LeavesForward`."""
        super().__init__(module, layout, device, dtype, **options)
        self._copies = CopyOverlap(lanes) if copies is None else copies
        self._dtypes: list[torch.dtype] = [getattr(torch, leaf.dtype) for leaf in layout.leaves]
        self._free: queue.SimpleQueue[RowLane] = queue.SimpleQueue()
        with torch.cuda.device(device):
            wait_for_device(device)  # weights were made on the default stream
            for _ in range(lanes):
                self._free.put(RowLane(device))

    def __call__(self, requests: Sequence[Any]) -> list[Any]:
        """As `LeavesForward.__call__`; for `DeviceRows` a `CheckedResult` on their device."""
        if not any(isinstance(one, DeviceRows) for one in requests):
            return super().__call__(requests)
        order = sorted(range(len(requests)), key=lambda place: isinstance(requests[place], DeviceRows))
        found = super().__call__([requests[place] for place in order])
        return [result for _, result in sorted(zip(order, found, strict=True), key=lambda pair: pair[0])]

    def _answered(self, requests: Sequence[Any]) -> LeafAnswers:
        """Answers to `DeviceRows`, which come last, stay on the device: `LeafAnswers.parts` are those to the others."""
        lane, timed = self._free.get(), self._copies.batch()
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(lane.stream):
                try:
                    timed.mark(lane.stream)
                    leaves, rows = self._uploaded(requests, lane)
                    enter_station("forward")
                    timed.mark(lane.stream)
                    answer, parts = self._through(leaves, rows)
                    return self._brought_back(answer, parts, requests, lane, timed)
                except BaseException:
                    timed.over(whole=False)
                    with contextlib.suppress(RuntimeError):  # a lost device has raised before
                        lane.stream.synchronize()  # type: ignore[no-untyped-call]  # it may read rows and memory of the lane
                    raise
        finally:
            self._free.put(lane)

    def _uploaded(self, requests: Sequence[Any], lane: RowLane) -> tuple[list[Tensor], int]:
        """Queue the way of all rows to the device: their leaves there, [rows, *shape], and how many rows there are."""
        here = [one for one in requests if not isinstance(one, DeviceRows)]
        leaves = self._staged(here, lane) if here else []
        if there := requests[len(here) :]:
            for one in there:
                for device, event in one.written.items():
                    torch.cuda.current_stream(device).wait_event(event)
            columns = zip(*(one.leaves for one in there), strict=True)
            moved = [[leaf_tensor(leaf).to(self._device) for leaf in column] for column in columns]
            leaves = [torch.cat([*leaves[place : place + 1], *column]) for place, column in enumerate(moved)]
        return self._cast(leaves), sum(map(len, requests))

    def _staged(self, requests: Sequence[Rows], lane: RowLane) -> list[Tensor]:
        rows, singles = sum(map(len, requests)), all(isinstance(one, SingleRow) for one in requests)
        of_each = [
            one.leaves if isinstance(one, SingleRow) and singles else leaves_in(one, self._layout) for one in requests
        ]
        columns = list(zip(*of_each, strict=True))
        forms: list[Form] = [
            ((rows, *column[0].shape[0 if singles else 1 :]), dtype)
            for column, dtype in zip(columns, self._dtypes, strict=True)
        ]
        staged = lane.rows.take(bytes_for(forms))
        for section, column in zip(sections(staged, forms), columns, strict=True):
            if singles:
                stack_into(section, column)
                continue
            at = 0
            for part in column:
                section[at : at + len(part)].copy_(part)
                at += len(part)
        memory = torch.empty(len(staged), dtype=torch.uint8, device=self._device)
        return sections(memory.copy_(staged, non_blocking=True), forms)

    def _brought_back(
        self, answer: Any, parts: Sequence[Tensor], requests: Sequence[Any], lane: RowLane, timed: TimedBatch | Untimed
    ) -> LeafAnswers:
        """Queue the way of the answers, and wait until the device is done with the batch."""
        parts = [part.to(self._device) for part in parts]
        sound = self._sound(parts, len(parts[0]))
        there = [one for one in requests if isinstance(one, DeviceRows)]
        rows = len(parts[0]) - sum(map(len, there))
        moving = [part[:rows] for part in parts] + ([] if sound is None else [sound])
        forms: list[Form] = [(tuple(part.shape), part.dtype) for part in moving]
        staged = lane.answers.take(bytes_for(forms))
        timed.mark(lane.stream)
        for section, part in zip(sections(staged, forms), moving, strict=True):
            if part.numel():
                section.copy_(part, non_blocking=True)
        kept = kept_there([part[rows:].clone() for part in parts], there) if there else []
        timed.mark(lane.stream)
        lane.done.record(lane.stream)  # type: ignore[no-untyped-call]
        lane.done.synchronize()  # type: ignore[no-untyped-call]
        timed.over()
        enter_station("transfer")
        own = sections(staged.clone(), forms)  # the next batch is written over the lane's memory
        return LeafAnswers(answer, own[: len(parts)], None if sound is None else own[-1], kept)

    def _divided(self, found: LeafAnswers, requests: Sequence[Any]) -> list[Any]:
        here = requests[: len(requests) - len(found.kept)]
        return [*super()._divided(found, here), *(CheckedResult(rearranged(found.answer, one)) for one in found.kept)]


def kept_there(parts: Sequence[Tensor], requests: Sequence[DeviceRows]) -> list[list[Tensor]]:
    """The answers to each request, on its device. Their memory is given out again only once what its own stream does
    with them is over.
    """
    kept, at = [], 0
    for one in requests:
        own = [part[at : at + len(one)].to(one.device) for part in parts]
        for part in own:
            part.record_stream(one.stream)
        kept.append([part[0] for part in own] if one.single else own)
        at += len(one)
    return kept


def bytes_for(forms: Sequence[Form]) -> int:
    """The size of a buffer with a section for each tensor."""
    return sum(section_bytes(form) for form in forms)


def section_bytes(form: Form) -> int:
    shape, dtype = form
    return -(-math.prod(shape) * dtype.itemsize // SECTION) * SECTION


def sections(memory: Tensor, forms: Sequence[Form]) -> list[Tensor]:
    """The tensors that lie in a buffer one behind the other, uint8 [`bytes_for(forms)`]."""
    found, at = [], 0
    for shape, dtype in forms:
        found.append(memory[at : at + math.prod(shape) * dtype.itemsize].view(dtype).view(shape))
        at += section_bytes((shape, dtype))
    return found


def stack_into(section: Tensor, column: Sequence[Any]) -> None:
    """Copy a leaf of several rows, arrays [*shape], into a tensor [rows, *shape] on the host."""
    try:
        if isinstance(column[0], Tensor):
            torch.stack(list(column), out=section)
        else:
            np.stack(column, out=section.numpy())
    except (TypeError, RuntimeError):  # tensors and arrays together, or in bfloat16, which NumPy does not know
        for place, leaf in enumerate(column):
            section[place].copy_(leaf_tensor(leaf))
