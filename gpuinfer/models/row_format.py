"""Formats of rows, answers, training batches and gradients for clients and servers, without torch: layouts in memory,
and safetensors bodies of requests.

A body holds 8 bytes with the length of the header (little-endian), the header (JSON), and the tensors' bytes one behind
the other (https://github.com/huggingface/safetensors, "Format"); it is read in place, and every number of the header is
checked. A block of rows is one tensor, `rows`; an answer is as many tensors as the model gives.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gpuinfer.api import ModelSpec, Result
from gpuinfer.errors import BackendDied, BackendError, DeviceLost, UnknownName
from gpuinfer.models.row_layout import FLAT_DTYPES, PACKED

BITS = "bits"
"""Features that are 0 or 1, eight in a byte: feature i of a row is bit i % 8, the lowest first, of its byte i // 8."""

INPUT_DTYPES = FLAT_DTYPES
"""What `ModelSpec.input_dtype` may be, beside `PACKED` of rows with a layout."""
ROW_DTYPES = {name: np.dtype("uint8" if name in (BITS, PACKED) else name) for name in (*INPUT_DTYPES, PACKED)}

KINDS = ("tensor", "tuple", "dict")
ANSWER_DTYPES = ("bool", "uint8", "int8", "int16", "int32", "int64", "float32", "float64")
"""What a part of an answer may be made of on its way to another process."""


def row_dtype(spec: ModelSpec) -> np.dtype[Any]:
    """The dtype of the array in which rows travel. Raises `UnknownName` for an unknown input dtype."""
    if spec.input_dtype not in ROW_DTYPES:
        raise UnknownName("input dtype", spec.input_dtype, INPUT_DTYPES, label="Choices")
    return ROW_DTYPES[spec.input_dtype]


def row_shape(spec: ModelSpec) -> tuple[int, ...]:
    """The shape of one row in that array: a payload is [rows, *row_shape(spec)]."""
    return (-(-spec.inputs // 8) if spec.input_dtype == BITS else spec.inputs,)


def network_title(spec: ModelSpec) -> str:
    """A network's name in messages where there may be several: its name, and its weights' file."""
    return spec.name if spec.weights is None else f"{spec.name} ({Path(spec.weights).name})"


def misfit(payload: Any, rows: int, spec: ModelSpec) -> BackendError | None:
    """An error unless `payload` is an array with the agreed rows, features and dtype."""
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
    """The cure: how to make rows of such a payload."""
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
    """The layout of answers to a block: arrays [rows, *shape], float32 or of `dtypes`, alone, in a tuple or in a
    dict.
    """

    kind: str  # one of KINDS
    shapes: tuple[tuple[int, ...], ...]  # of one row, for each array in order
    names: tuple[str, ...] = ()  # the keys of a dict, in the same order
    dtypes: tuple[str, ...] = ()  # for each array in order; none where all are float32

    def __str__(self) -> str:
        kinds = [f"{dtype} " for dtype in self.dtypes] or [""] * len(self.shapes)
        shapes = " and ".join(f"{dtype}{list(shape)}" for dtype, shape in zip(kinds, self.shapes, strict=True))
        return f"{self.kind} {', '.join(self.names)}{' of ' if self.names else ''}{shapes}"

    @property
    def array_dtypes(self) -> tuple[np.dtype[Any], ...]:
        """For each array in order."""
        return tuple(map(np.dtype, self.dtypes)) or (np.dtype(np.float32),) * len(self.shapes)

    def arrange(self, arrays: Sequence[NDArray[Any]]) -> Result:
        """Arrange arrays, one for each shape in order, as the model answers."""
        if self.kind == "dict":
            return dict(zip(self.names, arrays, strict=True))
        return tuple(arrays) if self.kind == "tuple" else arrays[0]

    def to_wire(self) -> dict[str, Any]:
        """Plain values only, for msgpack."""
        shapes = [list(shape) for shape in self.shapes]
        return {"kind": self.kind, "names": list(self.names), "shapes": shapes, "dtypes": list(self.dtypes)}

    @classmethod
    def from_wire(cls, wire: Any) -> AnswerLayout:
        """Raises `BackendError` for anything that `to_wire` does not make."""
        if not is_layout(wire):
            raise BackendError(
                "the server describes its answers in a way that is not understood here. "
                "Let both ends run the same version of gpuinfer."
            )
        return cls(wire["kind"], tuple(map(tuple, wire["shapes"])), tuple(wire["names"]), tuple(wire["dtypes"]))


def is_layout(wire: Any) -> bool:
    if not isinstance(wire, Mapping) or wire.get("kind") not in KINDS:
        return False
    shapes, names, dtypes = wire.get("shapes"), wire.get("names"), wire.get("dtypes")
    if not (isinstance(shapes, list) and isinstance(names, list) and isinstance(dtypes, list)) or not shapes:
        return False
    if len(dtypes) not in (0, len(shapes)) or any(one not in ANSWER_DTYPES for one in dtypes):
        return False
    named = len(shapes) if wire["kind"] == "dict" else 0
    return (
        all(isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape) for shape in shapes)
        and all(isinstance(name, str) for name in names)
        and len(set(names)) == len(names) == named
        and (wire["kind"] != "tensor" or len(shapes) == 1)
    )


MEDIA_TYPE = "application/x-safetensors"
ROWS = "rows"
LARGEST_HEADER = 64 << 10  # bytes
MOST_TENSORS = 256
MOST_DIMENSIONS = 8
DTYPES: dict[str, np.dtype[Any]] = {
    "F32": np.dtype("<f4"),
    "F64": np.dtype("<f8"),
    "F16": np.dtype("<f2"),
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "BOOL": np.dtype("?"),
    "I16": np.dtype("<i2"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")


class NotTensors(ValueError):
    """Bytes that are no safetensors, or of a kind that is not read here. The message says why."""


class _Tensor(Struct, forbid_unknown_fields=True):
    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


_header = msgspec.json.Decoder(dict[str, msgspec.Raw])
_tensor = msgspec.json.Decoder(_Tensor)
_metadata = msgspec.json.Decoder(dict[str, str])


def to_body(tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str] | None = None) -> bytes:
    """Raises `NotTensors` for an array of a dtype that does not travel."""
    header: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    pieces, at = [b"", b""], 0
    for name, array in tensors.items():
        known = NAMES.get(array.dtype)
        if known is None:
            raise NotTensors(f"an array of {array.dtype} does not travel. Use one of {', '.join(map(str, NAMES))}.")
        data = np.ascontiguousarray(array)
        header[name] = {"dtype": known, "shape": list(array.shape), "data_offsets": (at, at + data.nbytes)}
        pieces.append(data.data.cast("B") if data.size else b"")  # type: ignore[arg-type]  # joined as it lies
        at += data.nbytes
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % 8)  # so that numbers lie where processors read them best
    pieces[:2] = [_LENGTH.pack(len(encoded)), encoded]
    return b"".join(pieces)


def is_tensors(body: bytes) -> bool:
    """Whether the body looks like safetensors, by its first bytes: a length, and an object of JSON that is so long."""
    if len(body) < _LENGTH.size + 2 or body[_LENGTH.size : _LENGTH.size + 1] != b"{":
        return False
    (length,) = _LENGTH.unpack_from(body)
    return bool(2 <= length <= min(LARGEST_HEADER, len(body) - _LENGTH.size))


def from_body(body: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors, views of `body`, and the metadata. Raises `NotTensors`."""
    if len(body) < _LENGTH.size:
        raise NotTensors(f"{len(body)} bytes are no safetensors.")
    (length,) = _LENGTH.unpack_from(body)
    if not 2 <= length <= min(LARGEST_HEADER, len(body) - _LENGTH.size):
        raise NotTensors(f"a header of {length:,} bytes in {len(body):,}; at most {LARGEST_HEADER:,} are read.")
    begins = _LENGTH.size + length
    header, data = _decoded(_header, body[_LENGTH.size : begins]), memoryview(body)[begins:]
    metadata = _decoded(_metadata, header.pop(METADATA)) if METADATA in header else {}
    if len(header) > MOST_TENSORS:
        raise NotTensors(f"{len(header)} tensors, and at most {MOST_TENSORS} are read.")
    told: dict[str, _Tensor] = {name: _decoded(_tensor, one) for name, one in header.items()}
    at = 0  # tensors follow one another and fill the body: nothing is read twice, and nothing is hidden
    for begin, end in sorted(tensor.data_offsets for tensor in told.values()):
        if begin != at or end < begin:
            raise NotTensors(f"a tensor begins at byte {begin:,} of the data, and the one before it ends at {at:,}.")
        at = end
    if at != len(data):
        raise NotTensors(f"{len(data):,} bytes of tensors, and the header tells of {at:,}.")
    return {name: _array(name[:40], tensor, data) for name, tensor in told.items()}, metadata


def _decoded(decoder: Any, data: Any) -> Any:
    try:
        return decoder.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise NotTensors(f"a header that is not understood: {error}.") from error


def _array(name: str, tensor: _Tensor, data: memoryview) -> NDArray[Any]:
    dtype = DTYPES.get(tensor.dtype)
    if dtype is None:
        raise NotTensors(f"the tensor '{name}' is of {tensor.dtype[:20]}. Use one of {', '.join(DTYPES)}.")
    if len(tensor.shape) > MOST_DIMENSIONS or not all(0 <= size < 1 << 40 for size in tensor.shape):
        raise NotTensors(f"the tensor '{name}' has a shape that is none.")
    begin, end = tensor.data_offsets
    if end - begin != math.prod(tensor.shape) * dtype.itemsize:
        raise NotTensors(f"the tensor '{name}' has {end - begin:,} bytes, which its shape and dtype do not make.")
    found: NDArray[Any] = np.frombuffer(data[begin:end], dtype)
    return found.reshape(tensor.shape)


def rows_to_body(rows: NDArray[Any]) -> bytes:
    """A block of rows, [rows, ...]. Raises `NotTensors`."""
    return to_body({ROWS: rows})


def rows_from_body(body: bytes) -> NDArray[Any]:
    """The block of a body: its one tensor, whatever its name, as a view of `body`. Its shape and dtype are for the
    model to check (`misfit`). Raises `NotTensors`.
    """
    tensors, _ = from_body(body)
    if len(tensors) != 1:
        raise NotTensors(f"{len(tensors)} tensors where one is wanted, with a row of the model in each of its rows.")
    (rows,) = tensors.values()
    if not rows.ndim:
        raise NotTensors("a single number where a block of rows is wanted.")
    return rows


def answer_to_body(answer: Result) -> bytes:
    """An answer as a body: an array, or a tuple, list or dict of arrays. Raises `NotTensors` for anything else."""
    kind = "dict" if isinstance(answer, Mapping) else "tuple" if isinstance(answer, Sequence) else "tensor"
    parts = answer if kind == "dict" else dict(enumerate(answer if kind == "tuple" else [answer]))
    if not all(isinstance(part, np.ndarray) for part in parts.values()):
        raise NotTensors(f"an answer that is {type(answer).__name__} does not travel. Answer with arrays.")
    return to_body({str(name): part for name, part in parts.items()}, {"answer": kind})


def answer_from_body(body: bytes) -> Result:
    """The answer in a body; arrays are views of `body`. Raises `NotTensors`."""
    tensors, metadata = from_body(body)
    kind = metadata.get("answer", "tensor" if len(tensors) == 1 else "dict")
    if kind not in KINDS or not tensors or (kind == "tensor" and len(tensors) != 1):
        raise NotTensors(f"an answer of kind '{kind[:20]}' with {len(tensors)} tensors.")
    if kind == "dict":
        return tensors
    if kind == "tensor":
        return next(iter(tensors.values()))
    if tensors.keys() != set(map(str, range(len(tensors)))):  # other writers put them in an order of their own
        raise NotTensors("the tensors of a tuple are not called 0, 1, ….")
    return tuple(tensors[str(number)] for number in range(len(tensors)))


Block = TypeVar("Block")


def answers_by_halving(forward: Callable[[Sequence[Block]], list[Any]], blocks: Sequence[Block]) -> list[Any]:
    """One result for each block, in order: the answer of `forward`, or the exception that this block raises.

    One forward where nothing raises. Of n blocks a bad one costs about 2 log2(n) more forwards; if all are bad, twice
    as many as one by one.
    """
    try:
        return forward(blocks)
    except (BackendDied, DeviceLost) as error:  # the fault is in no known block, and each try costs a device
        return [error] * len(blocks)
    except Exception as error:  # noqa: BLE001 (a model may raise anything, which is its block's answer)
        if len(blocks) == 1:
            return [error]
    middle = len(blocks) // 2
    return [*answers_by_halving(forward, blocks[:middle]), *answers_by_halving(forward, blocks[middle:])]
