"""A client's blocks of shared memory: rows on their way to the model, and its answers to the same rows beside them."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import ModelSpec
from gpuinfer.models.row_format import AnswerLayout, row_dtype, row_shape
from gpuinfer.models.row_layout import RowLayout

ALIGNMENT = 64  # bytes: a cache line, and what vector loads like
PER_CLIENT = 256  # blocks


@dataclass(frozen=True, slots=True)
class BlockForm:
    """What the rows and answers of one model look like in memory."""

    spec: ModelSpec
    answer: AnswerLayout

    def offsets(self, rows: int) -> list[int]:
        """Where the rows begin, where each part of the answer does, and where all ends."""
        sizes = [rows * prod(row_shape(self.spec)) * row_dtype(self.spec).itemsize]
        sizes += [rows * prod(shape) * dtype.itemsize for shape, dtype in self._parts]
        return [0, *accumulate(-(-size // ALIGNMENT) * ALIGNMENT for size in sizes)]

    @property
    def _parts(self) -> zip[tuple[tuple[int, ...], np.dtype[Any]]]:
        return zip(self.answer.shapes, self.answer.array_dtypes, strict=True)

    def answers(self, memory: mmap.mmap, rows: int) -> list[NDArray[Any]]:
        """The answers in the memory of a block for so many rows: an array [rows, *shape] for each part."""
        places = zip(self._parts, self.offsets(rows)[1:], strict=False)
        return [_array(memory, at, (rows, *shape), dtype) for (shape, dtype), at in places]

    def size(self, rows: int) -> int:
        """Bytes of a block for so many rows."""
        return max(self.offsets(rows)[-1], mmap.PAGESIZE)

    def to_wire(self) -> dict[str, Any]:
        spec = self.spec
        row = {"name": spec.name, "inputs": spec.inputs, "input_dtype": spec.input_dtype}
        layout = None if spec.layout is None else spec.layout.to_wire()
        return {"row": row, "layout": layout, "answer": self.answer.to_wire()}

    @classmethod
    def from_wire(cls, wire: Any) -> BlockForm:
        layout = None if wire["layout"] is None else RowLayout.from_wire(wire["layout"])
        return cls(ModelSpec(**wire["row"], layout=layout), AnswerLayout.from_wire(wire["answer"]))


class Block:
    """One block, mapped: `rows` as the model takes them [room, ...], `answers` [room, ...] for each part in the dtype
    that was agreed, and `memory`, uint8, all of it.
    """

    __slots__ = ("_form", "answers", "memory", "number", "pin", "room", "rows")

    def __init__(self, number: int, room: int, memory: mmap.mmap, form: BlockForm) -> None:
        self.number, self.room = number, room
        self.pin: Any = None  # the server's registration of this memory with a device
        self._form = form
        self.memory: NDArray[np.uint8] = np.frombuffer(memory, np.uint8)
        self.rows: NDArray[Any] = _array(memory, 0, (room, *row_shape(form.spec)), row_dtype(form.spec))
        self.answers = form.answers(memory, room)

    def let_go(self) -> None:
        """Use it no more: unmapped when the last array over its memory is collected, whoever still knows the block. No
        batch in flight may read or write it.
        """
        if self.pin is not None:
            self.pin.close()
        del self.rows, self.answers, self.memory

    def answer(self, rows: int, copied: bool) -> Any:
        """The answer to the first `rows` rows as the model gives it: a view of this memory, or a copy."""
        parts = [part[:rows].copy() if copied else part[:rows] for part in self.answers]
        return self._form.answer.arrange(parts)


def _array(memory: mmap.mmap, offset: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.frombuffer(memory, dtype, prod(shape), offset).reshape(shape)
