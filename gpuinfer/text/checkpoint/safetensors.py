"""Reads safetensors files: headers checked before a byte of weights is read, tensors straight to where they are wanted.

The format: 8 bytes of little-endian length, a JSON object of that length (name → dtype, shape, data_offsets), the bytes
of the tensors. We read ourselves and do not map the file: a file that shrinks under a mapping kills the process.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.assembly import Stored
from gpuinfer.text.checkpoint.digests import Digests, DigestSource, digests_of, kept
from gpuinfer.text.checkpoint.keys import elsewhere

MOST_HEADER_BYTES = 100_000_000  # the format's own bound
STAGING_BYTES = 16 << 20  # for what is cast as it is read
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
OTHER_BYTES = {"BOOL": 1, "U8": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
QUANTISED = ("F8_", "F4", "F6_", "U8", "I8", "I32")  # how quantised weights are stored


@dataclass(frozen=True)
class TensorPlace(Stored):
    """A tensor's bytes in a file."""

    path: Path
    start: int


def read_header(path: Path) -> dict[str, TensorPlace]:
    """The tensors of a file by name; buffers that are no numbers of weights are left out.

    Raises `UsageError` for a file that is damaged, cut short, or holds quantised weights.
    """
    try:
        with path.open("rb") as file:
            size = path.stat().st_size
            (length,) = struct.unpack("<Q", _exactly(file.read(8), 8))
            if length > min(size - 8, MOST_HEADER_BYTES):
                raise ValueError(f"it says that its header has {length} bytes, but the file has {size}")
            header = json.loads(_exactly(file.read(length), length))
        return _places(header, path, 8 + length, size)
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}. Copy the whole model folder.") from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, str(error)) from None


def damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged: {why}. Copy it again from where the model came.")


def _exactly(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise ValueError("it ends within its header")
    return data


def _places(header: Any, path: Path, start: int, size: int) -> dict[str, TensorPlace]:
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    places, ends = {}, []
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end, dtype, shape = _entry(name, entry, size - start)
        ends.append((begin, end, name))
        if dtype in DTYPES:
            places[name] = TensorPlace(shape, DTYPES[dtype], path, start + begin)
        elif dtype.startswith(QUANTISED) and name.endswith("weight"):
            raise elsewhere(f"{path} holds quantised weights ({dtype[:16]})")
    _refuse_overlaps(sorted(ends))
    return places


def _entry(name: str, entry: Any, room: int) -> tuple[int, int, str, tuple[int, ...]]:
    """Begin, end, dtype and shape of a tensor, checked against one another and against the file's size."""
    label = f"tensor '{name[:80]}'"
    if not isinstance(entry, Mapping):
        raise ValueError(f"{label} is described by no object")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(offsets) or len(offsets) != 2 or len(shape) > 16:
        raise ValueError(f"{label} has no proper dtype, shape and data_offsets")
    begin, end = offsets
    if not begin <= end <= room:
        raise ValueError(f"{label} lies at bytes {begin} to {end}, but the file has {room}: it was cut short")
    width = DTYPES[dtype].itemsize if dtype in DTYPES else OTHER_BYTES.get(dtype)
    if width is not None and prod(shape) * width != end - begin:
        raise ValueError(f"{label} {shape} of {dtype} has {end - begin} bytes")
    return begin, end, dtype, tuple(shape)


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 48 for size in value
    )


def _refuse_overlaps(ends: list[tuple[int, int, str]]) -> None:
    for (_, end, name), (begin, _, other) in pairwise(ends):
        if begin < end:
            raise ValueError(f"tensors '{name[:80]}' and '{other[:80]}' overlap")


class SafetensorsStore:
    """The tensors of all shards of a folder."""

    def __init__(self, where: str, tensors: Mapping[str, TensorPlace]) -> None:
        self.where, self.tensors = where, tensors

    def read(self, name: str, into: Tensor) -> None:
        place = self.tensors[name]
        try:
            with place.path.open("rb", buffering=0) as file:
                file.seek(place.start)
                if into.dtype == place.dtype:
                    _fill(file, into, place.path, name)
                else:
                    _fill_cast(file, into, place, name)
        except OSError as error:
            raise UsageError(f"cannot read {place.path}: {error.strerror}. Is its disk still there?") from None

    def digests(self, names: Collection[str]) -> Digests:
        """Those of a whole file are kept until it changes."""
        found: Digests = {}
        for path in sorted({self.tensors[name].path for name in names}):
            wanted = {name: self.tensors[name] for name in names if self.tensors[name].path == path}
            whole = len(wanted) == sum(place.path == path for place in self.tensors.values())
            compute = partial(self._computed, path, wanted)
            found |= kept(path, wanted, compute) if whole else compute()
        return found

    def _computed(self, path: Path, places: Mapping[str, TensorPlace]) -> Digests:
        try:
            with path.open("rb", buffering=0) as file:
                return digests_of({name: _source(file.fileno(), name, place) for name, place in places.items()})
        except OSError as error:
            raise UsageError(f"cannot read {path}: {error.strerror}. Is its disk still there?") from None


def _source(file: int, name: str, place: TensorPlace) -> DigestSource:
    """Its bytes, read at their place: threads share the open file."""

    def read(start: int, length: int) -> bytes:
        content = os.pread(file, length, place.start + start)
        if len(content) != length:
            raise damaged(place.path, f"it ends within tensor '{name}'")
        return content

    return DigestSource(prod(place.shape) * place.dtype.itemsize, read)


def _fill(file: Any, into: Tensor, path: Path, name: str) -> None:
    """A system call brings at most 2 GiB: ask until all is there."""
    values: Any = into.reshape(-1).view(torch.uint8).numpy()
    rest = memoryview(values)
    while rest:
        count = file.readinto(rest[: 1 << 30])
        if not count:
            raise damaged(path, f"it ends within tensor '{name}'")
        rest = rest[count:]


def _fill_cast(file: Any, into: Tensor, place: TensorPlace, name: str) -> None:
    flat = into.reshape(-1)
    staging = torch.empty(min(flat.numel(), STAGING_BYTES // place.dtype.itemsize), dtype=place.dtype)
    for start in range(0, flat.numel(), max(1, staging.numel())):
        part = staging[: flat.numel() - start]
        _fill(file, part, place.path, name)
        flat[start : start + part.numel()].copy_(part)
