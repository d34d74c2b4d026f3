"""Other weights for a model that is at work: the same shape, newly trained."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import torch

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.assembly import Gpt2Layout, RotaryLayout, Store, check, read_weights
from gpuinfer.text.checkpoint.checkpoint import Checkpoint
from gpuinfer.text.checkpoint.family import Told, shape_of
from gpuinfer.text.checkpoint.folder import layout_for, open_shards, read_config, spare_of
from gpuinfer.text.checkpoint.safetensors import SafetensorsStore, read_header
from gpuinfer.text.checkpoint.trained import is_dcp, open_store
from gpuinfer.text.shape import Shape
from gpuinfer.text.weights import Weights

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
        _refuse_another(checkpoint.shape, shape_of(read_config(path), told=_told(checkpoint.shape)), path)
    store = open_store(path, checkpoint.shape) if is_dcp(path) else _store(path)
    layout = _layout(checkpoint, store)
    if layout.shape != checkpoint.shape:
        raise UsageError(
            f"the weights in {path} have a head of their own where the model's is its embedding, or the other way "
            "round. Save them as the model was saved."
        )
    check(store, layout, spare=spare_of(checkpoint.shape))
    return read_weights(store, layout, dtype)


def _told(shape: Shape) -> Told:
    """Mask and block stay what they are, whatever the other folder does not say of them."""
    return Told() if shape.masking is None else Told(shape.masking.mask_token, shape.masking.block)


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
