"""Runs a module on blocks of rows, on the CPU."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gpuinfer.api import enter_station
from gpuinfer.models.out_of_memory import StepSize, is_out_of_memory
from gpuinfer.models.row_blocks import (
    BitCast,
    Block,
    RowBlocks,
    as_tensor,
    cast,
    concatenated,
    first_rows,
    rearranged,
    tensors_of,
)

CHUNK_ROWS = 1024  # beyond it the activations leave the cache and large casts fault pages
GRAIN = 32
DETERMINISTIC_CHUNK_ROWS = 256  # every batch is padded to it: a compromise between small batches and small steps


def padded(rows: int) -> int:
    """The batch size that `rows` rows are padded to: a power of two up to GRAIN, a multiple of GRAIN beyond.

    oneDNN prepares its kernels anew for each shape that it has not seen lately, which costs as much as some hundred
    rows, and blocks of games differ in size from batch to batch.
    """
    if rows > GRAIN:
        return -(-rows // GRAIN) * GRAIN
    return 1 << (rows - 1).bit_length()


class CpuForward:
    """`module`, in evaluation mode and `dtype`, on batches of blocks. Threads may share one.

    A batch goes through in chunks of at most `chunk_rows`. With `fixed_shape` each chunk is padded to exactly that,
    copied to the same place in memory, so that a row's answer is the same bits whatever it shares its batch with: a
    matrix product may add up in another order for another number of rows, but not for another row of the same.

    `bits` is how many features a row has when they arrive as bits; `whose` is said of the model when memory runs out.
    """

    def __init__(
        self,
        module: nn.Module,
        dtype: torch.dtype,
        chunk_rows: int | None = None,
        fixed_shape: bool = False,
        bits: int | None = None,
        whose: str = "",
    ) -> None:
        self.module, self.dtype, self.fixed_shape = module, dtype, fixed_shape
        self.step = StepSize(chunk_rows or (DETERMINISTIC_CHUNK_ROWS if fixed_shape else CHUNK_ROWS), whose=whose)
        self.bits, self._cast = bits, cast if bits is None else BitCast(bits, dtype)
        self._own = threading.local()

    def __call__(self, blocks: Sequence[Block]) -> list[Any]:
        """One result for each block: float32 arrays [rows, ...], alone, in a tuple or in a dict as the module answers.

        Raises `BackendError` when not even a single row fits in memory, and whatever the module raises.
        """
        with torch.inference_mode():
            enter_station("transfer")
            if len(blocks) == 1 and (answers := self._alone(blocks[0])) is not None:
                return [answers]
            run = RowBlocks(blocks)
            chunks: list[Any] = []
            done = 0
            while done < run.rows:
                chunk = self.step.rows  # read once: another thread may shrink it
                rows = min(chunk, run.rows - done)
                shape = chunk if self.fixed_shape else rows
                with self.step.under_way(shape):
                    answers, failure = self._attempt(run, done, rows, chunk)
                if failure is not None:
                    self.step.make_room(shape, failure)
                    continue
                self.step.made(shape)
                chunks.append(answers)
                done += rows
            return run.split(concatenated(chunks))

    def _alone(self, block: Block) -> Any | None:
        """The answer to a single block that needs no copy; None if it needs one, or if memory ran out."""
        rows = len(block)
        if rows > self.step.rows or rows != padded(rows) or self.fixed_shape:
            return None
        inputs = as_tensor(block)
        if inputs.dtype != self.dtype or self.bits is not None:
            return None
        try:
            with self.step.under_way(rows):
                answers = self._through(inputs, rows)
            self.step.made(rows)
            return rearranged(answers, [tensor.numpy() for tensor in tensors_of(answers)])
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None

    def _attempt(self, run: RowBlocks, start: int, rows: int, chunk: int) -> tuple[Any, BaseException | None]:
        """Answers for the rows from `start` on, or the error if memory ran out."""
        try:
            inputs = self._inputs(run, start, rows, chunk)
            return self._through(inputs, rows), None
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None, error.with_traceback(None)  # its frames hold references to the memory

    def _through(self, inputs: Tensor, rows: int) -> Any:
        """The module's answers to the first `rows` rows of `inputs`."""
        enter_station("forward")
        answers = self.module(inputs)
        enter_station("transfer")
        return first_rows(answers, rows, inputs)

    def _inputs(self, run: RowBlocks, start: int, rows: int, chunk: int) -> Tensor:
        shape = chunk if self.fixed_shape else min(chunk, padded(rows))
        pieces = run.pieces(start, start + rows)
        if shape == rows and len(pieces) == 1 and not self.fixed_shape:
            whole = as_tensor(pieces[0])
            if whole.dtype == self.dtype:
                return whole
        wanted = (chunk, self.bits or run.blocks[0].shape[1])  # this thread's buffer of one chunk [rows, features]
        staging: Tensor | None = getattr(self._own, "staging", None)
        if staging is None or staging.shape != wanted:
            staging = self._own.staging = torch.empty(wanted, dtype=self.dtype)
        self._cast(pieces, staging[:rows])
        staging[rows:shape].zero_()
        return staging[:shape]
