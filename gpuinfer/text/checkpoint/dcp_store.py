"""Reads tensors of a torch distributed checkpoint, a chunk at a time, which is what memory it takes.

A chunk is what torch.save makes of a tensor: a zip archive whose data.pkl describes the tensor and whose data/0 holds
its values. The description is read without an unpickler, and the values at their place in the file.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Collection, Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.dcp import OVERHEAD, Chunk, Sharded
from gpuinfer.text.checkpoint.digests import Digests
from gpuinfer.text.checkpoint.opcodes import Elsewhere, Made, Named, described
from gpuinfer.text.checkpoint.pickled import TensorStore

STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}
NAMES = frozenset(STORAGES) | {"torch._utils._rebuild_tensor_v2", "collections.OrderedDict"}
LITTLE = b"little"  # the byte order
LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a file in a zip archive


class DcpStore:
    """`names`: what a tensor is called here, and there."""

    def __init__(self, where: str, stored: Mapping[str, Sharded], names: Mapping[str, str]) -> None:
        self.where = where
        self.tensors = {name: stored[theirs] for name, theirs in names.items()}

    def read(self, name: str, into: Tensor) -> None:
        tensor = self.tensors[name]
        for chunk in tensor.chunks:
            place = into[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]
            try:
                with chunk.path.open("rb", buffering=0) as file:
                    place.copy_(_values(file, chunk, tensor.dtype))
            except OSError as error:
                raise UsageError(f"cannot read {chunk.path}: {error.strerror}. Copy all of the checkpoint.") from None
            except (ValueError, KeyError, struct.error, zipfile.BadZipFile, NotImplementedError) as error:
                raise UsageError(f"{chunk.path} is damaged at tensor '{name}': {error}. Copy it again.") from None

    def digests(self, names: Collection[str]) -> Digests:
        """One tensor after another is put together for it."""
        found: Digests = {}
        for name in names:
            whole = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
            self.read(name, whole)
            found |= TensorStore(self.where, {name: whole}).digests([name])
        return found


def _values(file: Any, chunk: Chunk, dtype: torch.dtype) -> Tensor:
    """What the chunk holds. Raises `ValueError` for anything but a dense tensor of these sizes."""
    part = _Part(file, chunk.start, chunk.length)
    with zipfile.ZipFile(part) as archive:
        entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
        text, order = entries["data.pkl"], entries.get("byteorder")
        if text.file_size > OVERHEAD:
            raise ValueError("it is described at too great a length")
        if order is not None and (order.file_size != len(LITTLE) or archive.read(order) != LITTLE):
            raise ValueError("it was written on a machine of another byte order")
        key, offset, strides = _description(archive.read(text), dtype, chunk.sizes)
        values = entries[f"data/{key}"]
    count = prod(chunk.sizes)
    if values.compress_type != zipfile.ZIP_STORED or values.file_size != count * dtype.itemsize:
        raise ValueError(f"{list(chunk.sizes)} values of {dtype} cannot have {values.file_size} bytes")
    flat = torch.empty(count, dtype=dtype)
    _fill(part, _begin(part, values.header_offset), flat)
    reach = offset + sum((size - 1) * stride for size, stride in zip(chunk.sizes, strides, strict=True))
    if count and reach >= count:
        raise ValueError("its values lie beyond its end")
    return flat.as_strided(chunk.sizes, strides, offset)


def _description(data: bytes, dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[str, int, tuple[int, ...]]:
    """The name of the tensor's values, the place of the first of them, and its strides."""
    found = described(data, NAMES)
    if not isinstance(found, Made) or not found.name.endswith("_rebuild_tensor_v2") or len(found.arguments) < 4:
        raise ValueError("it holds no plain tensor")
    storage, offset, shape, strides = found.arguments[:4]
    if not isinstance(storage, Elsewhere) or not isinstance(storage.id, tuple) or len(storage.id) != 5:
        raise ValueError("it holds no values")
    _, kind, key, _, count = storage.id
    if not isinstance(kind, Named) or STORAGES.get(kind.name) != dtype or not isinstance(key, str):
        raise ValueError(f"its values are not {dtype}, as .metadata says")
    numbers = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (None,)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(strides) != len(sizes):
        raise ValueError("its sizes are no numbers")
    if shape != sizes or count != prod(sizes):
        raise ValueError(f"it is {list(shape)}, and .metadata says {list(sizes)}")
    return key, offset, strides


def _begin(part: _Part, at: int) -> int:
    """Where the bytes of an archive's file begin, whose header is `at`."""
    part.seek(at)
    fields = LOCAL_HEADER.unpack(part.read(LOCAL_HEADER.size))
    if fields[0] != b"PK\x03\x04":
        raise ValueError("its archive names a place where no file is")
    return int(at + LOCAL_HEADER.size + fields[9] + fields[10])


def _fill(part: _Part, at: int, into: Tensor) -> None:
    values: Any = into.view(torch.uint8).numpy()
    rest = memoryview(values)
    part.seek(at)
    while rest:
        count = part.readinto(rest[: 1 << 30])
        if not count:
            raise ValueError("it ends within its values")
        rest = rest[count:]


class _Part(io.RawIOBase):
    """Some bytes of a file as a file of their own."""

    def __init__(self, file: Any, start: int, length: int) -> None:
        super().__init__()
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise ValueError("its archive points before its beginning")
        self._at = base + offset
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        count = self._file.readinto(view)
        self._at += count
        return int(count)
