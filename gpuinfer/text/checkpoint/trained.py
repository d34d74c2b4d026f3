"""Opens a model in training: weights from a torch distributed checkpoint, all else from its base model's folder."""

from __future__ import annotations

from pathlib import Path

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.checkpoint import Checkpoint
from gpuinfer.text.checkpoint.dcp import METADATA, read_metadata
from gpuinfer.text.checkpoint.dcp_names import named_as
from gpuinfer.text.checkpoint.dcp_store import DcpStore
from gpuinfer.text.checkpoint.family import NOTHING, Told
from gpuinfer.text.checkpoint.folder import HEAD, assembled
from gpuinfer.text.checkpoint.tensor_names import names_of
from gpuinfer.text.shape import Shape


def is_dcp(path: Path) -> bool:
    return (path / METADATA).is_file()


def open_store(folder: Path, shape: Shape) -> DcpStore:
    """Its tensors under transformers' names. Raises `UsageError`."""
    stored = read_metadata(folder)
    own = names_of(shape.family)
    body, embedding = ("transformer.", "wte") if shape.family == "gpt2" else (own.prefix, own.embedding)
    head = None if own.head_within else HEAD.removesuffix(".weight")
    names = named_as(str(folder), stored.keys(), body, f"{embedding}.weight", head)
    return DcpStore(str(folder), stored, names)


def open_trained(folder: Path, base: Path, name: str, told: Told = NOTHING) -> Checkpoint:
    """`folder` is the checkpoint, `base` a Hugging Face folder with the configuration and the tokenizer: its weights
    are not looked at. Raises `UsageError`.
    """
    if not base.is_dir():
        raise UsageError(f"there is no folder '{base}' of a base model. Give a Hugging Face folder: --base-model DIR.")
    return assembled(base, name, None, lambda shape: open_store(folder, shape), told)
