"""How rows and answers lie in memory: what both ends of a line agree on, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import ModelSpec, Result
from gpuinfer.errors import BackendError, UnknownName

BITS = "bits"
"""Features that are 0 or 1, eight in a byte: feature i of a row is bit i % 8, the lowest first, of its byte i // 8."""

ROW_DTYPES = {name: np.dtype("uint8" if name == BITS else name) for name in ("uint8", "int8", "float32", BITS)}
INPUT_DTYPES = tuple(ROW_DTYPES)
"""What `ModelSpec.input_dtype` may be."""

KINDS = ("tensor", "tuple", "dict")


def row_dtype(spec: ModelSpec) -> np.dtype[Any]:
    """Of the array in which the rows travel. Raises `UnknownName` for an input dtype that nobody serves."""
    if spec.input_dtype not in ROW_DTYPES:
        raise UnknownName("input dtype", spec.input_dtype, INPUT_DTYPES, label="Choices")
    return ROW_DTYPES[spec.input_dtype]


def row_shape(spec: ModelSpec) -> tuple[int, ...]:
    """Of one row in that array: a payload is [rows, *row_shape(spec)]."""
    return (packed_width(spec.inputs) if spec.input_dtype == BITS else spec.inputs,)


def packed_width(features: int) -> int:
    """Bytes that so many features take as bits."""
    return -(-features // 8)


def called(spec: ModelSpec) -> str:
    """What people know a network by that may have others beside it: its name, and where its weights are from."""
    return spec.name if spec.weights is None else f"{spec.name} ({Path(spec.weights).name})"


def misfit(payload: Any, rows: int, spec: ModelSpec) -> BackendError | None:
    """The error, unless `payload` is an array of the rows, features and dtype that were agreed."""
    wanted: tuple[int | str, ...] = (rows, *row_shape(spec))
    is_array = isinstance(payload, np.ndarray)
    if is_array and payload.shape == wanted and payload.dtype == row_dtype(spec) and rows > 0:
        return None
    if is_array and payload.shape[:1] == (0,):
        return BackendError("a request of 0 rows asks for nothing. Send at least one row.")
    if is_array and payload.shape == wanted[1:]:
        rows = 0  # what was taken for their number is the number of its features
    wanted = wanted if rows > 0 else ("rows", *wanted[1:])
    found = f"{payload.dtype} {list(payload.shape)}" if is_array else type(payload).__name__
    packed = f", {spec.inputs} features packed as bits," if spec.input_dtype == BITS else ""
    return BackendError(
        f"model '{spec.name}' takes a NumPy array {row_dtype(spec)} [{', '.join(map(str, wanted))}]{packed} for a "
        f"request of {rows if rows > 0 else 'so many'} rows, and got {found}. {_cure(payload, spec)}"
    )


def _cure(payload: Any, spec: ModelSpec) -> str:
    """What makes rows of a payload that is none."""
    wanted = row_dtype(spec)
    if hasattr(payload, "numpy"):
        return "Send rows.numpy()."
    if isinstance(payload, list | tuple):
        return f"Send np.asarray(rows, np.{wanted})."
    if not isinstance(payload, np.ndarray):
        return "Send that."
    if payload.shape == row_shape(spec):
        return "That is one row without the axis of the rows: send row[None]."
    if payload.ndim > 2 and math.prod(payload.shape[1:]) == math.prod(row_shape(spec)):
        return "Send rows.reshape(len(rows), -1), and let the model give them their shape back."
    if payload.dtype != wanted and payload.shape[1:] == row_shape(spec):
        return f"Send rows.astype(np.{wanted}), or name another input_dtype."
    return "Send that, or name other inputs."


@dataclass(frozen=True, slots=True)
class AnswerLayout:
    """What a model answers to a block of rows: float32 arrays [rows, *shape], alone, in a tuple or in a dict."""

    kind: str  # one of KINDS
    shapes: tuple[tuple[int, ...], ...]  # of one row, for each array in order
    names: tuple[str, ...] = ()  # the keys of a dict, in the same order

    def __str__(self) -> str:
        shapes = " and ".join(str(list(shape)) for shape in self.shapes)
        return f"{self.kind} {', '.join(self.names)}{' of ' if self.names else ''}{shapes}"

    def arrange(self, arrays: Sequence[NDArray[np.float32]]) -> Result:
        """The arrays, one for each shape and in that order, as the model would have answered them."""
        if self.kind == "dict":
            return dict(zip(self.names, arrays, strict=True))
        return tuple(arrays) if self.kind == "tuple" else arrays[0]

    def to_wire(self) -> dict[str, Any]:
        """Plain values only, for msgpack."""
        return {"kind": self.kind, "names": list(self.names), "shapes": [list(shape) for shape in self.shapes]}

    @classmethod
    def from_wire(cls, wire: Any) -> AnswerLayout:
        """Raises `BackendError` for anything that `to_wire` does not make."""
        if not is_layout(wire):
            raise BackendError(
                "the server describes its answers in a way that is not understood here. "
                "Let both ends run the same version of gpuinfer."
            )
        return cls(wire["kind"], tuple(map(tuple, wire["shapes"])), tuple(wire["names"]))


def is_layout(wire: Any) -> bool:
    if not isinstance(wire, Mapping) or wire.get("kind") not in KINDS:
        return False
    shapes, names = wire.get("shapes"), wire.get("names")
    if not isinstance(shapes, list) or not isinstance(names, list) or not shapes:
        return False
    named = len(shapes) if wire["kind"] == "dict" else 0
    return (
        all(isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) for shape in shapes)
        and all(isinstance(name, str) for name in names)
        and len(set(names)) == len(names) == named
        and (wire["kind"] != "tensor" or len(shapes) == 1)
    )
