"""Opens the checkpoint that a model's name means, and reads other weights of the same shape for a model that is at
work.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.built_in import BUILT_IN, open_builtin
from gpuinfer.text.checkpoint.checkpoint import Checkpoint
from gpuinfer.text.checkpoint.config_keys import ConfigFields
from gpuinfer.text.checkpoint.distributed_checkpoint import is_dcp, open_store, open_trained
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
from gpuinfer.text.checkpoint.tensor_layout import Gpt2Layout, RotaryLayout, Store, check_store, read_weights
from gpuinfer.text.text_options import no_such_model, path_kind
from gpuinfer.text.transformer import Shape, Weights


def open_checkpoint(spec: ModelSpec) -> Checkpoint:
    """Open what `spec` names: `weights` is a nanoGPT file, or a torch distributed checkpoint whose base model is
    `spec.arguments["base_model"]`; else `name` is a Hugging Face folder, or a built-in model.

    Settings and headers are read and checked, no weights. `spec.arguments["meta"]`: the alphabet of a nanoGPT model;
    "mask_token": of a diffusion model, which token the mask is. Raises `UsageError`.
    """
    told = _mask_hints(spec)
    checkpoint = _open(spec, told)
    _refuse_ignored_hints(checkpoint, told)
    return checkpoint


def _open(spec: ModelSpec, told: MaskHints) -> Checkpoint:
    meta, base = spec.arguments.get("meta"), spec.arguments.get("base_model")
    if spec.weights is not None and base is not None:
        return open_trained(Path(spec.weights), Path(base), spec.name, told)
    if spec.weights is not None:
        return open_nanogpt(Path(spec.weights), None if meta is None else Path(meta), spec.name)
    path, kind = path_kind(spec.name)
    if kind == "folder":
        return open_folder(path, spec.name, told)
    if kind == "file" and path.suffix in (".pt", ".pth"):
        return open_nanogpt(path, None if meta is None else Path(meta), spec.name)
    if kind == "file" and path.suffix == ".gguf":
        raise UsageError(f"{path}: GGUF files are not read. Give the original Hugging Face folder.")
    if kind == "file":
        raise UsageError(f"{path} is a file. Give the folder that it lies in, with its config.json and tokenizer.")
    if spec.name in BUILT_IN:
        return open_builtin(spec.name)
    raise no_such_model(spec.name, path, BUILT_IN)


def _mask_hints(spec: ModelSpec) -> MaskHints:
    """Raises `UsageError` for what can be no token."""
    given = ConfigFields({"mask_token": spec.arguments.get("mask_token")}, "the model's arguments")
    return MaskHints(given.integer("mask_token", least=0)) if given.has("mask_token") else MaskHints()


def _refuse_ignored_hints(checkpoint: Checkpoint, told: MaskHints) -> None:
    """Raises `UsageError` where a mask is told of, and there is none or the model knows better."""
    masking = checkpoint.shape.masking
    if told.mask_token is not None and (masking is None or masking.mask_token != told.mask_token):
        own = "goes from left to right and has none" if masking is None else f"knows its own, {masking.mask_token}"
        raise UsageError(f"--mask-token-id says which token the mask is, and '{checkpoint.name}' {own}. Leave it out.")


SHOWN = 3
NO_MATTER = ("end_tokens", "beginning_token", "tied")  # of a shape: the language's, and what the store itself tells


def read_other_weights(checkpoint: Checkpoint, place: str, dtype: torch.dtype) -> Weights:
    """The weights at `place` for the model that `checkpoint` opened: a folder with safetensors files, config.json or
    not, one such file, or a torch distributed checkpoint. Tokenizer and end tokens stay what they are.

    Raises `UsageError` for what is not there, is damaged, or belongs to a model of another shape.
    """
    if checkpoint.shape.layers == 0:
        raise UsageError(f"the model '{checkpoint.name}' has no weights that could be changed. Choose another.")
    path = Path(place).expanduser()
    if (path / "config.json").is_file():
        _refuse_another(checkpoint.shape, shape_of(read_config(path), told=_hints_of(checkpoint.shape)), path)
    store = open_store(path, checkpoint.shape) if is_dcp(path) else _store(path)
    layout = _layout(checkpoint, store)
    if layout.shape != checkpoint.shape:
        raise UsageError(
            f"the weights in {path} have a head of their own where the model's is its embedding, or the other way "
            "round. Save them as the model was saved."
        )
    check_store(store, layout, spare=spare_tensors(checkpoint.shape))
    return read_weights(store, layout, dtype)


def _hints_of(shape: Shape) -> MaskHints:
    """Mask and block stay what they are, whatever the other folder does not say of them."""
    return MaskHints() if shape.masking is None else MaskHints(shape.masking.mask_token, shape.masking.block)


def _store(path: Path) -> SafetensorsStore:
    if path.is_dir():
        return open_shards(path)
    if path.suffix == ".safetensors" and path.is_file():
        return SafetensorsStore(str(path), dict(read_header(path)))
    raise UsageError(f"there are no weights at {path}. Give a folder with safetensors files, or one such file.")


def _layout(checkpoint: Checkpoint, store: Store) -> RotaryLayout | Gpt2Layout:
    if checkpoint.shape.family == "nanogpt":
        return checkpoint.layout  # its tensors have one form
    return layout_for(checkpoint.shape, checkpoint.layout.biases, store)


def _refuse_another(own: Shape, other: Shape, path: Path) -> None:
    compared = [field.name for field in fields(Shape) if field.name not in NO_MATTER]
    differing = [name for name in compared if getattr(own, name) != getattr(other, name)]
    if differing:
        said = ", ".join(f"{name} {getattr(other, name)} instead of {getattr(own, name)}" for name in differing[:SHOWN])
        raise UsageError(f"the weights in {path} are of another model: {said}. Start it as a model of its own.")
