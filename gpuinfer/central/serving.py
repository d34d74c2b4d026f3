"""One batch at the server: blocks through the model, answers back into the blocks that they came from."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import Result
from gpuinfer.central.memory import Block
from gpuinfer.engine.answering import find_fault
from gpuinfer.errors import BackendDied, BackendError, BadResult, DeviceLost, GpuinferError
from gpuinfer.host import spoken
from gpuinfer.models.layouts import AnswerLayout

if TYPE_CHECKING:
    from gpuinfer.models.open_model import Opened


class Rows(Protocol):
    """The first `rows` rows of a block."""

    block: Block
    rows: int


class Served(NamedTuple):
    """What came of one batch."""

    errors: Sequence[GpuinferError | None]  # what went wrong with each request, if anything
    again: bool = False  # each request was run a second time, alone
    whole: bool = True  # the model answered the batch at once: its time is that of so many rows


class Answerer:
    """The model of one server. As many threads as it allows forwards may call `answer` at once."""

    def __init__(self, opened: Opened) -> None:
        self.pin = opened.pin
        self._forward, self._write, self._layout = opened.forward, opened.write, opened.answer

    def answer(self, batch: Sequence[Rows]) -> Served:
        """Write each answer beside its rows.

        A batch that the model raises on is run again one by one: the request with the row that it cannot take fails
        alone.
        """
        try:
            if (errors := self._errors(batch)) is not None:
                return Served(errors)
        except BaseException as error:  # noqa: BLE001 (a model may raise anything, and even leave)
            if isinstance(error, BackendDied | DeviceLost):  # whatever comes next meets the same, or another device
                return Served([error] * len(batch), whole=False)
            if len(batch) == 1:
                return Served([failure(error)], whole=False)
        return Served([self.answer([ask]).errors[0] for ask in batch], again=True, whole=False)

    def _errors(self, batch: Sequence[Rows]) -> Sequence[GpuinferError | None] | None:
        """Answer a batch: what is wrong with each answer. None when one odd row has made the answers of all odd.

        A client that is gone is answered like the others: its memory stays where it is until the batch is over, and no
        line of the same client has it before (`ClientLines`).
        """
        blocks = [ask.block.rows[: ask.rows] for ask in batch]
        if self._write is not None:
            sound = self._write(blocks, [[part[: ask.rows] for part in ask.block.answers] for ask in batch])
            return [
                None if fine else self._fault(ask, ask.block.answer(ask.rows, copied=False))
                for ask, fine in zip(batch, sound, strict=True)
            ]
        results = self._forward(blocks)
        if len(batch) > 1 and unlike(results[0], self._layout):
            return None
        return [self._keep(ask, result) for ask, result in zip(batch, results, strict=True)]

    def _keep(self, ask: Rows, result: Result) -> GpuinferError | None:
        """Copy one answer into its block, if it is one."""
        arrays = parts(result)
        if not is_plainly_sound(arrays, ask.rows, self._layout) and (error := self._fault(ask, result)) is not None:
            return error
        for room, array in zip(ask.block.answers, arrays, strict=True):
            room[: ask.rows] = array
        return None

    def _fault(self, ask: Rows, result: Result) -> GpuinferError | None:
        fault = find_fault(result, ask.rows) or unlike(result, self._layout)
        if fault is None:
            return None
        rows = ask.block.rows[: ask.rows]
        if rows.dtype.kind == "f" and np.isnan(rows.max()):
            return BackendError("the rows hold NaN, and so does the answer. Check where the rows come from.")
        return BadResult(f"the model answered badly: {fault}")


def parts(result: Result) -> Sequence[NDArray[np.float32]]:
    """The arrays of an answer, in order."""
    if isinstance(result, tuple | list):
        return result
    return list(result.values()) if isinstance(result, Mapping) else [result]


def is_plainly_sound(arrays: Sequence[NDArray[np.float32]], rows: int, layout: AnswerLayout) -> bool:
    """The quick way to know that nothing is wrong, as nearly always; False says only that it takes a closer look."""
    if layout.kind == "dict" or len(arrays) != len(layout.shapes):
        return False
    for array, shape in zip(arrays, layout.shapes, strict=True):
        if array.shape != (rows, *shape) or not array.size or not array.max() < math.inf:  # a NaN wins every max
            return False
    return True


def unlike(result: Result, layout: AnswerLayout) -> str | None:
    """What differs from the answers that were agreed on."""
    shapes = tuple(part.shape[1:] for part in parts(result))
    names = tuple(result) if isinstance(result, Mapping) else ()
    if shapes == layout.shapes and names != layout.names:
        return f"the names {list(names)} where {list(layout.names)} were agreed. Let the model always answer alike."
    if shapes == layout.shapes:
        return None
    return f"shapes {list(shapes)} a row where {list(layout.shapes)} were agreed. Let the model always answer alike."


def failure(error: BaseException) -> GpuinferError:
    if isinstance(error, GpuinferError):
        return error
    return BackendError(
        f"the model raised {spoken.in_full(error)}. Only the requests of this block failed; look at their "
        "rows, or at the model."
    )
