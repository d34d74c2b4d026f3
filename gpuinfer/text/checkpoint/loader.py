"""Opens the checkpoint that a model's name refers to, and reads new weights of the same shape for a running model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.built_in import BUILT_IN, open_builtin
from gpuinfer.text.checkpoint.checkpoint import Checkpoint
from gpuinfer.text.checkpoint.config_keys import FAMILIES, ConfigFields, is_native
from gpuinfer.text.checkpoint.distributed_checkpoint import METADATA, open_store, open_trained
from gpuinfer.text.checkpoint.gguf_file import open_gguf_file
from gpuinfer.text.checkpoint.gguf_model import is_native_gguf, open_gguf
from gpuinfer.text.checkpoint.gguf_transformers import open_gguf_with_transformers
from gpuinfer.text.checkpoint.model_family import MaskHints, shape_of
from gpuinfer.text.checkpoint.nanogpt import open_nanogpt
from gpuinfer.text.checkpoint.safetensors_folder import (
    SafetensorsStore,
    layout_for,
    open_folder,
    open_shards,
    read_config,
    read_header,
    spare_tensors,
)
from gpuinfer.text.checkpoint.tensor_layout import Store, check_store, read_all_weights
from gpuinfer.text.checkpoint.transformers_folder import TransformersCheckpoint, open_with_transformers
from gpuinfer.text.packaged_models import PACKAGED, packaged_files
from gpuinfer.text.text_options import DecoderChoice, no_such_model, path_kind
from gpuinfer.text.transformer import Shape


def open_checkpoint(spec: ModelSpec, decoder: DecoderChoice = None) -> Checkpoint:
    """Open what `spec` names: `weights` is a nanoGPT file, or a torch distributed checkpoint whose base model is
    `spec.arguments["base_model"]`; else `name` is a Hugging Face folder, a GGUF file, a model of an installed package,
    or a built-in one.

    Settings and headers are read and checked; weights are not read. `spec.arguments["meta"]`: the alphabet of a nanoGPT
    model; "mask_token": the mask's token id of a diffusion model. `decoder`: whose code is to compute it; None: ours
    where the family is native, else transformers' own. Raises `UsageError`.
    """
    given = ConfigFields({"mask_token": spec.arguments.get("mask_token")}, "the model's arguments")
    hints = MaskHints(given.integer("mask_token", least=0)) if given.has("mask_token") else MaskHints()
    checkpoint = _open(spec, hints, decoder)
    masking = checkpoint.shape.masking
    if hints.mask_token is not None and (masking is None or masking.mask_token != hints.mask_token):
        own = "goes from left to right and has none" if masking is None else f"knows its own, {masking.mask_token}"
        raise UsageError(f"--mask-token-id says which token the mask is, and '{checkpoint.name}' {own}. Leave it out.")
    return checkpoint


def _open(spec: ModelSpec, hints: MaskHints, decoder: DecoderChoice) -> Checkpoint:
    meta, base = spec.arguments.get("meta"), spec.arguments.get("base_model")
    if spec.weights is not None and base is not None:
        return open_trained(Path(spec.weights), Path(base), spec.name, hints)
    if spec.weights is not None:
        return open_nanogpt(Path(spec.weights), None if meta is None else Path(meta), spec.name)
    path, kind = path_kind(spec.name)
    if kind == "folder":
        return _open_here(path, spec.name, hints, decoder)
    if kind == "file" and path.suffix in (".pt", ".pth"):
        return open_nanogpt(path, None if meta is None else Path(meta), spec.name)
    if kind == "file" and path.suffix == ".gguf":
        return _open_gguf([path], spec.name, decoder)
    if kind == "file":
        raise UsageError(f"{path} is a file. Give the folder that it lies in, with its config.json and tokenizer.")
    if spec.name in PACKAGED:
        return _open_gguf(packaged_files(spec.name), spec.name, decoder)
    if spec.name in BUILT_IN:
        return open_builtin(spec.name)
    raise no_such_model(spec.name, path, [*BUILT_IN, *PACKAGED])


def _open_gguf(paths: Sequence[Path], name: str, decoder: DecoderChoice) -> Checkpoint:
    native = is_native_gguf(file := open_gguf_file(paths))
    if decoder == "native" and not native:
        raise _no_native(file.architecture)
    return open_gguf(file, name) if native and decoder != "transformers" else open_gguf_with_transformers(file, name)


def _no_native(kind: str) -> UsageError:
    return UsageError(
        f"no decoder of ours is for models of type '{kind[:40]}' ({', '.join(FAMILIES)} run in ours). Leave -B "
        "decoder=native out: transformers' own code computes the others."
    )


def _open_here(folder: Path, name: str, hints: MaskHints, decoder: DecoderChoice) -> Checkpoint:
    native = is_native(config := read_config(folder))
    if decoder == "native" and not native:
        raise _no_native(str(config.get("model_type")))
    if native and decoder != "transformers":
        return open_folder(folder, name, hints)
    return open_with_transformers(folder, name)


SHOWN = 3
NOT_COMPARED = ("end_tokens", "beginning_token", "tied")  # fields of a shape: the language's, and the store's


def read_other_weights(checkpoint: Checkpoint, place: str, dtype: torch.dtype) -> Any:
    """The weights at `place` for the model of `checkpoint`: a folder with safetensors files (config.json is optional),
    one such file, or a torch distributed checkpoint. Tokenizer and end tokens do not change.

    Raises `UsageError` if the weights are missing, damaged, or of a model of another shape.
    """
    if checkpoint.shape.layers == 0:
        raise UsageError(f"the model '{checkpoint.name}' has no weights that could be changed. Choose another.")
    path = Path(place).expanduser()
    if isinstance(checkpoint, TransformersCheckpoint):
        return checkpoint.model(dtype, path)
    if (path / "config.json").is_file():
        masking = checkpoint.shape.masking  # mask and block do not change, whatever the other folder lacks
        hints = MaskHints() if masking is None else MaskHints(masking.mask_token, masking.block)
        own, other = checkpoint.shape, shape_of(read_config(path), hints=hints)
        compared = [field.name for field in fields(Shape) if field.name not in NOT_COMPARED]
        differing = [name for name in compared if getattr(own, name) != getattr(other, name)]
        if differing:
            changed = ", ".join(
                f"{name} {getattr(other, name)} instead of {getattr(own, name)}" for name in differing[:SHOWN]
            )
            raise UsageError(f"the weights in {path} are of another model: {changed}. Start it as a model of its own.")
    store: Store
    if (path / METADATA).is_file():
        store = open_store(path, checkpoint.shape)
    elif path.is_dir():
        store = open_shards(path)
    elif path.suffix == ".safetensors" and path.is_file():
        store = SafetensorsStore(str(path), dict(read_header(path)))
    else:
        raise UsageError(f"there are no weights at {path}. Give a folder with safetensors files, or one such file.")
    layout = checkpoint.layout  # nanoGPT's tensors have one form
    if checkpoint.shape.family != "nanogpt":
        layout = layout_for(checkpoint.shape, checkpoint.layout.biases, store)
    if layout.shape != checkpoint.shape:
        raise UsageError(
            f"the weights in {path} have a head of their own where the model's is its embedding, or the other way "
            "round. Save them as the model was saved."
        )
    check_store(store, layout, spare=spare_tensors(checkpoint.shape))
    return read_all_weights(store, layout, dtype)
