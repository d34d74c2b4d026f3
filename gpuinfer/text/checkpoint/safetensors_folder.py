"""Opens a Hugging Face folder: its settings, its tokenizer, and the safetensors files with its weights.

Headers are checked before weights are read, and tensors are read straight into their destination.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import (
    Checkpoint,
    Digests,
    DigestSource,
    LanguageFiles,
    cached_digests,
    settings_files,
    tensor_digests,
)
from gpuinfer.text.checkpoint.config_keys import (
    TOKENIZERS,
    ConfigFields,
    elsewhere,
    quantisation_of,
    read_json,
    refuse_remote_code,
)
from gpuinfer.text.checkpoint.model_family import NO_HINTS, Biases, MaskHints, biases_of, shape_of
from gpuinfer.text.checkpoint.pickle_reader import TensorStore, load_tensors
from gpuinfer.text.checkpoint.quantised_store import dequantising
from gpuinfer.text.checkpoint.tensor_layout import Gpt2Layout, RotaryLayout, Store, StoredTensor, check_store, names_of
from gpuinfer.text.transformer import Shape

STAGING_BYTES = 16 << 20  # for what is cast as it is read
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
QUANTISED = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""How quantised weights are stored, and what belongs to them."""


@dataclass(frozen=True)
class TensorPlace(StoredTensor):
    path: Path
    start: int


def read_header(path: Path, *, quantised: bool = False) -> dict[str, TensorPlace]:
    """The floating-point tensors of a file by name; `quantised`: and those of whole numbers, and of eight bits.

    Raises `UsageError` for a file that is damaged or cut short, or holds quantised weights where they are not expected.
    """
    try:
        with safe_open(path, "pt"):  # checks that shapes, places and the file's size agree; places it does not tell
            pass
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}. Copy the whole model folder.") from None
    except (SafetensorError, ValueError) as error:
        raise damaged(path, str(error)) from None
    places = {}
    for name, entry in header.items():
        dtype = entry.get("dtype", "")
        known = DTYPES.get(dtype) or (QUANTISED.get(dtype) if quantised else None)
        if known is not None:
            start = 8 + length + entry["data_offsets"][0]
            places[name] = TensorPlace(tuple(entry["shape"]), known, path, start)
        elif name.endswith("weight") and dtype != "I64":
            missing = "" if quantised else ", and config.json has no quantization_config that says how"
            raise elsewhere(f"{path} holds quantised weights ({dtype}){missing}")
    return places


def damaged(path: Path, why: str) -> UsageError:
    return UsageError(f"{path} is damaged: {why}. Copy it again from where the model came.")


class SafetensorsStore:
    def __init__(self, where: str, tensors: Mapping[str, TensorPlace]) -> None:
        self.where, self.tensors = where, tensors

    def read(self, name: str, into: Tensor) -> None:
        place = self.tensors[name]
        try:
            with place.path.open("rb", buffering=0) as file:
                file.seek(place.start)
                if into.dtype == place.dtype:
                    _fill(file, into, place.path, name)
                    return
                flat = into.reshape(-1)
                staging = torch.empty(min(flat.numel(), STAGING_BYTES // place.dtype.itemsize), dtype=place.dtype)
                for start in range(0, flat.numel(), max(1, staging.numel())):
                    part = staging[: flat.numel() - start]
                    _fill(file, part, place.path, name)
                    flat[start : start + part.numel()].copy_(part)
        except OSError as error:
            raise UsageError(f"cannot read {place.path}: {error.strerror}. Is its disk still there?") from None

    def digests(self, names: Collection[str]) -> Digests:
        """Those of a whole file are kept until it changes."""

        def compute(path: Path, places: Mapping[str, TensorPlace]) -> Digests:
            try:
                with path.open("rb", buffering=0) as file:
                    return tensor_digests({name: source(file.fileno(), name, place) for name, place in places.items()})
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}. Is its disk still there?") from None

        def source(file: int, name: str, place: TensorPlace) -> DigestSource:
            def read(start: int, length: int) -> bytes:
                content = os.pread(file, length, place.start + start)  # lets threads share the open file
                if len(content) != length:
                    raise damaged(place.path, f"it ends within tensor '{name}'")
                return content

            return DigestSource(prod(place.shape) * place.dtype.itemsize, read)

        found: Digests = {}
        for path in sorted({self.tensors[name].path for name in names}):
            wanted = {name: self.tensors[name] for name in names if self.tensors[name].path == path}
            whole = len(wanted) == sum(place.path == path for place in self.tensors.values())
            computed = partial(compute, path, wanted)
            found |= cached_digests(path, wanted, computed) if whole else computed()
        return found


def _fill(file: Any, into: Tensor, path: Path, name: str) -> None:
    """Fill a tensor from the file, in several calls: one reads 2 GiB at most."""
    values: Any = into.reshape(-1).view(torch.uint8).numpy()
    rest = memoryview(values)
    while rest:
        count = file.readinto(rest[: 1 << 30])
        if not count:
            raise damaged(path, f"it ends within tensor '{name}'")
        rest = rest[count:]


WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHOWN = 3


PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
ENDINGS = (".safetensors", ".bin")


def open_shards(folder: Path, *, quantised: bool = False) -> Store:
    """The weights of a folder: safetensors files, files of torch.save with tensors alone, or both. `quantised`: as of
    `read_header`. Raises `UsageError` if there are none, one is missing, damaged, or would run code.
    """
    for whole in (WHOLE, PICKLED):
        if (folder / whole).is_file() and not (whole == PICKLED and (folder / INDEX).is_file()):
            return _open_shard(folder / whole, quantised)
    path = next((folder / name for name in (INDEX, PICKLED_INDEX) if (folder / name).is_file()), None)
    if path is None:
        raise UsageError(f"{folder} has neither {WHOLE} nor {INDEX}. Copy the whole model folder.")
    names = read_json(path).get("weight_map")
    if not isinstance(names, dict) or not names or not all(isinstance(file, str) for file in names.values()):
        raise UsageError(f"{path} has no weight_map from tensors to files. Copy it again from where the model came.")
    files = sorted(set(names.values()))
    for file in files:
        if Path(file).name != file or not file.endswith(ENDINGS):
            raise UsageError(f"{path} names '{file[:80]}', no file of weights in its own folder. Copy it again.")
    if missing := [file for file in files if not (folder / file).is_file()]:
        more = f" and {len(missing) - SHOWN} more" if len(missing) > SHOWN else ""
        raise UsageError(f"{folder} lacks {', '.join(missing[:SHOWN])}{more} of {len(files)} shards. Copy them too.")
    shards = {file: _open_shard(folder / file, quantised) for file in files}
    return JoinedStore(
        str(folder), {name: shards[file] for name, file in names.items() if name in shards[file].tensors}
    )


def _open_shard(path: Path, quantised: bool) -> Store:
    if path.suffix == ".safetensors":
        return SafetensorsStore(str(path.parent), dict(read_header(path, quantised=quantised)))
    try:
        content = load_tensors(path)
        if not isinstance(content, Mapping):
            raise ValueError("it holds no tensors by name")
    except ValueError as error:
        raise UsageError(
            f"cannot read {path}: {error}. Convert it where you trust it: python -c 'import transformers as t; "
            f't.AutoModelForCausalLM.from_pretrained("{path.parent}", dtype="auto").save_pretrained("{path.parent}")\''
        ) from None
    tensors = {
        name: tensor
        for name, tensor in content.items()
        if isinstance(tensor, Tensor) and (quantised or tensor.is_floating_point())
    }
    return TensorStore(str(path.parent), tensors)


class JoinedStore:
    """Tensors of several stores, each by its name."""

    def __init__(self, where: str, stores: Mapping[str, Store]) -> None:
        self.where, self._stores = where, stores
        self.tensors = {name: store.tensors[name] for name, store in stores.items()}

    def read(self, name: str, into: Tensor) -> None:
        self._stores[name].read(name, into)

    def digests(self, names: Collection[str]) -> Digests:
        found: Digests = {}
        for store in {id(one): one for one in map(self._stores.__getitem__, names)}.values():
            found |= store.digests([name for name in names if self._stores[name] is store])
        return found


HEAD = "lm_head.weight"


def open_folder(folder: Path, name: str, hints: MaskHints = NO_HINTS) -> Checkpoint:
    """Read settings and headers, and check them against each other. Raises `UsageError`."""
    settings = quantisation_of(ConfigFields(read_config(folder)))

    def weights(_: Shape) -> Store:
        if settings is None:
            return open_shards(folder)
        return dequantising(open_shards(folder, quantised=True), settings)

    return assembled(folder, name, folder, weights, hints)


def assembled(
    base: Path, name: str, folder: Path | None, open_weights: Callable[[Shape], Store], hints: MaskHints = NO_HINTS
) -> Checkpoint:
    """Configuration and tokenizer of `base`, and the weights that `open_weights` opens for the shape.

    `folder` is the one folder that holds all of them, or None. Raises `UsageError`.
    """
    config, others = read_config(base), [base / "generation_config.json", base / "tokenizer_config.json"]
    generation, tokenizer = (read_json(path) if path.is_file() else {} for path in others)
    shape = shape_of(config, generation, hints)
    if shape.family not in TOKENIZERS or tokenizer.get("tokenizer_class") != TOKENIZERS[shape.family]:
        refuse_remote_code(tokenizer, str(base / "tokenizer_config.json"))
    store = open_weights(shape)
    layout = layout_for(shape, biases_of(config), store)
    check_store(store, layout, spare=spare_tensors(shape))
    matrices = [str(one.dtype).removeprefix("torch.") for one in store.tensors.values() if len(one.shape) > 1]
    return Checkpoint(
        name=name,
        shape=layout.shape,
        folder=folder,
        settings=settings_files(base),
        dtype=max(set(matrices), key=matrices.count, default="float32"),  # the most frequent
        layout=layout,
        store=store,
        language=LanguageFiles(folder=base),
    )


def spare_tensors(shape: Shape) -> list[str]:
    """Tensors that a file may hold and that are not used: the head of a tied model."""
    names = names_of(shape.family)
    return list(dict.fromkeys([HEAD, *(names.head_of(prefix) for prefix in (names.prefix, ""))]))


def read_config(folder: Path) -> dict[str, Any]:
    if (folder / "config.json").is_file():
        return read_json(folder / "config.json")
    if (folder / "adapter_config.json").is_file():
        raise UsageError(f"{folder} is an adapter, not a whole model. Merge it into its base model and save that.")
    if files := sorted(folder.glob("*.pt")):
        raise UsageError(f"{folder} has no config.json. For a nanoGPT model: --checkpoint {files[0]}.")
    if files := sorted(folder.glob("*.gguf")):
        raise UsageError(f"{folder} has no config.json, but a GGUF file. Give the file itself: --model {files[0]}.")
    raise UsageError(f"{folder} has no config.json: it is no Hugging Face model folder. Check --model.")


def layout_for(shape: Shape, biases: Biases, store: Store) -> RotaryLayout | Gpt2Layout:
    """The layout with the names of this store: with the prefix or without, head and embedding tied or apart."""
    names = names_of(shape.family)
    prefix = "transformer." if shape.family == "gpt2" else names.prefix
    if not any(tensor.startswith(prefix) for tensor in store.tensors):
        prefix = ""
    gpt2 = shape.family == "gpt2"
    embedding, head = (f"{prefix}wte.weight", HEAD) if gpt2 else (names.embedding_of(prefix), names.head_of(prefix))
    only_head = shape.tied and embedding not in store.tensors and head in store.tensors
    if shape.tied and not only_head and tensors_differ(store, embedding, head):
        shape = replace(shape, tied=False)
    name = head if only_head else None
    if gpt2:
        return Gpt2Layout(shape, biases, prefix, embedding_name=name)
    return RotaryLayout(shape, biases, prefix, name, names)


def tensors_differ(store: Store, one: str, other: str) -> bool:
    """Whether both tensors are stored and differ. Then they are not tied for transformers either, whatever the config
    says.
    """
    if one not in store.tensors or other not in store.tensors:
        return False
    if store.tensors[one].dtype != store.tensors[other].dtype:
        return True
    content = store.digests([one, other])
    return content[one] != content[other]
