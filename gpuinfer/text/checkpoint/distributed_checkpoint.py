"""Checkpoints of torch.distributed.checkpoint: `.metadata`, a pickle that says which chunk of which tensor lies where
in the *.distcp files beside it. Everything but the weights comes from the base model's folder.
"""

from __future__ import annotations

import io
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
from gpuinfer.text.checkpoint.pickle_reader import FLOATS, PickledRecord, TensorStore, load_tensors, read_pickle
from gpuinfer.text.checkpoint.safetensors_folder import HEAD, assembled
from gpuinfer.text.checkpoint.tensor_layout import StoredTensor, names_of
from gpuinfer.text.transformer import Shape

METADATA, SUFFIX = ".metadata", ".distcp"
MOST_BYTES = 256 << 20
MOST_CHUNKS = 4096  # of one tensor: one per rank
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
"""All names in torch's own metadata."""


@dataclass(frozen=True, slots=True)
class TensorChunk:
    """A part of a tensor, and the bytes of the file that hold it, as torch.save writes them."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    path: Path
    start: int
    length: int


@dataclass(frozen=True)
class ShardedTensor(StoredTensor):
    """A tensor whose chunks cover it without overlap."""

    chunks: tuple[TensorChunk, ...]


def read_metadata(folder: Path) -> dict[str, ShardedTensor]:
    """The floating-point tensors of a checkpoint by the names that its trainer gave them.

    Raises `UsageError` for a folder that is no such checkpoint, is damaged, or names other classes than torch does.
    """
    path = folder / METADATA
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ValueError(f"it has over {MOST_BYTES >> 20} MiB")
        found = read_pickle(path.read_bytes(), METADATA_NAMES)
        fields = _fields(found, "Metadata")
        places = dict(_place(index, info) for index, info in _mapping(fields.get("storage_data")).items())
        tensors = _mapping(fields.get("state_dict_metadata"))
        return {
            name: _tensor(name, _fields(entry, "TensorStorageMetadata"), places, folder)
            for name, entry in tensors.items()
            if isinstance(name, str)
            and isinstance(entry, PickledRecord)
            and entry.name == f"{_META}TensorStorageMetadata"
            and _dtype(_mapping(entry.state)) in FLOATS
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
    if not isinstance(made, PickledRecord) or made.name.rpartition(".")[2] != kind:
        raise ValueError(f"there is no {kind} where one must be")
    return _mapping(made.state)


def _mapping(value: Any) -> Mapping[Any, Any]:
    if not isinstance(value, dict):
        raise ValueError("there are no fields where some must be")
    return value


def _dtype(fields: Mapping[str, Any]) -> torch.dtype | None:
    """The first of a tensor's properties, which are a tuple or, in older files, fields."""
    properties = fields.get("properties")
    state = properties.state if isinstance(properties, PickledRecord) else None
    named = state[0] if isinstance(state, tuple) and state else state.get("dtype") if isinstance(state, dict) else None
    if not isinstance(named, type) or not issubclass(named, PickledRecord):
        raise ValueError("a tensor has no dtype")
    found = getattr(torch, named.name.removeprefix("torch."), None)
    return found if isinstance(found, torch.dtype) else None


def _sizes(value: Any) -> tuple[int, ...]:
    """The numbers of a torch.Size."""
    if isinstance(value, PickledRecord) and value.name == "torch.Size" and len(value.arguments) == 1:
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
    dtype = _dtype(fields)
    if dtype is None or not isinstance(given, list) or not 1 <= len(given) <= MOST_CHUNKS:
        raise ValueError(f"tensor '{name[:80]}' has no proper list of chunks")
    chunks = {}
    for one in given:
        own = _fields(one, "ChunkStorageMetadata")
        offsets, sizes = _sizes(own.get("offsets")), _sizes(own.get("sizes"))
        place = places.get((name, offsets)) or places.get((name, ()))
        if place is None:
            raise ValueError(f"a chunk of tensor '{name[:80]}' has no file")
        file, start, length = place
        if not 0 <= length - prod(sizes) * dtype.itemsize <= OVERHEAD:
            raise ValueError(f"a chunk {list(sizes)} of tensor '{name[:80]}' cannot have {length} bytes")
        chunks[offsets] = TensorChunk(offsets, sizes, folder / file, start, length)
    _check_cover(name, shape, list(chunks.values()))
    return ShardedTensor(shape, dtype, tuple(chunks.values()))


def _check_cover(name: str, shape: tuple[int, ...], chunks: list[TensorChunk]) -> None:
    """Raises `ValueError` unless the chunks lie in the tensor, do not overlap and have as many values as the tensor."""
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
USUAL = frozenset({"model", "state_dict", "app", "module"})  # words in the prefix of the model itself
SHOWN = 3


def transformers_names(
    folder: str, stored: Collection[str], body: str, embedding: str, head: str | None
) -> Mapping[str, str]:
    """The stored name of each tensor of one model, by the tensor's name in transformers.

    `body`: the prefix in transformers of all tensors but the head ("model."); `embedding`: the tensor that shows the
    stored prefix ("embed_tokens.weight"); `head`: "lm_head", or None if the head has the prefix too. Raises
    `UsageError` if the checkpoint holds no such model, or several.
    """
    names = {}  # without wrappers, and with dots for slashes
    for name in sorted(stored, reverse=True):
        words = name.replace("/", ".").split(".")
        names[".".join(word for word in words if word not in WRAPPERS)] = name
    begins = [name.removesuffix(embedding) for name in names if name == embedding or name.endswith(f".{embedding}")]
    if not begins:
        raise UsageError(
            f"{folder} holds no tensor '{embedding}': it is no checkpoint of such a model. Give the base model that it "
            "was trained from, and save the state dict under transformers' names."
        )
    usual = [begin for begin in begins if set(begin.split(".")) - {""} <= USUAL] or sorted(begins)
    if len(usual) > 1:  # averages or other models are stored too
        shown = ", ".join(f"'{begin}{embedding}'" for begin in usual[:SHOWN])
        raise UsageError(f"{folder} holds several models: {shown}. Save the one that is to be served by itself.")
    (begin,) = usual
    above = begin.removesuffix(body) if begin == body or begin.endswith(f".{body}") else begin
    found = {body + name.removeprefix(begin): theirs for name, theirs in names.items() if name.startswith(begin)}
    for prefix in (begin, above) if head else ():
        for name, theirs in names.items():
            if name.startswith(f"{prefix}{head}."):
                found.pop(body + name.removeprefix(begin), None)
                found[name.removeprefix(prefix)] = theirs
    return found


class DcpStore:
    """The tensors of a checkpoint. `names`: stored names by names in transformers."""

    def __init__(self, where: str, stored: Mapping[str, ShardedTensor], names: Mapping[str, str]) -> None:
        self.where = where
        self.tensors = {name: stored[theirs] for name, theirs in names.items()}

    def read(self, name: str, into: Tensor) -> None:
        tensor = self.tensors[name]
        for chunk in tensor.chunks:
            place = into[tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.sizes, strict=True))]
            try:
                with chunk.path.open("rb") as file:
                    file.seek(chunk.start)
                    data = file.read(chunk.length)
                if len(data) != chunk.length:
                    raise ValueError("it ends within its values")
                found = load_tensors(io.BytesIO(data))
                if not isinstance(found, Tensor) or found.layout != torch.strided:
                    raise ValueError("it holds no plain tensor")
                if found.dtype != tensor.dtype or tuple(found.shape) != chunk.sizes:
                    own = f"{found.dtype} {list(found.shape)}"
                    raise ValueError(f"it is {own}, and .metadata says {tensor.dtype} {list(chunk.sizes)}")
                place.copy_(found)
            except OSError as error:
                raise UsageError(f"cannot read {chunk.path}: {error.strerror}. Copy all of the checkpoint.") from None
            except ValueError as error:
                raise UsageError(f"{chunk.path} is damaged at tensor '{name}': {error}. Copy it again.") from None

    def digests(self, names: Collection[str]) -> Digests:
        """Assembles one tensor after another."""
        found: Digests = {}
        for name in names:
            whole = torch.empty(self.tensors[name].shape, dtype=self.tensors[name].dtype)
            self.read(name, whole)
            found |= TensorStore(self.where, {name: whole}).digests([name])
        return found


def open_store(folder: Path, shape: Shape) -> DcpStore:
    """The tensors of a checkpoint under transformers' names. Raises `UsageError`."""
    stored = read_metadata(folder)
    own = names_of(shape.family)
    body, embedding = ("transformer.", "wte") if shape.family == "gpt2" else (own.prefix, own.embedding)
    head = None if own.head_within else HEAD.removesuffix(".weight")
    names = transformers_names(str(folder), stored.keys(), body, f"{embedding}.weight", head)
    return DcpStore(str(folder), stored, names)


def open_trained(folder: Path, base: Path, name: str, hints: MaskHints = NO_HINTS) -> Checkpoint:
    """`folder` is the checkpoint, `base` a Hugging Face folder with the configuration and the tokenizer. Weights of
    `base` are not read. Raises `UsageError`.
    """
    if not base.is_dir():
        raise UsageError(f"there is no folder '{base}' of a base model. Give a Hugging Face folder: --base-model DIR.")
    return assembled(base, name, None, lambda shape: open_store(folder, shape), hints)
