"""Which models of text are on this machine, how large each is, and what would serve it: from names, sizes, settings and
the headers of files. Neither numpy nor torch is imported, and no weights are read.

What is said of serving is what the settings alone tell: a model that is opened is checked to its last tensor.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from gpuinfer.errors import UsageError
from gpuinfer.text.hub_cache import cached_repositories, json_object_in
from gpuinfer.text.packaged_models import PACKAGED, packaged_files

Server = Literal["native", "transformers", "vllm", "none"]

NATIVE_TYPES = frozenset(("llama", "mistral", "ministral", "qwen2", "qwen3", "gpt2"))  # model_type
NATIVE_ARCHITECTURES = frozenset(
    ("LLaDAModelLM", "LLaDAMoEModelLM", "LLaDA2MoeModelLM", "DreamModel", "SDARForCausalLM")
)  # of diffusion models
NATIVE_GGUF = frozenset(("llama", "qwen2", "qwen3"))  # general.architecture
READ_GGUF = NATIVE_GGUF | {"gemma2", "gemma3", "granite", "olmo2", "phi3", "qwen2moe", "qwen3moe", "starcoder2"}
READ_QUANTISED = ("gptq", "awq", "fp8", "fbgemm_fp8", "compressed-tensors", "bitsandbytes")  # quant_method
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
OLDEST_TRANSFORMERS = 5
ATTENTION_INTERFACE = "ALL_ATTENTION_FUNCTIONS"  # in a family's file in transformers: attention may be replaced
MOST_DEPTH = 2  # folders between a given one and a model
MOST_FOLDERS = 10_000  # that are looked into
MOST_HEADER = 100 << 20  # bytes of a safetensors header
TEXT_KIND, FIRST_KEYS = 8, 8  # of GGUF: the type of texts; the architecture is among the first keys
MOST_TEXT = 4096


@dataclass(frozen=True, slots=True)
class ListedModel:
    """One model. `parameters` and `dtype` are None where they cannot be told from headers."""

    name: str  # as --model takes it
    source: str  # cache, folder, file or package
    path: str
    size: int  # bytes of its files
    family: str | None
    parameters: int | None
    dtype: str | None  # of most parameters
    server: Server
    reason: str = ""  # why it is not served, or not by a native decoder


def listed_models(folders: Collection[str]) -> list[ListedModel]:
    """Those of the Hugging Face cache, of installed packages, and in these folders and files.

    Raises `UsageError` for a folder that is not there.
    """
    found = []
    for model, snapshot in cached_repositories():
        one = listed_folder(snapshot.folder, model.name, "cache")
        if snapshot.lacks:
            why = f"lacks {snapshot.lacks[0]}{' and more' if snapshot.lacks[1:] else ''}: fetch it with --download"
            one = replace(one, server="none", reason=why)
        found.append(one)
    for name in PACKAGED:
        try:
            files = packaged_files(name)
        except UsageError:
            continue  # it is not installed
        found.append(replace(listed_file(files[0]), name=name, source="package", size=sum(map(_size_of, files))))
    for given in folders:
        path = Path(given).expanduser()
        if path.is_file():
            found.append(listed_file(path))
        elif path.is_dir():
            found += _models_below(path)
        else:
            raise UsageError(f"there is no folder '{given}'. Give one that holds models, or a GGUF file.")
    return found


def _models_below(folder: Path) -> Iterator[ListedModel]:
    """The folder itself where it is a model; else models and GGUF files in it and in its folders."""
    level, seen = [folder], 0
    for depth in range(MOST_DEPTH + 1):
        below: list[Path] = []
        for one in level:
            seen += 1
            if (one / "config.json").is_file():
                yield listed_folder(one, str(one), "folder")
                continue
            try:
                entries = sorted(one.iterdir())
            except OSError:
                continue
            yield from (listed_file(entry) for entry in entries if entry.suffix == ".gguf" and entry.is_file())
            if depth < MOST_DEPTH and seen < MOST_FOLDERS:
                below += [entry for entry in entries if not entry.name.startswith(".") and entry.is_dir()]
        level = below


def listed_folder(folder: Path, name: str, source: str) -> ListedModel:
    """A Hugging Face folder, or a snapshot of GGUF files alone."""
    files = [one for one in folder.iterdir() if one.is_file()]
    size = sum(map(_size_of, files))
    ggufs = sorted(one for one in files if one.suffix == ".gguf")
    if ggufs and not (folder / "config.json").is_file():
        first = listed_file(ggufs[0])
        more = f"{len(ggufs)} GGUF files: {name}/{ggufs[0].name} names one" if len(ggufs) > 1 else first.reason
        return replace(first, name=name, source=source, path=str(folder), size=size, reason=more)
    settings = json_object_in(folder / "config.json")
    weights = [one for one in files if one.suffix == ".safetensors"]
    parameters, dtype = _counted(weights)
    family = settings.get("model_type")
    server, reason = _server_of(settings, {one.suffix for one in files})
    kind = family if isinstance(family, str) else None
    return ListedModel(name, source, str(folder), size, kind, parameters, dtype, server, reason)


def listed_file(path: Path) -> ListedModel:
    """A GGUF file: its architecture, and no more."""
    kind = _gguf_architecture(path)
    server: Server = "native" if kind in NATIVE_GGUF else "transformers" if kind in READ_GGUF else "none"
    reason = "" if kind in READ_GGUF else f"a GGUF file of {kind}, which no decoder here reads"
    if kind is None:
        reason = "no GGUF file, or a damaged one"
    return ListedModel(str(path), "file", str(path), _size_of(path), kind, None, None, server, reason)


def _server_of(settings: Mapping[str, Any], suffixes: Collection[str]) -> tuple[Server, str]:
    """What serves a model of this config.json, and why no native decoder does."""
    kind, architectures = settings.get("model_type"), settings.get("architectures")
    names = [one for one in architectures if isinstance(one, str)] if isinstance(architectures, list) else []
    if not settings:
        return "none", "its config.json is missing, or cannot be read"
    if not {".safetensors", ".bin"} & {*suffixes}:
        return "none", "it has no weights"
    quantised = settings.get("quantization_config")
    method = quantised.get("quant_method", "in an unnamed way") if isinstance(quantised, Mapping) else None
    ours = kind in NATIVE_TYPES or any(one in NATIVE_ARCHITECTURES for one in names)
    mixed = kind in NATIVE_TYPES and any(settings.get(one) for one in EXPERTS)
    if ours and method in (None, *READ_QUANTISED) and not mixed:
        return "native", ""
    if settings.get("is_encoder_decoder") is True:
        return "none", "it is an encoder with a decoder"
    if names and not any(one.endswith(("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")) for one in names):
        return "none", f"it is a {names[0][:40]}, which writes no text"
    if not isinstance(kind, str):
        return "none", "its config.json does not say its model_type"
    reason = f"its weights are quantised ({str(method)[:20]})" if method is not None else f"its type is {kind[:40]}"
    if method is None and not ours and _known_to_transformers(kind):
        return "transformers", reason
    return _by_vllm(reason)


def _by_vllm(reason: str) -> tuple[Server, str]:
    if find_spec("vllm") is not None:
        return "vllm", f"{reason}: --backend vllm"
    return "none", f"{reason}; vLLM may serve it (--backend vllm), and is not installed"


@cache
def _known_to_transformers(kind: str) -> bool:
    """Whether the installed transformers has the family, with attention that can be replaced. Nothing of it is
    imported.
    """
    try:
        if int(version("transformers").partition(".")[0]) < OLDEST_TRANSFORMERS:
            return False
    except (PackageNotFoundError, ValueError):
        return False
    spec = find_spec("transformers")
    if spec is None or spec.origin is None:
        return False
    name = kind.replace("-", "_").removesuffix("_text")
    file = Path(spec.origin).parent / "models" / name / f"modeling_{name}.py"
    try:
        return ATTENTION_INTERFACE in file.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return False


def _counted(files: Collection[Path]) -> tuple[int | None, str | None]:
    """The parameters in safetensors files by their headers, and the dtype of most."""
    by_dtype: dict[str, int] = {}
    for file in files:
        try:
            with file.open("rb") as opened:
                (length,) = struct.unpack("<Q", opened.read(8))
                header: dict[str, Any] = json.loads(opened.read(length if length <= MOST_HEADER else 0))
            for name, entry in header.items():
                if name != "__metadata__":
                    by_dtype[entry["dtype"]] = by_dtype.get(entry["dtype"], 0) + math.prod(entry["shape"])
        except (OSError, ValueError, AttributeError, KeyError, TypeError, struct.error, RecursionError):
            return None, None
    if not by_dtype:
        return None, None
    return sum(by_dtype.values()), max(by_dtype, key=lambda one: by_dtype[one])


def _gguf_architecture(path: Path) -> str | None:
    """`general.architecture` where it is among the first keys, as programs write it; None where it is not."""
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                return None
            file.read(20)  # version, tensors, keys

            def text() -> bytes:
                (length,) = struct.unpack("<Q", file.read(8))
                if length > MOST_TEXT:
                    raise ValueError
                return file.read(length)

            for _ in range(FIRST_KEYS):
                key = text()
                (kind,) = struct.unpack("<I", file.read(4))
                if kind == TEXT_KIND:
                    value = text()
                    if key == b"general.architecture":
                        return value.decode("ascii")
                elif kind in (4, 5, 6):
                    file.read(4)
                elif kind in (10, 11, 12):
                    file.read(8)
                else:
                    return None
    except (OSError, ValueError, struct.error):
        return None
    return None


def _size_of(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError:
        return 0
