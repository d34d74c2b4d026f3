"""What lies where in a checkpoint of torch.distributed.checkpoint: `.metadata` beside *.distcp files.

`.metadata` is a pickle of torch's own classes: for each tensor its dtype, its shape and the chunks that it was cut
into, and for each chunk the file and the bytes that hold it. It is read as a description (`opcodes.described`); numbers
are checked against one another before they are used.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.assembly import Stored
from gpuinfer.text.checkpoint.opcodes import Made, Named, described
from gpuinfer.text.checkpoint.pickled import FLOATS

METADATA, SUFFIX = ".metadata", ".distcp"
MOST_BYTES, MOST_STEPS = 256 << 20, 64_000_000
MOST_CHUNKS = 4096  # of one tensor: ranks that shared it
MOST_SIZE, MOST_DIMENSIONS = 1 << 48, 16
OVERHEAD = 1 << 16  # bytes that torch.save puts around a tensor, at most

_META, _OLD = "torch.distributed.checkpoint.metadata.", "torch.distributed._shard.sharded_tensor.metadata."
_STORED_AS = "torch.distributed.checkpoint.filesystem._StorageInfo"
NAMES = frozenset(
    [_META + name for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")]
    + [_META + name for name in ("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")]
    + [_OLD + name for name in ("TensorProperties", "MEM_FORMAT_ENCODING")]
    + [_STORED_AS, "torch.Size", "torch.serialization._get_layout"]
    + [f"torch.{name}" for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    + [f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")]
)
"""Everything that torch's own metadata names, and nothing else."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a tensor, and the bytes of a file that hold it as torch.save writes a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class Sharded(Stored):
    """A tensor whose chunks are all of it, and overlap nowhere."""

    chunks: tuple[Chunk, ...]


def read_metadata(folder: Path) -> dict[str, Sharded]:
    """The floating-point tensors of a checkpoint by the names that its trainer gave them.

    Raises `UsageError` for what is no such checkpoint, is damaged, or asks for more than a description.
    """
    path = folder / METADATA
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has over {MOST_BYTES >> 20} MiB")
        found = described(path.read_bytes(), NAMES, MOST_STEPS)
        fields = _fields(found, "Metadata")
        places = dict(_place(index, info) for index, info in _mapping(fields.get("storage_data")).items())
        tensors = _mapping(fields.get("state_dict_metadata"))
        return {
            name: _tensor(name, _fields(entry, "TensorStorageMetadata"), places, folder)
            for name, entry in tensors.items()
            if isinstance(name, str) and isinstance(entry, Made) and entry.name == f"{_META}TensorStorageMetadata"
            if _dtype(entry) in FLOATS
        }
    except FileNotFoundError:
        raise UsageError(
            f"{folder} has no {METADATA}: it is no torch distributed checkpoint, or was not finished. Give the folder "
            "that torch.distributed.checkpoint.save wrote."
        ) from None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}. Check its permissions.") from None
    except (ValueError, OverflowError) as error:
        raise UsageError(f"{path} is no metadata of a checkpoint that can be read: {error}. Save it again.") from None


def _fields(made: Any, kind: str) -> Mapping[str, Any]:
    if not isinstance(made, Made) or made.name.rpartition(".")[2] != kind:
        raise ValueError(f"there is no {kind} where one must be")
    return _mapping(made.state)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("there are no fields where some must be")
    return value


def _dtype(entry: Made) -> torch.dtype | None:
    """The first of the properties, which are a tuple or, in older files, fields."""
    properties = _mapping(entry.state).get("properties")
    state = properties.state if isinstance(properties, Made) else None
    named = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(named, Named):
        raise ValueError("a tensor has no dtype")
    found = getattr(torch, named.name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _sizes(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    if isinstance(value, Made) and value.name == "torch.Size" and len(value.arguments) == 1:
        (numbers,) = value.arguments
        if isinstance(numbers, tuple | list) and len(numbers) <= MOST_DIMENSIONS:
            return tuple(_count(number) for number in numbers)
    raise ValueError("there is no torch.Size where one must be")


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_SIZE:
        raise ValueError(f"{str(value)[:40]!r} is no size")
    return value


Key = tuple[str, tuple[int, ...]]  # a tensor's name, and where in it a chunk begins
Place = tuple[str, int, int]  # file, first byte, bytes


def _place(index: Any, info: Any) -> tuple[Key, Place]:
    key, place = _fields(index, "MetadataIndex"), _fields(info, "_StorageInfo")
    name, offset, file = key.get("fqn"), key.get("offset"), place.get("relative_path")
    if not isinstance(name, str) or not isinstance(file, str):
        raise ValueError("an entry names no tensor, or no file")
    if Path(file).name != file or not file.endswith(SUFFIX):
        raise ValueError(f"it names '{file[:80]}', no {SUFFIX} file of its own folder")
    if place.get("transform_descriptors"):
        raise ValueError("its tensors are compressed, which is not read here")
    start, length = _count(place.get("offset")), _count(place.get("length"))
    return (name, () if offset is None else _sizes(offset)), (file, start, length)


def _tensor(name: str, fields: Mapping[str, Any], places: Mapping[Key, Place], folder: Path) -> Sharded:
    shape, given = _sizes(fields.get("size")), fields.get("chunks")
    dtype = _dtype(Made("", (), fields))
    if dtype is None or not isinstance(given, list) or not 1 <= len(given) <= MOST_CHUNKS:
        raise ValueError(f"tensor '{name[:80]}' has no proper list of chunks")
    chunks = {}
    for one in given:
        own = _fields(one, "ChunkStorageMetadata")
        offsets, sizes = _sizes(own.get("offsets")), _sizes(own.get("sizes"))
        place = places.get((name, offsets)) or places.get((name, ()))
        if place is None:
            raise ValueError(f"nobody says where tensor '{name[:80]}' lies")
        file, start, length = place
        if not 0 <= length - prod(sizes) * dtype.itemsize <= OVERHEAD:
            raise ValueError(f"a chunk {list(sizes)} of tensor '{name[:80]}' cannot have {length} bytes")
        chunks[offsets] = Chunk(offsets, sizes, folder / file, start, length)
    _check_cover(name, shape, list(chunks.values()))
    return Sharded(shape, dtype, tuple(chunks.values()))


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[Chunk]) -> None:
    """Chunks that lie within the tensor, overlap nowhere and have as many values as it has are all of it."""
    label = f"the chunks of tensor '{name[:80]}'"
    if any(len(chunk.offsets) != len(shape) or len(chunk.sizes) != len(shape) for chunk in chunks):
        raise ValueError(f"{label} have other dimensions than it")
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape):
        raise ValueError(f"{label} are not all of it: some ranks' files may be missing")
    begins = np.array([chunk.offsets for chunk in chunks], np.int64).reshape(len(chunks), len(shape))
    ends = begins + np.array([chunk.sizes for chunk in chunks], np.int64).reshape(begins.shape)
    if (ends > np.array(shape, np.int64)).any():
        raise ValueError(f"{label} lie beyond its end")
    for at in range(len(chunks) - 1):
        apart = (ends[at] <= begins[at + 1 :]) | (ends[at + 1 :] <= begins[at])
        if not apart.any(axis=1).all():
            raise ValueError(f"{label} overlap")
