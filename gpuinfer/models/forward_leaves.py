"""Runs a module on rows of any shape: joins the leaves of all rows, computes once, and hands each row its answer."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuinfer.api import enter_station
from gpuinfer.engine.results import CheckedResult
from gpuinfer.errors import BackendError, BadResult, UsageError
from gpuinfer.host import error_text
from gpuinfer.models.forward_cpu import padded
from gpuinfer.models.model_object import FunctionModel, caller_of
from gpuinfer.models.out_of_memory import StepSize, is_out_of_memory
from gpuinfer.models.row_blocks import layout_of, rearranged, sound_rows, tensors_of
from gpuinfer.models.row_format import AnswerLayout
from gpuinfer.models.row_layout import FLOATS, RowBatch, RowLayout, SingleRow, unpacked_leaves

UNSOUND = (
    "the answer holds NaN or +inf. Check the model's weights and this row; to mask logits use -inf; check=False lets "
    "such answers through."
)


Rows = SingleRow | RowBatch | NDArray[np.uint8]
"""What `LeavesForward` takes; arrays are packed rows, uint8 [rows, row_bytes]."""


class LeavesForward:
    """`module`, in evaluation mode on `device`, on requests of rows that `layout` describes. Threads may share one.

    Leaves of floating point are computed in `dtype`; of a function they stay as they are. On a CPU a batch is padded to
    one of a few sizes with its first row (`forward_cpu.padded`). `check`: refuse answers with NaN or +inf.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: RowLayout,
        device: torch.device,
        dtype: torch.dtype,
        *,
        chunk_rows: int,
        check: bool = True,
        whose: str = "",
    ) -> None:
        self._layout, self._device, self._check, self._whose = layout, device, check, whose
        self._plain = isinstance(module, FunctionModel)
        self._casts = [dtype if leaf.dtype in FLOATS and not self._plain else None for leaf in layout.leaves]
        self._call = caller_of(module, layout)
        self.step = StepSize(chunk_rows, str(device), whose)
        self._own = threading.local()

    def __call__(self, requests: Sequence[Rows]) -> list[Any]:
        """A `CheckedResult` for each `SingleRow` and `RowBatch`, arrays float32 [rows, …] for packed rows; where an
        answer is not sound, a `BadResult`. Raises what the module raises.
        """
        enter_station("transfer")
        with torch.no_grad():
            leaves, rows = self._joined(requests)
            chunks, done = [], 0
            while done < rows:
                size = min(self.step.rows, rows - done)
                part = leaves if size == rows else [leaf[done : done + size] for leaf in leaves]
                try:
                    with self.step.under_way(size):
                        chunks.append(self._computed(part, size))
                except (RuntimeError, MemoryError) as error:
                    if not is_out_of_memory(error):
                        raise
                    failure = error.with_traceback(None)  # its frames hold references to the memory
                else:
                    self.step.made(size)
                    done += size
                    continue
                self.step.make_room(size, failure)
            answer = chunks[0]
            if len(chunks) > 1:
                answer = rearranged(answer, [torch.cat(parts) for parts in zip(*map(tensors_of, chunks), strict=True)])
            enter_station("reply")
            return self._divided(answer, requests, rows)

    def answer_layout(self) -> AnswerLayout:
        """What the model answers to a row, found by trying it on two and three rows of ones. Raises `UsageError`."""
        found = []
        for rows in (2, 3):
            ones = [
                torch.ones(rows, *leaf.shape, dtype=getattr(torch, leaf.dtype), device=self._device)
                for leaf in self._layout.leaves
            ]
            try:
                with torch.no_grad():
                    cast = [self._sent(one, kind) for one, kind in zip(ones, self._casts, strict=True)]
                    answer = self._computed(cast, rows)
                dtypes = tuple(str(part.dtype).removeprefix("torch.") for part in tensors_of(answer))
                plain = all(one == "float32" for one in dtypes)
                found.append(replace(layout_of(answer), dtypes=() if plain else dtypes))
            except BackendError as error:
                raise UsageError(str(error)) from error
            except Exception as error:
                raise UsageError(
                    f"{self._whose} raised {error_text.full_message(error)}. It was given {rows} rows of {self._layout}"
                    f" on {self._device}. Let it take a batch of such rows, their number being the first dimension."
                ) from error
        if found[0] != found[1]:
            raise UsageError(
                f"{self._whose} answered 2 rows with {found[0]} a row and 3 rows with {found[1]}. Let the answer to a "
                "row look the same in every batch."
            )
        return found[0]

    def _joined(self, requests: Sequence[Rows]) -> tuple[list[Tensor], int]:
        """The leaves of all rows, [rows, *shape], on the device."""
        singles = [one.leaves for one in requests if isinstance(one, SingleRow)]
        if len(singles) == len(requests):
            leaves = [self._stacked(column) for column in zip(*singles, strict=True)]
            return [self._sent(leaf, cast) for leaf, cast in zip(leaves, self._casts, strict=True)], len(requests)
        parts = []
        for one in requests:
            if isinstance(one, np.ndarray):
                writeable = one if one.flags.writeable and one.flags.c_contiguous else one.copy()
                parts.append(unpacked_leaves(torch.from_numpy(writeable), self._layout))
            elif isinstance(one, SingleRow):
                parts.append([leaf_tensor(leaf)[None] for leaf in one.leaves])
            else:
                parts.append([leaf_tensor(leaf) for leaf in one.leaves])
        leaves = [column[0] if len(column) == 1 else torch.cat(column) for column in zip(*parts, strict=True)]
        rows = sum(map(len, requests))
        return [self._sent(leaf, cast) for leaf, cast in zip(leaves, self._casts, strict=True)], rows

    def _stacked(self, column: Sequence[Any]) -> Tensor:
        """One leaf of several rows: few of them are filled up to a size that the library has prepared for."""
        if self._device.type == "cpu" and not self._plain:
            column = [*column, *[column[0]] * (padded(len(column)) - len(column))]
        if isinstance(column[0], Tensor):
            try:
                return torch.stack(list(column))
            except (TypeError, RuntimeError):  # some are arrays, or of another dtype than was agreed
                return torch.stack([leaf_tensor(leaf) for leaf in column])
        return torch.from_numpy(np.stack([leaf if isinstance(leaf, np.ndarray) else leaf.numpy() for leaf in column]))

    def _sent(self, leaf: Tensor, cast: torch.dtype | None) -> Tensor:
        if self._device.type == "cuda":
            leaf = leaf if leaf.is_cuda else leaf.pin_memory().to(self._device, non_blocking=True)
        return leaf if cast is None or leaf.dtype == cast else leaf.to(cast)

    def _computed(self, leaves: list[Tensor], rows: int) -> Any:
        """The answer to so many rows, on the CPU; floating point in float32, other dtypes as they are."""
        enter_station("forward")
        answer = self._call(leaves)
        enter_station("transfer")
        try:
            parts = tensors_of(answer)
        except TypeError as error:
            raise BackendError(
                f"{self._whose} answered with {error}. Let it return a tensor or an array, or a tuple or dict of these."
            ) from None
        given = len(leaves[0])
        for part in parts:
            if part.dim() < 1 or len(part) not in (rows, given):
                raise BackendError(
                    f"{self._whose} answered {given} rows with {list(part.shape)}. Let the first dimension of each "
                    "answer be that of the rows."
                )
        parts = [part[:rows] if len(part) != rows else part for part in parts]
        parts = [part.float() if part.is_floating_point() and part.dtype != torch.float64 else part for part in parts]
        inputs = {leaf.untyped_storage().data_ptr() for leaf in leaves}
        parts = [part.clone() if part.untyped_storage().data_ptr() in inputs else part for part in parts]
        return rearranged(answer, [part.detach().cpu() for part in parts])

    def _divided(self, answer: Any, requests: Sequence[Rows], rows: int) -> list[Any]:
        parts = [part[:rows] for part in tensors_of(answer)]
        sound = None
        if self._check and (floats := [part for part in parts if part.is_floating_point()]):
            of_rows = sound_rows(floats, rows)
            sound = None if bool(of_rows.all()) else of_rows
        as_arrays = self._layout.kind == "numpy"
        columns: list[Any] = [part.numpy() for part in parts] if as_arrays else parts
        found: list[Any] = []
        if len(requests) == rows and all(type(one) is SingleRow for one in requests):
            each = [list(column) if as_arrays else column.unbind(0) for column in columns]
            if isinstance(answer, Mapping):
                found = [CheckedResult(dict(zip(answer, one, strict=True))) for one in zip(*each, strict=True)]
            else:
                values = zip(*each, strict=True) if isinstance(answer, tuple | list) else each[0]
                found = list(map(CheckedResult, values))
        else:
            at = 0
            for request in requests:
                end = at + len(request)
                if isinstance(request, np.ndarray):
                    found.append(rearranged(answer, [np.ascontiguousarray(part[at:end].numpy()) for part in parts]))
                else:
                    single = isinstance(request, SingleRow)
                    own = [column[at] if single else column[at:end] for column in columns]
                    found.append(CheckedResult(rearranged(answer, own)))
                at = end
        if sound is not None:
            at = 0
            for place, request in enumerate(requests):
                end = at + len(request)
                if not bool(sound[at:end].all()):
                    found[place] = BadResult(f"{self._whose}: {UNSOUND}")
                at = end
        return found


def leaf_tensor(leaf: Any) -> Tensor:
    """A leaf as a tensor on its own memory, where torch can use that."""
    if isinstance(leaf, Tensor):
        return leaf
    array = np.asarray(leaf)
    usable = array.flags.writeable and all(stride >= 0 for stride in array.strides)
    return torch.from_numpy(array if usable else array.copy())
