"""Batches of blocks through the stages of a model: cut into micro-batches, and put together again."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gpuinfer.api import enter_station
from gpuinfer.models.forward import GRAIN, padded
from gpuinfer.models.memory import StepSize, is_out_of_memory
from gpuinfer.models.stages.moving import Moving
from gpuinfer.models.stages.pipeline import Pipeline
from gpuinfer.models.staging import Block, Blocks, joined, like, tensors_of

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
        self, pipeline: Pipeline, moving: Moving, rows: int, *, even: bool, fixed_shape: bool, alone: bool
    ) -> None:
        self.pipeline, self._moving = pipeline, moving
        self.step = StepSize(rows)
        self._even, self._fixed_shape, self._alone = even, fixed_shape, alone

    def __call__(self, blocks: Sequence[Block]) -> list[Any]:
        """The same promise as `CpuForward.__call__`."""
        with torch.inference_mode():
            return self._answers(Blocks(blocks))

    def _answers(self, run: Blocks) -> list[Any]:
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
                    failed.append((span, outcome.with_traceback(None)))  # its frames hold on to the memory
                else:
                    raise outcome
            for (start, stop), error in failed[:1]:
                self.step.make_room(step if self._fixed_shape else stop - start, error)
            left = [part for (start, stop), _ in failed for part in self._ranges(start, stop)]
        enter_station("transfer")
        return run.split(joined([answers[span] for span in sorted(answers)]))

    def _ranges(self, start: int, stop: int) -> list[Range]:
        rows = self.step.rows
        if self._even and self.pipeline.under_way == 0:
            wanted = math.ceil((stop - start) / (FILLED * len(self.pipeline.stages)))
            rows = min(rows, max(LEAST_ROWS, padded(wanted)))
            count = math.ceil((stop - start) / rows)
            rows = min(rows, -(-math.ceil((stop - start) / count) // GRAIN) * GRAIN)
        return [(at, min(at + rows, stop)) for at in range(start, stop, rows)]

    def _through(self, run: Blocks, spans: Sequence[Range], step: int) -> list[Any]:
        """An answer to each of these ranges of rows, or the exception in its place."""
        values = self._values(run, spans, step)
        if self._alone:
            outcomes = [outcome for value in values for outcome in self.pipeline.run([value], 1)]
        else:
            outcomes = self.pipeline.run(values, len(spans))
        return [self._answer(outcome, stop - start) for outcome, (start, stop) in zip(outcomes, spans, strict=True)]

    def _values(self, run: Blocks, spans: Sequence[Range], step: int) -> Iterator[Any]:
        """What the first stage takes, one by one."""
        for start, stop in spans:
            enter_station("transfer")
            rows = stop - start
            shape = max(rows, step if self._fixed_shape else min(step, padded(rows)))  # another thread may shrink it
            value = self._moving.load(run.pieces(start, stop), shape)
            enter_station("stages")
            yield value

    def _answer(self, outcome: Any, rows: int) -> Any:
        """An answer to that many rows, without those that they were padded with; an exception as it is."""
        if isinstance(outcome, BaseException):
            return outcome
        answer = self._moving.unload(outcome)
        return like(answer, [tensor[:rows] for tensor in tensors_of(answer)])
