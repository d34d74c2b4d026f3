"""Runs a module on blocks of rows, on a CUDA device.

Rows are copied as they arrived (one byte a feature, or one bit) from pinned memory and are cast on the device. Answers
are written where the caller wants them, and the device reports for each row whether they hold NaN or +inf.

Each slot has its own buffers and stream, so that with two slots one batch's copies overlap the other's kernels. A CUDA
graph launches all kernels at once, since launching a small network's kernels one by one costs more than running them; a
batch is padded to the next of a few captured sizes.
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuinfer.api import ModelSpec, enter_station
from gpuinfer.errors import BadResult
from gpuinfer.models.copy_overlap import CopyOverlap
from gpuinfer.models.cuda_graphs import captured, new_stream, release_cached_memory, wait_for_device
from gpuinfer.models.out_of_memory import StepSize, first_line, is_out_of_memory
from gpuinfer.models.pinned_memory import WORTH_A_COPY, copy_plan, deliver, unstage
from gpuinfer.models.row_blocks import Block, RowBlocks, rearranged, sound_rows, table_of, tensors_of, unpacked
from gpuinfer.models.row_format import BITS, network_title, row_dtype, row_shape

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


Found = tuple[Any, Tensor]
"""A module's answers, float32 on the device, and for each row whether they are sound, see `sound_rows`."""


class AnswerTargets(NamedTuple):
    """Where the answers to consecutive rows are written."""

    parts: Sequence[RowBlocks]  # for each part of an answer float32 arrays, which have as many rows together
    sound: NDArray[np.bool_] | None = None  # for each row: whether its answers hold neither NaN nor +inf


def refuse_unlike(parts: Sequence[Tensor], rows: int, targets: AnswerTargets) -> None:
    """Raises `BadResult` where answers do not have the shapes that there is room for."""
    found = [tuple(part.shape[1:]) for part in parts if len(part) >= rows]
    agreed = [target.blocks[0].shape[1:] for target in targets.parts]
    if found != agreed:
        shapes = [tuple(part.shape) for part in parts]
        raise BadResult(
            f"the model answered {rows} rows with shapes {shapes} where {agreed} a row were agreed. "
            "Let the model always answer alike."
        )


class ForwardSlot:
    """Buffers, stream and graphs of one batch in flight. Used by one thread at a time."""

    def __init__(self, rows: int, spec: ModelSpec, device: torch.device) -> None:
        self.stream = new_stream(device)
        self.done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps: the core has searching to do
        shape, dtype = (rows, *row_shape(spec)), getattr(torch, row_dtype(spec).name)
        self.staging = torch.empty(shape, dtype=dtype, pin_memory=True)
        self.inputs = torch.zeros(shape, dtype=dtype, device=device)
        self.sound = torch.empty(rows, dtype=torch.bool, pin_memory=True)
        self._answers: dict[int, Tensor] = {}
        # Its graphs never run at the same time, so that they may share their working memory.
        self.pool = torch.cuda.graph_pool_handle()
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, Found]] = {}

    def room(self, part: int, shape: Sequence[int], rows: int) -> Tensor:
        """Pinned float32 buffer [rows or more, *shape] for this part of the answers."""
        held = self._answers.get(part)
        if held is None or len(held) < rows:
            most = 1 << (rows - 1).bit_length()
            held = self._answers[part] = torch.empty((most, *shape), dtype=torch.float32, pin_memory=True)
        return held


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
        copies: CopyOverlap | None = None,
    ) -> None:
        self.module, self.spec, self.device, self.dtype = module, spec, device, dtype
        self.fixed_shape, self.graphs = fixed_shape, graphs
        self._copies = CopyOverlap(slots) if copies is None else copies
        self.step = StepSize(chunk_rows, str(device), network_title(spec))
        with torch.inference_mode(), torch.cuda.device(device):
            self._table = table_of(dtype, device) if spec.input_dtype == BITS else None
            slot_list = [ForwardSlot(chunk_rows, spec, device) for _ in range(slots)]
            wait_for_device(device)  # weights and buffers were made on the default stream
            self._shaped_like, _ = self._warm_up(slot_list)
        self._free: queue.SimpleQueue[ForwardSlot] = queue.SimpleQueue()
        for slot in slot_list:
            self._free.put(slot)

    def __call__(self, blocks: Sequence[Block]) -> list[Any]:
        """The same promise as `CpuForward.__call__`."""
        run = RowBlocks(blocks)
        room = room_for(self._shaped_like, run.rows)
        self._answer(run, AnswerTargets([RowBlocks([tensor.numpy()]) for tensor in tensors_of(room)]))
        return run.split(room)

    def write(self, blocks: Sequence[Block], targets: Sequence[Sequence[Block]]) -> list[bool]:
        """Write the answers to each block into its float32 arrays [rows, ...], one for each part of an answer. Returns
        for each block whether its answers are free of NaN and +inf.

        Arrays in pinned memory (see `Opened.pin`) are written by the device, and only until this returns or raises.
        Raises as `__call__` does; the arrays' content is then undefined.
        """
        run = RowBlocks(blocks)
        sound = np.empty(run.rows, np.bool_)
        self._answer(run, AnswerTargets([RowBlocks(part) for part in zip(*targets, strict=True)], sound))
        if sound.all():
            return [True] * len(blocks)
        return [bool(sound[start : start + len(block)].all()) for start, block in zip(run.starts, blocks, strict=False)]

    def _answer(self, run: RowBlocks, targets: AnswerTargets) -> None:
        slot = self._free.get()
        try:
            with torch.inference_mode(), torch.cuda.device(self.device):
                enter_station("transfer")
                done = 0
                while done < run.rows:
                    chunk = self.step.rows
                    rows = min(chunk, run.rows - done)
                    shape = chunk if self.fixed_shape else rows
                    with self.step.under_way(shape):
                        failure = self._attempt(slot, run, done, rows, chunk, targets)
                    if failure is not None:
                        release_cached_memory()
                        self.step.make_room(shape, failure)
                        continue
                    self.step.made(shape)
                    done += rows
        finally:
            self._free.put(slot)

    def _attempt(
        self, slot: ForwardSlot, run: RowBlocks, start: int, rows: int, chunk: int, targets: AnswerTargets
    ) -> BaseException | None:
        """Answer the rows from `start` on, or return the error if memory ran out. In both cases the device is done with
        the rows, the targets and the slot.
        """
        stop, timed = start + rows, self._copies.batch()
        try:
            parts = list(copy_plan(run.pieces(start, stop), slot.staging))
            enter_station("forward")
            with torch.cuda.stream(slot.stream):
                timed.mark(slot.stream)
                for at, part in parts:
                    slot.inputs[at : at + len(part)].copy_(part, non_blocking=True)
                timed.mark(slot.stream)
                answers, sound = self._launch(slot, rows, self._buckets(chunk))
                refuse_unlike(tensors_of(answers), rows, targets)
                timed.mark(slot.stream)
                staged = []
                for number, (part, target) in enumerate(zip(tensors_of(answers), targets.parts, strict=True)):
                    room = partial(slot.room, number, part.shape[1:])
                    staged += deliver(part[:rows], target.pieces(start, stop), room)
                if targets.sound is not None:
                    slot.sound[:rows].copy_(sound[:rows], non_blocking=True)
                timed.mark(slot.stream)
                slot.done.record(slot.stream)
            slot.done.synchronize()
            timed.over()
            enter_station("transfer")
        except BaseException as error:
            timed.over(whole=False)
            with contextlib.suppress(RuntimeError):  # a lost device has raised before
                slot.stream.synchronize()
            if not (isinstance(error, RuntimeError) and is_out_of_memory(error)):
                raise
            return error.with_traceback(None)
        unstage(staged)
        if targets.sound is not None:
            np.copyto(targets.sound[start:stop], slot.sound[:rows].numpy())
        return None

    def _launch(self, slot: ForwardSlot, rows: int, buckets: Sequence[int]) -> Found:
        """Queue the forward of the first `rows` rows of the slot's inputs on the current stream; the results may have
        more rows.
        """
        padded = bucket_for(rows, buckets)
        if padded > rows:
            slot.inputs[rows:padded].zero_()
        if padded in slot.graphs:
            graph, found = slot.graphs[padded]
            graph.replay()
            return found
        return self._forward(slot.inputs[:padded])

    def _forward(self, inputs: Tensor) -> Found:
        """Cast, run, cast back to contiguous float32, so that the copy out is plain, and look for faults."""
        features = inputs.to(self.dtype) if self._table is None else unpacked(inputs, self.spec.inputs, self._table)
        answers = self.module(features)
        parts = [tensor.float().contiguous() for tensor in tensors_of(answers)]
        return rearranged(answers, parts), sound_rows(parts, len(inputs))

    def _buckets(self, chunk: int) -> list[int]:
        return [chunk] if self.fixed_shape else buckets_up_to(chunk)

    def _warm_up(self, slots: Sequence[ForwardSlot]) -> Found:
        """Run and capture each bucket once in each slot, before any traffic. Returns the answers of
        the least bucket.
        """
        while True:
            chunk = self.step.rows
            try:
                found = self._warm_up_to(chunk, slots)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)
            else:
                self.step.made(chunk)
                return found
            for slot in slots:
                slot.graphs.clear()
            release_cached_memory()
            self.step.make_room(chunk, failure)

    def _warm_up_to(self, chunk: int, slots: Sequence[ForwardSlot]) -> Found:
        buckets = self._buckets(chunk)[::-1]  # largest first: the others then find their memory in the pool
        found: Any = None
        for slot in slots:
            for bucket in buckets:
                with torch.cuda.stream(slot.stream):
                    found = self._forward(slot.inputs[:bucket])
            slot.stream.synchronize()
            release_cached_memory()  # graphs have their own memory: both together would take twice as much
        for slot in slots:
            for bucket in buckets:
                if self.graphs:
                    self._capture(slot, bucket)
        return found  # type: ignore[no-any-return]

    def _capture(self, slot: ForwardSlot, bucket: int) -> None:
        try:
            with captured(slot.stream, slot.pool) as graph:
                found = self._forward(slot.inputs[:bucket])
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
        slot.graphs[bucket] = graph, found


def room_for(answers: Any, rows: int) -> Any:
    """Uninitialised float32 tensors for `rows` rows of answers shaped like `answers`, owned by the caller.

    Only tensors that the device writes directly are pinned: pinned memory costs more than to copy a few rows once more.
    """
    made = []
    for tensor in tensors_of(answers):
        shape = (rows, *tensor.shape[1:])
        pinned = 4 * math.prod(shape) >= WORTH_A_COPY
        made.append(torch.empty(shape, dtype=torch.float32, pin_memory=pinned))
    return rearranged(answers, made)
