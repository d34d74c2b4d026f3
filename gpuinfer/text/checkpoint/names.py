"""What a model's name means."""

from __future__ import annotations

from pathlib import Path

from gpuinfer.api import ModelSpec
from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.builtin import BUILT_IN, open_builtin
from gpuinfer.text.checkpoint.checkpoint import Checkpoint
from gpuinfer.text.checkpoint.family import Told
from gpuinfer.text.checkpoint.folder import open_folder
from gpuinfer.text.checkpoint.keys import Fields
from gpuinfer.text.checkpoint.nanogpt import open_nanogpt
from gpuinfer.text.checkpoint.trained import open_trained
from gpuinfer.text.naming import absent, what_is


def open_checkpoint(spec: ModelSpec) -> Checkpoint:
    """Open what `spec` names: `weights` is a nanoGPT file, or a torch distributed checkpoint whose base model is
    `spec.arguments["base_model"]`; else `name` is a Hugging Face folder, or a built-in model.

    Settings and headers are read and checked, no weights. `spec.arguments["meta"]`: the alphabet of a nanoGPT model;
    "mask_token": of a diffusion model, which token the mask is. Raises `UsageError`.
    """
    told = _told(spec)
    checkpoint = _open(spec, told)
    _refuse_unheard(checkpoint, told)
    return checkpoint


def _open(spec: ModelSpec, told: Told) -> Checkpoint:
    meta, base = spec.arguments.get("meta"), spec.arguments.get("base_model")
    if spec.weights is not None and base is not None:
        return open_trained(Path(spec.weights), Path(base), spec.name, told)
    if spec.weights is not None:
        return open_nanogpt(Path(spec.weights), None if meta is None else Path(meta), spec.name)
    path, kind = what_is(spec.name)
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
    raise absent(spec.name, path, BUILT_IN)


def _told(spec: ModelSpec) -> Told:
    """Raises `UsageError` for what can be no token."""
    given = Fields({"mask_token": spec.arguments.get("mask_token")}, "the model's arguments")
    return Told(given.integer("mask_token", least=0)) if given.has("mask_token") else Told()


def _refuse_unheard(checkpoint: Checkpoint, told: Told) -> None:
    """Raises `UsageError` where a mask is told of, and there is none or the model knows better."""
    masking = checkpoint.shape.masking
    if told.mask_token is not None and (masking is None or masking.mask_token != told.mask_token):
        own = "goes from left to right and has none" if masking is None else f"knows its own, {masking.mask_token}"
        raise UsageError(f"--mask-token-id says which token the mask is, and '{checkpoint.name}' {own}. Leave it out.")
