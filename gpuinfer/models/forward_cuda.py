"""Runs a module on blocks of rows, on a CUDA device.

Rows cross the bus as they arrived (one byte a feature, or one bit) from pinned memory and are cast over there.
Each slot has buffers and a stream of its own, so that with two slots one batch's copies overlap the other's kernels.
Launching a small network's kernels one by one would cost more than running them: a CUDA graph launches all at once.

The few batch sizes that a CUDA graph is captured for: a batch is padded to the next of them.
"""

from __future__ import annotations

import logging
import queue
from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpuinfer.api import ModelSpec, enter_station
from gpuinfer.models.capturing import captured, new_stream, release_cached_memory, wait_for_device
from gpuinfer.models.layouts import BITS, called, row_dtype, row_shape
from gpuinfer.models.memory import StepSize, first_line, is_out_of_memory
from gpuinfer.models.pinned import sources
from gpuinfer.models.staging import Block, Blocks, like, table_of, tensors_of, unpacked

SMALLEST = 16
HALF_STEPS_FROM = 1024  # from here on padding costs more than a further graph: sizes grow by 1.5 and 1.33 in turn


def buckets_up_to(max_rows: int) -> list[int]:
    """Ascending batch sizes, the last exactly `max_rows`. Less than half of any batch above 16 rows is padding."""
    sizes, size = [], SMALLEST
    while size < max_rows:
        sizes.append(size)
        if size >= HALF_STEPS_FROM and size * 3 // 2 < max_rows:
            sizes.append(size * 3 // 2)
        size *= 2
    return [*sizes, max_rows]


def bucket_for(rows: int, buckets: Sequence[int]) -> int:
    """The smallest bucket that holds `rows`. Raises `ValueError` when none does."""
    at = bisect_left(buckets, rows)
    if at == len(buckets):
        raise ValueError(f"{rows} rows fit in none of the buckets up to {buckets[-1]}")
    return buckets[at]


logger = logging.getLogger("gpuinfer")

DETERMINISTIC_CHUNK_ROWS = 2048


class Slot:
    """What one batch in flight needs for itself. One thread at a time uses it."""

    def __init__(self, rows: int, spec: ModelSpec, device: torch.device) -> None:
        self.stream = new_stream(device)
        self.done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps: the core has searching to do
        shape, dtype = (rows, *row_shape(spec)), getattr(torch, row_dtype(spec).name)
        self.staging = torch.empty(shape, dtype=dtype, pin_memory=True)
        self.inputs = torch.zeros(shape, dtype=dtype, device=device)
        # Its graphs never run at the same time, so that they may share their working memory.
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Any]] = {}


class CudaForward:
    """`module`, in evaluation mode and `dtype` on `device`, on batches of blocks. As many threads as `slots` share one.

    With `fixed_shape` every batch is padded to exactly `chunk_rows`, see `CpuForward`.
    """

    def __init__(
        self,
        module: nn.Module,
        spec: ModelSpec,
        *,
        device: torch.device,
        dtype: torch.dtype,
        chunk_rows: int,
        slots: int = 2,
        graphs: bool = True,
        fixed_shape: bool = False,
    ) -> None:
        self.module, self.spec, self.device, self.dtype = module, spec, device, dtype
        self.fixed_shape, self.graphs = fixed_shape, graphs
        self.step = StepSize(chunk_rows, str(device), called(spec))
        with torch.inference_mode(), torch.cuda.device(device):
            self._table = table_of(dtype, device) if spec.input_dtype == BITS else None
            slot_list = [Slot(chunk_rows, spec, device) for _ in range(slots)]
            wait_for_device(device)  # weights and buffers were made on the default stream
            self._shaped_like = self._warm_up(slot_list)
            release_cached_memory()  # the graphs have memory of their own; that of the first runs is free again
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for slot in slot_list:
            self._free.put(slot)

    def __call__(self, blocks: Sequence[Block]) -> list[Any]:
        """The same promise as `CpuForward.__call__`."""
        slot = self._free.get()
        try:
            with torch.inference_mode(), torch.cuda.device(self.device):
                enter_station("transfer")
                run = Blocks(blocks)
                room = room_for(self._shaped_like, run.rows)
                self._fill(slot, run, room)
                return run.split(room)
        finally:
            self._free.put(slot)

    def _fill(self, slot: Slot, run: Blocks, room: Any) -> None:
        done = 0
        while done < run.rows:
            chunk = self.step.rows
            rows = min(chunk, run.rows - done)
            shape = chunk if self.fixed_shape else rows
            with self.step.under_way(shape):
                failure = self._attempt(slot, run, done, rows, chunk, room)
            if failure is not None:
                release_cached_memory()
                self.step.make_room(shape, failure)
                continue
            self.step.made(shape)
            done += rows

    def _attempt(self, slot: Slot, run: Blocks, start: int, rows: int, chunk: int, room: Any) -> BaseException | None:
        """Answer the rows from `start` on in `room`, or say why memory did not suffice."""
        try:
            parts = list(sources(run.pieces(start, start + rows), slot.staging))
            enter_station("forward")
            with torch.cuda.stream(slot.stream):
                for at, part in parts:
                    slot.inputs[at : at + len(part)].copy_(part, non_blocking=True)
                self._launch(slot, rows, self._buckets(chunk), room, start)
                slot.done.record(slot.stream)
            slot.done.synchronize()
            enter_station("transfer")
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            slot.stream.synchronize()  # nothing may still read the buffers
            return error.with_traceback(None)
        return None

    def _launch(self, slot: Slot, rows: int, buckets: Sequence[int], room: Any, start: int) -> None:
        """Queue everything for the first `rows` rows of the slot's inputs on the current stream: forward, copy out."""
        padded = bucket_for(rows, buckets)
        if padded > rows:
            slot.inputs[rows:padded].zero_()
        if padded in slot.graphs:
            graph, answers = slot.graphs[padded]
            graph.replay()
        else:
            answers = self._forward(slot.inputs[:padded])
        store(answers, room, start, rows)

    def _forward(self, inputs: Tensor) -> Any:
        """Cast, run, cast back: contiguous float32 on the device, so that the copy out is plain."""
        features = inputs.to(self.dtype) if self._table is None else unpacked(inputs, self.spec.inputs, self._table)
        answers = self.module(features)
        return like(answers, [tensor.float().contiguous() for tensor in tensors_of(answers)])

    def _buckets(self, chunk: int) -> list[int]:
        return [chunk] if self.fixed_shape else buckets_up_to(chunk)

    def _warm_up(self, slots: Sequence[Slot]) -> Any:
        """Run each bucket once in each slot and capture its graph, before any traffic; answers of the least bucket."""
        while True:
            chunk = self.step.rows
            try:
                answers = self._warm_up_to(chunk, slots)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)
            else:
                self.step.made(chunk)
                return answers
            for slot in slots:
                slot.graphs.clear()
            release_cached_memory()
            self.step.make_room(chunk, failure)

    def _warm_up_to(self, chunk: int, slots: Sequence[Slot]) -> Any:
        answers: Any = None
        for bucket in reversed(self._buckets(chunk)):  # largest first: the others then find their memory in the pool
            for slot in slots:
                answers = self._ready(slot, bucket)
        return answers

    def _ready(self, slot: Slot, bucket: int) -> Any:
        with torch.cuda.stream(slot.stream):
            answers = self._forward(slot.inputs[:bucket])
        slot.stream.synchronize()
        if self.graphs:
            release_cached_memory()  # of this run: the graph has memory of its own, and both together are twice as much
            self._capture(slot, bucket)
        return answers

    def _capture(self, slot: Slot, bucket: int) -> None:
        try:
            with captured(slot.stream, slot.pool) as graph:
                answers = self._forward(slot.inputs[:bucket])
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise
            self.graphs = False
            logger.warning(
                "this model cannot be captured in a CUDA graph (%s): each kernel is launched by itself. "
                "-B graphs=false silences this.",
                first_line(error),
            )
            return
        slot.graphs[bucket] = graph, answers


def room_for(answers: Any, rows: int) -> Any:
    """Uninitialised pinned float32 tensors for `rows` rows of answers shaped like `answers`."""
    shapes = [(rows, *tensor.shape[1:]) for tensor in tensors_of(answers)]
    return like(answers, [torch.empty(shape, dtype=torch.float32, pin_memory=True) for shape in shapes])


def store(answers: Any, room: Any, start: int, rows: int) -> None:
    """Queue the copy of the first `rows` rows of `answers` to place `start` of `room`."""
    for source, target in zip(tensors_of(answers), tensors_of(room), strict=True):
        target[start : start + rows].copy_(source[:rows], non_blocking=True)
