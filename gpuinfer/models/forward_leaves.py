"""Runs a module on rows of any shape: joins the leaves of all rows, computes once, and hands each row its answer."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gpuinfer.api import enter_station
from gpuinfer.engine.results import CheckedResult
from gpuinfer.errors import BackendError, BadResult, UsageError
from gpuinfer.host import error_text
from gpuinfer.models.cuda_graphs import release_cached_memory
from gpuinfer.models.forward_cpu import padded
from gpuinfer.models.forward_cuda import bucket_for, buckets_up_to
from gpuinfer.models.model_object import FunctionModel, caller_of, tensor_of_array
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


class LeafAnswers(NamedTuple):
    """The answers to a batch, on the host."""

    answer: Any  # as the module gave it, whose arrangement counts
    parts: list[Tensor]  # its tensors, [rows, …]: floating point in float32, other dtypes as they are
    sound: Tensor | None  # bool [rows], see `sound_rows`; None where nobody asked
    kept: Sequence[list[Tensor]] = ()  # of the last requests, whose answers stay on a device: each one's own parts


class LeavesForward:
    """`module`, in evaluation mode on `device`, on requests of rows that `layout` describes. Threads may share one.

    Leaves of floating point are computed in `dtype`; of a function they stay as they are. On a CPU a batch is padded to
    one of a few sizes with its first row (`forward_cpu.padded`). A module of torch.compile is given even fewer sizes
    (`forward_cuda.buckets_up_to`), since it is compiled for each. With `fixed_shape` every step is padded to exactly
    `chunk_rows`, see `CpuForward`. `check`: refuse answers with NaN or +inf.
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
        fixed_shape: bool = False,
    ) -> None:
        self._fixed_shape, self._few_sizes = fixed_shape, type(module).__name__ == "OptimizedModule"
        self._layout, self._device, self._check, self._whose = layout, device, check, whose
        self._plain = isinstance(module, FunctionModel)
        self._casts = [dtype if leaf.dtype in FLOATS and not self._plain else None for leaf in layout.leaves]
        self._call = caller_of(module, layout)
        own = (*module.parameters(), *module.buffers()) if device.type == "cpu" else ()  # answers of others are copied
        self._memory = frozenset(one.untyped_storage().data_ptr() for one in own)
        self.step = StepSize(chunk_rows, str(device), whose)

    def __call__(self, requests: Sequence[Rows]) -> list[Any]:
        """A `CheckedResult` for each `SingleRow` and `RowBatch`, arrays float32 [rows, …] for packed rows; where an
        answer is not sound, a `BadResult`. Raises what the module raises.
        """
        enter_station("transfer")
        with torch.no_grad():
            found = self._answered(requests)
            enter_station("reply")
            results = self._divided(found, requests)
        if found.sound is not None and not bool(found.sound.all()):
            at = 0
            for place, request in enumerate(requests):
                end = at + len(request)
                if not bool(found.sound[at:end].all()):
                    results[place] = BadResult(f"{self._whose}: {UNSOUND}")
                at = end
        return results

    def answer_layout(self) -> AnswerLayout:
        """What the model answers to a row, found by trying it on two and three rows of ones. Raises `UsageError`."""
        found = []
        for rows in (2, 3):
            try:
                with torch.no_grad():
                    answers = self._answered([self._ones(rows)])
                parts = answers.parts
                dtypes = tuple(str(part.dtype).removeprefix("torch.") for part in parts)
                plain = all(one == "float32" for one in dtypes)
                layout = layout_of(rearranged(answers.answer, parts))
                found.append(replace(layout, dtypes=() if plain else dtypes))
            except BackendError as error:
                raise UsageError(str(error)) from error
            except Exception as error:
                raise UsageError(
                    f"{self._whose} raised {error_text.full_message(error).rstrip('.')}. It was given {rows} rows of "
                    f"{self._layout} on {self._device}. Let it take a batch of such rows, their number being the first "
                    "dimension."
                ) from error
        if found[0] != found[1]:
            raise UsageError(
                f"{self._whose} answered 2 rows with {found[0]} a row and 3 rows with {found[1]}. Let the answer to a "
                "row look the same in every batch."
            )
        return found[0]

    def seconds_of(self, rows: int) -> float:
        """What a batch of so many rows of ones takes here. Raises what the module raises."""
        batch, began = self._ones(rows), time.perf_counter()
        self([batch])
        return time.perf_counter() - began

    def _ones(self, rows: int) -> RowBatch:
        leaves = self._layout.leaves
        ones = [torch.ones(rows, *leaf.shape, dtype=getattr(torch, leaf.dtype), device="cpu") for leaf in leaves]
        return RowBatch(ones, rows)

    def _answered(self, requests: Sequence[Rows]) -> LeafAnswers:
        """The model's answers to the rows of all requests."""
        leaves, rows = self._joined(requests)
        inputs = [(leaf.data_ptr(), leaf.data_ptr() + leaf.nbytes) for leaf in leaves]
        answer, parts = self._through(leaves, rows)
        parts = [part.clone() if self._is_shared(part, inputs) else part.cpu() for part in parts]
        return LeafAnswers(answer, parts, self._sound(parts, rows))

    def _is_shared(self, part: Tensor, inputs: Sequence[tuple[int, int]]) -> bool:
        """Whether an answer lies in the rows' memory or in the model's, or rows of it in one another's."""
        at = part.data_ptr()
        shares = any(begin <= at < end for begin, end in inputs) or part.untyped_storage().data_ptr() in self._memory
        return shares or any(stride == 0 and size > 1 for stride, size in zip(part.stride(), part.shape, strict=True))

    def _sound(self, parts: Sequence[Tensor], rows: int) -> Tensor | None:
        floats = [part for part in parts if part.is_floating_point()] if self._check else []
        return sound_rows(floats, rows) if floats else None

    def _through(self, leaves: list[Tensor], rows: int) -> tuple[Any, list[Tensor]]:
        """The model's answer to leaves on its device, [rows or more, *shape], and its tensors [rows, …] there; in
        several steps where memory runs out.
        """
        chunks: list[list[Tensor]] = []
        answer, done = None, 0
        while done < rows:
            size = min(self.step.rows, rows - done)
            part = leaves if size == rows else [leaf[done : done + size] for leaf in leaves]
            try:
                with self.step.under_way(size):
                    answer, parts = self._computed(part, size)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = error.with_traceback(None)  # its frames hold references to the memory
            else:
                self.step.made(size)
                chunks.append(parts)
                done += size
                continue
            if self._device.type == "cuda":
                release_cached_memory()
            self.step.make_room(size, failure)
        return answer, chunks[0] if len(chunks) == 1 else [torch.cat(parts) for parts in zip(*chunks, strict=True)]

    def _joined(self, requests: Sequence[Rows]) -> tuple[list[Tensor], int]:
        """The leaves of all rows, [rows, *shape] or padded, and how many rows there are."""
        singles = [one.leaves for one in requests if isinstance(one, SingleRow)]
        rows = sum(map(len, requests))
        if len(singles) == len(requests):
            leaves = [self._stacked(column) for column in zip(*singles, strict=True)]
        else:
            columns = zip(*(leaves_in(one, self._layout) for one in requests), strict=True)
            # Of one request a copy, since a module may write to what it is given.
            leaves = [column[0].clone() if len(column) == 1 else torch.cat(column) for column in columns]
        return self._cast(leaves), rows

    def _cast(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        return [leaf if cast is None else leaf.to(cast) for leaf, cast in zip(leaves, self._casts, strict=True)]

    def _stacked(self, column: Sequence[Any]) -> Tensor:
        """One leaf of several rows: few of them are filled up to a size that the library has prepared for."""
        if not self._plain:
            column = [*column, *[column[0]] * (padded(len(column)) - len(column))]
        if isinstance(column[0], Tensor):
            try:
                return torch.stack(list(column))
            except (TypeError, RuntimeError):  # some are arrays, or of another dtype than was agreed
                return torch.stack([leaf_tensor(leaf) for leaf in column])
        return torch.from_numpy(np.stack([leaf if isinstance(leaf, np.ndarray) else leaf.numpy() for leaf in column]))

    def _computed(self, leaves: list[Tensor], rows: int) -> tuple[Any, list[Tensor]]:
        """The answer to so many rows, and its tensors: floating point in float32, other dtypes as they are."""
        if self._fixed_shape or self._few_sizes:
            most = max(rows, self.step.rows)
            more = (most if self._fixed_shape else bucket_for(rows, buckets_up_to(most))) - rows
            leaves = [torch.cat([leaf[:rows], leaf[:1].expand(more, *leaf.shape[1:])]) for leaf in leaves]
        enter_station("forward")
        answer = self._call(leaves)
        if self._device.type == "cpu":
            enter_station("transfer")
        try:
            parts = tensors_of(answer)
        except TypeError as error:
            raise BackendError(
                f"{self._whose} answered with {error}. Let it return a tensor or an array, or a tuple or dict of these."
            ) from None
        given = len(leaves[0])
        for part in parts:
            if part.dim() < 1 or len(part) != given:
                raise BackendError(
                    f"{self._whose} answered {given} rows with {list(part.shape)}. Let the first dimension of each "
                    "answer be that of the rows."
                )
        parts = [part.detach()[:rows] for part in parts]
        return answer, [
            part.float() if part.is_floating_point() and part.dtype != torch.float64 else part for part in parts
        ]

    def _divided(self, found: LeafAnswers, requests: Sequence[Rows]) -> list[Any]:
        """Each request's own answers, as `__call__` returns them."""
        answer, parts = found.answer, found.parts
        as_arrays = self._layout.kind == "numpy"
        columns: list[Any] = [part.numpy() for part in parts] if as_arrays else parts
        results: list[Any] = []
        if all(type(one) is SingleRow for one in requests):
            each = [list(column) if as_arrays else column.unbind(0) for column in columns]
            if isinstance(answer, Mapping):
                results = [CheckedResult(dict(zip(answer, one, strict=True))) for one in zip(*each, strict=True)]
            else:
                values = zip(*each, strict=True) if isinstance(answer, tuple | list) else each[0]
                results = list(map(CheckedResult, values))
        else:
            at = 0
            for request in requests:
                end = at + len(request)
                if isinstance(request, np.ndarray):
                    results.append(rearranged(answer, [np.ascontiguousarray(part[at:end].numpy()) for part in parts]))
                else:
                    single = isinstance(request, SingleRow)
                    own = [column[at] if single else column[at:end] for column in columns]
                    results.append(CheckedResult(rearranged(answer, own)))
                at = end
        return results


def leaves_in(request: Rows, layout: RowLayout) -> list[Tensor]:
    """The leaves of a request, tensors [rows, *shape] on their own memory, where torch can use that."""
    if isinstance(request, SingleRow):
        return [leaf_tensor(leaf)[None] for leaf in request.leaves]
    if isinstance(request, RowBatch):
        return [leaf_tensor(leaf) for leaf in request.leaves]
    usable = request if request.flags.writeable and request.flags.c_contiguous else request.copy()
    return unpacked_leaves(torch.from_numpy(usable), layout)


def leaf_tensor(leaf: Any) -> Tensor:
    """A leaf as a tensor on its own memory, where torch can use that."""
    return leaf if isinstance(leaf, Tensor) else tensor_of_array(np.asarray(leaf))
