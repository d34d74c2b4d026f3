"""Rows and answers as bodies of requests: safetensors, read in place and with every number of the header checked.

A block of rows is one tensor, `rows`. An answer is as many tensors as the model gives: of a dict under its keys, else
under "0", "1", …; the metadata's `answer` says which of `layouts.KINDS` it was.

The format: 8 bytes with the length of the header, little-endian; the header, JSON; the tensors' bytes, one behind the
other (https://github.com/huggingface/safetensors, "Format").
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gpuinfer.api import Result
from gpuinfer.models.layouts import KINDS

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
    """Bytes that are no safetensors, or not such as are read here. The message says why."""


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


def from_body(body: bytes) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors, views of `body`, and the metadata. Raises `NotTensors`."""
    header, data = _split(body)
    metadata = _decoded(_metadata, header.pop(METADATA)) if METADATA in header else {}
    if len(header) > MOST_TENSORS:
        raise NotTensors(f"{len(header)} tensors, and at most {MOST_TENSORS} are read.")
    told: dict[str, _Tensor] = {name: _decoded(_tensor, one) for name, one in header.items()}
    _refuse_gaps([tensor.data_offsets for tensor in told.values()], len(data))
    return {name: _array(name[:40], tensor, data) for name, tensor in told.items()}, metadata


def _refuse_gaps(offsets: Sequence[tuple[int, int]], size: int) -> None:
    """They must follow one another and fill the body: nothing is read twice, and nothing is hidden."""
    at = 0
    for begin, end in sorted(offsets):
        if begin != at or end < begin:
            raise NotTensors(f"a tensor begins at byte {begin:,} of the data, and the one before it ends at {at:,}.")
        at = end
    if at != size:
        raise NotTensors(f"{size:,} bytes of tensors, and the header tells of {at:,}.")


def _split(body: bytes) -> tuple[dict[str, Any], memoryview]:
    if len(body) < _LENGTH.size:
        raise NotTensors(f"{len(body)} bytes are no safetensors.")
    (length,) = _LENGTH.unpack_from(body)
    if not 2 <= length <= min(LARGEST_HEADER, len(body) - _LENGTH.size):
        raise NotTensors(f"a header of {length:,} bytes in {len(body):,}; at most {LARGEST_HEADER:,} are read.")
    end = _LENGTH.size + length
    return _decoded(_header, body[_LENGTH.size : end]), memoryview(body)[end:]


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
    """The block: the one tensor, whatever its name, a view of `body`. Its shape and dtype are for the model to check
    (`layouts.misfit`). Raises `NotTensors`."""
    tensors, _ = from_body(body)
    if len(tensors) != 1:
        raise NotTensors(f"{len(tensors)} tensors where one is wanted, with a row of the model in each of its rows.")
    (rows,) = tensors.values()
    if not rows.ndim:
        raise NotTensors("a single number where a block of rows is wanted.")
    return rows


def answer_to_body(answer: Result) -> bytes:
    """What a model answered: an array, or a tuple, list or dict of arrays. Raises `NotTensors` for anything else."""
    kind = "dict" if isinstance(answer, Mapping) else "tuple" if isinstance(answer, Sequence) else "tensor"
    parts = answer if kind == "dict" else dict(enumerate(answer if kind == "tuple" else [answer]))
    if not all(isinstance(part, np.ndarray) for part in parts.values()):
        raise NotTensors(f"an answer that is {type(answer).__name__} does not travel. Answer with arrays.")
    return to_body({str(name): part for name, part in parts.items()}, {"answer": kind})


def answer_from_body(body: bytes) -> Result:
    """As the model answered it; arrays are views of `body`. Raises `NotTensors`."""
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
