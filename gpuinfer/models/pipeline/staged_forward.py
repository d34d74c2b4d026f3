"""Batches of blocks through a model's stages: rows cut into micro-batches for the first stage, the last one's answers
put together again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpuinfer.api import ModelSpec, enter_station
from gpuinfer.models.forward_cpu import GRAIN, padded
from gpuinfer.models.out_of_memory import StepSize, is_out_of_memory
from gpuinfer.models.pipeline.schedule import Pipeline
from gpuinfer.models.row_blocks import (
    BitCast,
    Block,
    RowBlocks,
    cast,
    concatenated,
    rearranged,
    table_of,
    tensors_of,
    unpacked,
)
from gpuinfer.models.row_format import BITS, row_dtype, row_shape


class OnCpu:
    """Copies rows in and answers out, in the callers' threads, while the stages compute: on a CPU rows become features
    [rows, inputs] at once.
    """

    def __init__(self, spec: ModelSpec, dtype: torch.dtype) -> None:
        self._inputs, self._dtype = spec.inputs, dtype
        self._cast = BitCast(spec.inputs, dtype) if spec.input_dtype == BITS else cast

    def load(self, pieces: Sequence[Block], shape: int) -> torch.Tensor:
        """The first stage's input: the rows of these blocks, padded with zeros to `shape` rows, in memory of its own,
        as it may be needed until the last stage.
        """
        return filled_room(pieces, torch.empty(shape, self._inputs, dtype=self._dtype), self._cast)

    def unload(self, answer: Any) -> Any:
        """Contiguous float32 tensors on the CPU, arranged as the model's answer."""
        return rearranged(answer, [tensor.float().contiguous() for tensor in tensors_of(answer)])


class OnCuda:
    """For CUDA: rows are copied as they came, a byte or a bit each feature, from pinned memory; the first stage casts
    them.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._shape, self._dtype = row_shape(spec), getattr(torch, row_dtype(spec).name)

    def load(self, pieces: Sequence[Block], shape: int) -> torch.Tensor:
        return filled_room(pieces, torch.empty((shape, *self._shape), dtype=self._dtype, pin_memory=True), cast)

    def unload(self, answer: Any) -> Any:
        """The last stage has copied the answers (`from_cuda`)."""
        return answer


def filled_room(pieces: Sequence[Block], room: torch.Tensor, fill: Any) -> torch.Tensor:
    """`room`, filled with these rows and then zeros."""
    rows = sum(map(len, pieces))
    fill(pieces, room if rows == len(room) else room[:rows])
    if rows < len(room):
        room[rows:].zero_()
    return room


class ToCuda:
    """The first CUDA stage's entry: pinned rows → features [rows, inputs], on its stream."""

    def __init__(self, spec: ModelSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype, self._inputs = device, dtype, spec.inputs
        self._table = table_of(dtype, device) if spec.input_dtype == BITS else None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        there = rows.to(self._device, non_blocking=True)
        return there.to(self._dtype) if self._table is None else unpacked(there, self._inputs, self._table)


def from_cuda(answer: Any) -> Any:
    """The last CUDA stage's exit: float32 tensors in pinned memory, complete once its stream has reached this point."""
    found = []
    for tensor in tensors_of(answer):
        room = torch.empty(tensor.shape, dtype=torch.float32, pin_memory=True)
        found.append(room.copy_(tensor.float(), non_blocking=True))
    return rearranged(answer, found)


Range = tuple[int, int]

FILLED = 4  # micro-batches of a lone batch for each stage: 4 s / (5 s - 1) of the time is work, over 0.8
LEAST_ROWS = 128  # of a micro-batch, unless somebody says otherwise: with fewer the model itself becomes slow


class StagedForward:
    """The model's answers by way of a pipeline. As many threads as batches may be in flight share one.

    `rows` is the most in a micro-batch; with `even` a batch that finds the stages empty is cut into smaller ones, so
    that all of them soon have work. With `fixed_shape` each goes through as exactly `rows` rows, see `CpuForward`. With
    `alone` a micro-batch enters only once the one before it is through.
    """

    def __init__(
        self, pipeline: Pipeline, moving: OnCpu | OnCuda, rows: int, *, even: bool, fixed_shape: bool, alone: bool
    ) -> None:
        self.pipeline, self._moving = pipeline, moving
        self.step = StepSize(rows)
        self._even, self._fixed_shape, self._alone = even, fixed_shape, alone

    def __call__(self, blocks: Sequence[Block]) -> list[Any]:
        """The same promise as `CpuForward.__call__`."""
        with torch.inference_mode():
            return self._answers(RowBlocks(blocks))

    def _answers(self, run: RowBlocks) -> list[Any]:
        answers: dict[Range, Any] = {}
        left = self._ranges(0, run.rows)
        while left:
            step, failed = self.step.rows, list[tuple[Range, BaseException]]()
            with self.step.under_way(step):
                outcomes = self._through(run, left, step)
            for span, outcome in zip(left, outcomes, strict=True):
                if not isinstance(outcome, BaseException):
                    answers[span] = outcome
                    self.step.made(step if self._fixed_shape else span[1] - span[0])
                elif is_out_of_memory(outcome):
                    failed.append((span, outcome.with_traceback(None)))  # its frames hold references to the memory
                else:
                    raise outcome
            for (start, stop), error in failed[:1]:
                self.step.make_room(step if self._fixed_shape else stop - start, error)
            left = [part for (start, stop), _ in failed for part in self._ranges(start, stop)]
        enter_station("transfer")
        return run.split(concatenated([answers[span] for span in sorted(answers)]))

    def _ranges(self, start: int, stop: int) -> list[Range]:
        rows = self.step.rows
        if self._even and self.pipeline.under_way == 0:
            wanted = math.ceil((stop - start) / (FILLED * len(self.pipeline.stages)))
            rows = min(rows, max(LEAST_ROWS, padded(wanted)))
            count = math.ceil((stop - start) / rows)
            rows = min(rows, -(-math.ceil((stop - start) / count) // GRAIN) * GRAIN)
        return [(at, min(at + rows, stop)) for at in range(start, stop, rows)]

    def _through(self, run: RowBlocks, spans: Sequence[Range], step: int) -> list[Any]:
        """The answers to each of these ranges of rows, or the exception in place of them."""
        values = self._values(run, spans, step)
        if self._alone:
            outcomes = [outcome for value in values for outcome in self.pipeline.run([value], 1)]
        else:
            outcomes = self.pipeline.run(values, len(spans))
        found: list[Any] = []
        for outcome, (start, stop) in zip(outcomes, spans, strict=True):
            if not isinstance(outcome, BaseException):
                answer = self._moving.unload(outcome)
                outcome = rearranged(answer, [tensor[: stop - start] for tensor in tensors_of(answer)])  # no padding
            found.append(outcome)
        return found

    def _values(self, run: RowBlocks, spans: Sequence[Range], step: int) -> Iterator[Any]:
        """The first stage's inputs, one by one."""
        for start, stop in spans:
            enter_station("transfer")
            rows = stop - start
            shape = max(rows, step if self._fixed_shape else min(step, padded(rows)))  # another thread may shrink it
            value = self._moving.load(run.pieces(start, stop), shape)
            enter_station("stages")
            yield value
