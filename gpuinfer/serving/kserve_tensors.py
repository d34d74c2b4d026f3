"""Requests and responses of KServe's inference protocol v2 (Open Inference Protocol): tensors as JSON, or as bytes
behind the JSON ("Binary Tensor Data Extension" of Triton's documentation), which are read in place.

A body with bytes begins with so much JSON as the header Inference-Header-Content-Length says; the bytes of each tensor
whose parameters have a `binary_data_size` follow in the order of the tensors. Numbers are little-endian and row-major;
an element of BYTES is its length (uint32) and its bytes.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from msgspec import Raw, Struct, UnsetType
from numpy.typing import NDArray

from gpuinfer.http.parser import LENGTH_DIGITS
from gpuinfer.serving.layout_reader import values_decoder
from gpuinfer.serving.openai.requests import BadRequest, unreadable

HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY_TYPE = "application/octet-stream"
BYTES = "BYTES"
DTYPES: Mapping[str, str] = {
    "BOOL": "bool",
    "UINT8": "uint8",
    "INT8": "int8",
    "INT16": "int16",
    "INT32": "int32",
    "INT64": "int64",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
}
"""The protocol's datatypes of numbers → NumPy's names."""
DATATYPES: Mapping[str, str] = {dtype: datatype for datatype, dtype in DTYPES.items()}
MOST_DIMENSIONS = 16
MOST_VALUES = 1 << 40  # elements of one tensor
MOST_TEXTS = 1 << 16  # elements of one tensor of BYTES
MEMORY = "shared_memory_region"
PRIORITY, TIMEOUT, BINARY_OUTPUT = "priority", "timeout", "binary_data_output"
_SIZE = struct.Struct("<I")

Parameters = dict[str, bool | int | float | str | None]


class InferInput(Struct, forbid_unknown_fields=True):
    """One input. `shape` begins with the rows; `data` is row-major, flat or nested."""

    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters = {}
    data: Raw | UnsetType = msgspec.UNSET


class InferOutput(Struct, forbid_unknown_fields=True):
    """One output that is wanted."""

    name: str
    parameters: Parameters = {}


class InferBody(Struct, forbid_unknown_fields=True):
    """The body of `POST /v2/models/MODEL/infer`, or its part that is JSON."""

    inputs: list[InferInput]
    id: str = ""
    parameters: Parameters = {}
    outputs: list[InferOutput] = []
    model_name: str | None = None  # as KServe's own client repeats them
    model_version: str | None = None


Tensor = NDArray[Any] | list[bytes]
"""Of BYTES the elements in order, whatever the shape."""

_decode = msgspec.json.Decoder(InferBody).decode
_texts = msgspec.json.Decoder(list[str])
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class InferRequest:
    """A request's tensors by their names, its parameters, and the outputs that are wanted: all, where none is named."""

    id: str
    tensors: Mapping[str, Tensor]
    parameters: Mapping[str, Any]
    outputs: Sequence[InferOutput]

    def wants_binary(self, output: InferOutput | None) -> bool:
        """Whether an output travels as bytes, where the request or the output says so."""
        usual = self.parameters.get(BINARY_OUTPUT, False)
        return bool(usual if output is None else output.parameters.get("binary_data", usual))


def read_infer_request(body: bytes, header_length: str | None) -> InferRequest:
    """Arrays of binary tensors are views of `body`. Raises `BadRequest`."""
    header, data = body, memoryview(b"")
    if header_length is not None:
        plain = header_length.isascii() and header_length.isdecimal() and len(header_length) <= LENGTH_DIGITS
        if not plain or int(header_length) > len(body):
            raise BadRequest(f"{HEADER_LENGTH} is no number of bytes up to the body's {len(body):,}. Correct it.")
        header, data = body[: int(header_length)], memoryview(body)[int(header_length) :]
    try:
        parsed = _decode(header)
    except (ValueError, RecursionError) as error:
        raise unreadable(error, InferBody, header, "request") from error
    tensors: dict[str, Tensor] = {}
    at = 0
    for one in parsed.inputs:
        if one.name in tensors:
            raise BadRequest(f"two inputs are called '{one.name[:40]}'. Send one of them.", "inputs")
        size = one.parameters.get("binary_data_size")
        refuse_parameters(one.parameters, ("binary_data_size",), f"input '{one.name[:40]}'")
        if size is None:
            tensors[one.name] = _from_json(one)
            continue
        if type(size) is not int or not 0 <= size <= len(data) - at:
            raise BadRequest(
                f"input '{one.name[:40]}' is of {size!r:.20} bytes, and {len(data) - at:,} are left behind the JSON. "
                f"Let binary_data_size be the tensor's bytes, and {HEADER_LENGTH} those of the JSON.",
                "inputs",
            )
        if one.data is not msgspec.UNSET:
            raise BadRequest(f"input '{one.name[:40]}' has both `data` and bytes. Send one of them.", "inputs")
        tensors[one.name] = _from_bytes(one, data[at : at + size])
        at += size
    if at != len(data):
        raise BadRequest(f"{len(data) - at:,} bytes behind the last tensor. Leave them out.", "inputs")
    return InferRequest(parsed.id, tensors, parsed.parameters, parsed.outputs)


def refuse_parameters(parameters: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise `BadRequest` for a parameter that is not among the known ones."""
    if any(name.startswith(MEMORY) for name in parameters):
        raise BadRequest(f"{where} lies in shared memory, which is not served. Send its bytes (binary_data_size).")
    if odd := [name for name in parameters if name not in known]:
        named = f"Choose from {', '.join(known)}, or leave it out." if known else "Leave it out."
        raise BadRequest(f"{where} has the parameter '{odd[0][:40]}', which is not known here. {named}", "parameters")


def _count(one: InferInput) -> int:
    """The elements of a tensor of this shape. Raises `BadRequest` for what is no shape."""
    sizes = [max(1, size) for size in one.shape]  # NumPy has no array of 0 × so many either
    if len(sizes) > MOST_DIMENSIONS or min(one.shape, default=0) < 0 or math.prod(sizes) > MOST_VALUES:
        raise BadRequest(f"input '{one.name[:40]}' has a shape that is none. Give its sizes, rows first.", "inputs")
    return math.prod(one.shape)


def _dtype(one: InferInput) -> np.dtype[Any]:
    if one.datatype not in DTYPES:
        known = ", ".join([*DTYPES, BYTES])
        raise BadRequest(f"input '{one.name[:40]}' is of {one.datatype[:20]}. Send one of {known}.", "inputs")
    return np.dtype(DTYPES[one.datatype]).newbyteorder("<")


def _unlike(one: InferInput, found: int, of_each: int = 0) -> BadRequest:
    """`of_each`: bytes of each value, where `found` is of bytes."""
    count, what = _count(one) * (of_each or 1), "bytes" if of_each else "values"
    why = f"input '{one.name[:40]}' of shape {one.shape} is {count:,} {what}, and {found:,} came. Send as many."
    return BadRequest(why, "inputs")


def _from_json(one: InferInput) -> Tensor:
    if not isinstance(one.data, Raw):
        why = f"input '{one.name[:40]}' has neither `data` nor a binary_data_size. Send its values."
        raise BadRequest(why, "inputs")
    count = _count(one)
    if one.datatype == BYTES:
        try:
            texts = _texts.decode(one.data)
        except (ValueError, RecursionError) as error:
            raise BadRequest(
                f"`data` of input '{one.name[:40]}': {error}. Send a flat list of texts.", "inputs"
            ) from error
        if len(texts) != count:
            raise _unlike(one, len(texts))
        return [text.encode() for text in texts]
    dtype, array, fault = _dtype(one), None, None
    for depth in dict.fromkeys((1, len(one.shape))):
        try:
            values = values_decoder(dtype.name, depth).decode(one.data)
            with np.errstate(over="ignore"):  # becomes inf, which is refused
                array = np.array(values, dtype)
            break
        except (ValueError, RecursionError) as error:
            fault = fault or error
    if array is None:
        why = f"`data` of input '{one.name[:40]}': {fault}. Send {one.datatype} values, flat or nested as its shape."
        raise BadRequest(why, "inputs")
    if array.size != count:
        raise _unlike(one, array.size)
    if array.ndim > 1 and list(array.shape) != one.shape:
        why = f"`data` of input '{one.name[:40]}' is nested as {list(array.shape)}, and its shape is {one.shape}."
        raise BadRequest(f"{why} Nest it so, or send it flat.", "inputs")
    return array.reshape(one.shape)


def _from_bytes(one: InferInput, data: memoryview) -> Tensor:
    count = _count(one)
    if one.datatype == BYTES:
        return _elements(one, data, count)
    dtype = _dtype(one)
    if len(data) != count * dtype.itemsize:
        raise _unlike(one, len(data), dtype.itemsize)
    array: NDArray[Any] = np.frombuffer(data, dtype)
    if dtype == np.bool_:
        array = array.view(np.uint8) != 0  # any other byte is no value of a bool
    elif not array.flags.aligned:  # the JSON before it has any length
        array = array.copy()
    return array.reshape(one.shape)


def _elements(one: InferInput, data: memoryview, count: int) -> list[bytes]:
    if count > MOST_TEXTS:
        raise BadRequest(f"input '{one.name[:40]}' is of {count:,} texts; {MOST_TEXTS:,} are the most.", "inputs")
    found: list[bytes] = []
    at = 0
    while at + _SIZE.size <= len(data) and len(found) < count:
        (size,) = _SIZE.unpack_from(data, at)
        at += _SIZE.size
        found.append(bytes(data[at : at + size]))
        at += size
    if at != len(data) or len(found) != count:
        raise BadRequest(
            f"the bytes of input '{one.name[:40]}' are not {count:,} elements of BYTES, each behind its length as "
            "uint32. Write them so.",
            "inputs",
        )
    return found


def check_outputs(request: InferRequest, names: Collection[str]) -> None:
    """Raises `BadRequest` for an output that there is not among these names, and for a wish that cannot be met."""
    for one in request.outputs:
        if "classification" in one.parameters:
            raise BadRequest("no output is classified here. Leave `classification` out, and sort the values.")
        refuse_parameters(one.parameters, ("binary_data",), f"output '{one.name[:40]}'")
        if one.name not in names:
            named = ", ".join(f"'{name}'" for name in names)
            raise BadRequest(f"there is no output '{one.name[:40]}'. The model's are {named}.", "outputs")


def write_infer_response(
    request: InferRequest, model: str, version: str, outputs: Mapping[str, Tensor]
) -> tuple[bytes, int | None]:
    """The body, and the length of its JSON where bytes follow. Tensors of BYTES have one dimension. The wanted outputs
    are among these (`check_outputs`).
    """
    wanted: Mapping[str, InferOutput | None] = {one.name: one for one in request.outputs} or dict.fromkeys(outputs)
    entries: list[dict[str, Any]] = []
    pieces: list[bytes | memoryview] = [b""]
    for name, output in wanted.items():
        one, binary = {"name": name}, request.wants_binary(output)
        entries.append(one | _written(outputs[name], binary, pieces))
    answer: dict[str, Any] = {"model_name": model, "model_version": version, "outputs": entries}
    if request.id:
        answer["id"] = request.id
    pieces[0] = header = _encode(answer)
    if not any("parameters" in one for one in entries):
        return header, None
    return b"".join(pieces), len(header)


def _written(tensor: Tensor, binary: bool, pieces: list[bytes | memoryview]) -> dict[str, Any]:
    """The entry of one output; its bytes are added to the pieces."""
    if isinstance(tensor, list):
        entry: dict[str, Any] = {"datatype": BYTES, "shape": [len(tensor)]}
        if not binary:
            return entry | {"data": [text.decode("utf-8", "replace") for text in tensor]}
        data = b"".join([_SIZE.pack(len(text)) + text for text in tensor])
        pieces.append(data)
        return entry | {"parameters": {"binary_data_size": len(data)}}
    entry = {"datatype": DATATYPES[tensor.dtype.name], "shape": list(tensor.shape)}
    if not binary:
        return entry | {"data": tensor.ravel().tolist()}
    array = np.ascontiguousarray(tensor)
    if array.size:
        pieces.append(array.data.cast("B"))
    return entry | {"parameters": {"binary_data_size": array.nbytes}}
