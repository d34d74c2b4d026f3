"""Checkpoints of torch.distributed.checkpoint: `.metadata`, a pickle that says what lies where, beside *.distcp files,
whose tensors are read a chunk at a time. All but the weights comes from the base model's folder.
"""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Checkpoint, Digests
from gpuinfer.text.checkpoint.model_family import NO_HINTS, MaskHints
from gpuinfer.text.checkpoint.pickle_reader import (
    FLOATS,
    PickledCall,
    PickledName,
    PickledReference,
    TensorStore,
    described,
)
from gpuinfer.text.checkpoint.safetensors_folder import HEAD, assembled
from gpuinfer.text.checkpoint.tensor_layout import StoredTensor, names_of
from gpuinfer.text.transformer import Shape

METADATA, SUFFIX = ".metadata", ".distcp"
MOST_BYTES, MOST_STEPS = 256 << 20, 64_000_000
MOST_CHUNKS = 4096  # of one tensor: ranks that shared it
MOST_SIZE, MOST_DIMENSIONS = 1 << 48, 16
OVERHEAD = 1 << 16  # bytes that torch.save puts around a tensor, at most

_META, _OLD = "torch.distributed.checkpoint.metadata.", "torch.distributed._shard.sharded_tensor.metadata."
_STORED_AS = "torch.distributed.checkpoint.filesystem._StorageInfo"
METADATA_NAMES = frozenset(
    [_META + name for name in ("Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")]
    + [_META + name for name in ("TensorProperties", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")]
    + [_OLD + name for name in ("TensorProperties", "MEM_FORMAT_ENCODING")]
    + [_STORED_AS, "torch.Size", "torch.serialization._get_layout"]
    + [f"torch.{name}" for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)]
    + [f"{module}.{name}" for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")]
)
"""Everything that torch's own metadata names, and nothing else."""


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A part of a tensor, and the bytes of a file that hold it as torch.save writes a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class ShardedTensor(StoredTensor):
    """A tensor whose chunks are all of it, and overlap nowhere."""

    chunks: tuple[TensorChunk, ...]


def read_metadata(folder: Path) -> dict[str, ShardedTensor]:
    """The floating-point tensors of a checkpoint by the names that its trainer gave them.

    Raises `UsageError` for what is no such checkpoint, is damaged, or asks for more than a description.
    """
    path = folder / METADATA
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has over {MOST_BYTES >> 20} MiB")
        found = described(path.read_bytes(), METADATA_NAMES, MOST_STEPS)
        fields = _fields(found, "Metadata")
        places = dict(_place(index, info) for index, info in _mapping(fields.get("storage_data")).items())
        tensors = _mapping(fields.get("state_dict_metadata"))
        return {
            name: _tensor(name, _fields(entry, "TensorStorageMetadata"), places, folder)
            for name, entry in tensors.items()
            if isinstance(name, str)
            and isinstance(entry, PickledCall)
            and entry.name == f"{_META}TensorStorageMetadata"
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
    if not isinstance(made, PickledCall) or made.name.rpartition(".")[2] != kind:
        raise ValueError(f"there is no {kind} where one must be")
    return _mapping(made.state)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("there are no fields where some must be")
    return value


def _dtype(entry: PickledCall) -> torch.dtype | None:
    """The first of the properties, which are a tuple or, in older files, fields."""
    properties = _mapping(entry.state).get("properties")
    state = properties.state if isinstance(properties, PickledCall) else None
    named = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(named, PickledName):
        raise ValueError("a tensor has no dtype")
    found = getattr(torch, named.name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _sizes(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    if isinstance(value, PickledCall) and value.name == "torch.Size" and len(value.arguments) == 1:
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


def _tensor(name: str, fields: Mapping[str, Any], places: Mapping[Key, Place], folder: Path) -> ShardedTensor:
    shape, given = _sizes(fields.get("size")), fields.get("chunks")
    dtype = _dtype(PickledCall("", (), fields))
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
        chunks[offsets] = TensorChunk(offsets, sizes, folder / file, start, length)
    _check_cover(name, shape, list(chunks.values()))
    return ShardedTensor(shape, dtype, tuple(chunks.values()))


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[TensorChunk]) -> None:
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


WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod", "_forward_module", "module")
USUAL = frozenset({"model", "state_dict", "app", "module"})  # words of a prefix that say nothing
SHOWN = 3


def plain_name(name: str) -> str:
    """Without the names of wrappers, and with dots."""
    return ".".join(word for word in name.replace("/", ".").split(".") if word not in WRAPPERS)


def transformers_names(
    folder: str, stored: Collection[str], body: str, embedding: str, head: str | None
) -> Mapping[str, str]:
    """Of the tensors of one model its name in transformers, and the one that is stored.

    `body`: what transformers puts before the tensors of the model without its head ("model."); `embedding`: the tensor
    by which that is found ("embed_tokens.weight"); `head`: "lm_head", or None where it is called like the rest. Raises
    `UsageError` when no model or several are there.
    """
    names = {plain_name(name): name for name in sorted(stored, reverse=True)}
    begins = [name.removesuffix(embedding) for name in names if name == embedding or name.endswith(f".{embedding}")]
    begin = _chosen(folder, begins, embedding)
    above = begin.removesuffix(body) if begin == body or begin.endswith(f".{body}") else begin
    found = {body + name.removeprefix(begin): theirs for name, theirs in names.items() if name.startswith(begin)}
    for prefix in (begin, above) if head else ():
        for name, theirs in names.items():
            if name.startswith(f"{prefix}{head}."):
                found.pop(body + name.removeprefix(begin), None)
                found[name.removeprefix(prefix)] = theirs
    return found


def _chosen(folder: str, begins: list[str], embedding: str) -> str:
    """That of the model itself, where averages of it or other models lie beside it."""
    if not begins:
        raise UsageError(
            f"{folder} holds no tensor '{embedding}': it is no checkpoint of such a model. Give the base model that it "
            "was trained from, and save the state dict under transformers' names."
        )
    usual = [begin for begin in begins if set(begin.split(".")) - {""} <= USUAL] or sorted(begins)
    if len(usual) > 1:
        shown = ", ".join(f"'{begin}{embedding}'" for begin in usual[:SHOWN])
        raise UsageError(f"{folder} holds several models: {shown}. Save the one that is to be served by itself.")
    return usual[0]


STORAGES = {
    "torch.DoubleStorage": torch.float64,
    "torch.FloatStorage": torch.float32,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
}
STORAGE_NAMES = frozenset(STORAGES) | {"torch._utils._rebuild_tensor_v2", "collections.OrderedDict"}
LITTLE = b"little"  # the byte order
LOCAL_HEADER = struct.Struct("<4s5H3I2H")  # of a file in a zip archive


class DcpStore:
    """`names`: what a tensor is called here, and there."""

    def __init__(self, where: str, stored: Mapping[str, ShardedTensor], names: Mapping[str, str]) -> None:
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


def _values(file: Any, chunk: TensorChunk, dtype: torch.dtype) -> Tensor:
    """What the chunk holds. Raises `ValueError` for anything but a dense tensor of these sizes."""
    part = _FilePart(file, chunk.start, chunk.length)
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
    found = described(data, STORAGE_NAMES)
    if not isinstance(found, PickledCall) or not found.name.endswith("_rebuild_tensor_v2") or len(found.arguments) < 4:
        raise ValueError("it holds no plain tensor")
    storage, offset, shape, strides = found.arguments[:4]
    if not isinstance(storage, PickledReference) or not isinstance(storage.id, tuple) or len(storage.id) != 5:
        raise ValueError("it holds no values")
    _, kind, key, _, count = storage.id
    if not isinstance(kind, PickledName) or STORAGES.get(kind.name) != dtype or not isinstance(key, str):
        raise ValueError(f"its values are not {dtype}, as .metadata says")
    numbers = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (None,)
    if not all(type(number) is int and number >= 0 for number in numbers) or len(strides) != len(sizes):
        raise ValueError("its sizes are no numbers")
    if shape != sizes or count != prod(sizes):
        raise ValueError(f"it is {list(shape)}, and .metadata says {list(sizes)}")
    return key, offset, strides


def _begin(part: _FilePart, at: int) -> int:
    """Where the bytes of an archive's file begin, whose header is `at`."""
    part.seek(at)
    fields = LOCAL_HEADER.unpack(part.read(LOCAL_HEADER.size))
    if fields[0] != b"PK\x03\x04":
        raise ValueError("its archive names a place where no file is")
    return int(at + LOCAL_HEADER.size + fields[9] + fields[10])


def _fill(part: _FilePart, at: int, into: Tensor) -> None:
    values: Any = into.view(torch.uint8).numpy()
    rest = memoryview(values)
    part.seek(at)
    while rest:
        count = part.readinto(rest[: 1 << 30])
        if not count:
            raise ValueError("it ends within its values")
        rest = rest[count:]


class _FilePart(io.RawIOBase):
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


def is_dcp(path: Path) -> bool:
    return (path / METADATA).is_file()


def open_store(folder: Path, shape: Shape) -> DcpStore:
    """Its tensors under transformers' names. Raises `UsageError`."""
    stored = read_metadata(folder)
    own = names_of(shape.family)
    body, embedding = ("transformer.", "wte") if shape.family == "gpt2" else (own.prefix, own.embedding)
    head = None if own.head_within else HEAD.removesuffix(".weight")
    names = transformers_names(str(folder), stored.keys(), body, f"{embedding}.weight", head)
    return DcpStore(str(folder), stored, names)


def open_trained(folder: Path, base: Path, name: str, told: MaskHints = NO_HINTS) -> Checkpoint:
    """`folder` is the checkpoint, `base` a Hugging Face folder with the configuration and the tokenizer: its weights
    are not looked at. Raises `UsageError`.
    """
    if not base.is_dir():
        raise UsageError(f"there is no folder '{base}' of a base model. Give a Hugging Face folder: --base-model DIR.")
    return assembled(base, name, None, lambda shape: open_store(folder, shape), told)
