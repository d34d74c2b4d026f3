"""Opens a model in training: weights from a torch distributed checkpoint, all else from its base model's folder."""

from __future__ import annotations

from pathlib import Path

from gpuinfer.errors import UsageError
from gpuinfer.text.checkpoint.assembly import check
from gpuinfer.text.checkpoint.checkpoint import Checkpoint, LanguageFiles
from gpuinfer.text.checkpoint.dcp import METADATA, read_metadata
from gpuinfer.text.checkpoint.dcp_names import named_as
from gpuinfer.text.checkpoint.dcp_store import DcpStore
from gpuinfer.text.checkpoint.digests import settings_of
from gpuinfer.text.checkpoint.family import biases_of, shape_of
from gpuinfer.text.checkpoint.folder import HEAD, layout_for, optional, read_config, stored_dtype
from gpuinfer.text.checkpoint.keys import refuse_remote_code
from gpuinfer.text.shape import Shape


def is_dcp(path: Path) -> bool:
    return (path / METADATA).is_file()


def open_store(folder: Path, shape: Shape) -> DcpStore:
    """Its tensors under transformers' names. Raises `UsageError`."""
    stored = read_metadata(folder)
    body, embedding = ("transformer.", "wte.weight") if shape.family == "gpt2" else ("model.", "embed_tokens.weight")
    names = named_as(str(folder), stored.keys(), body, embedding, HEAD.removesuffix(".weight"))
    return DcpStore(str(folder), stored, names)


def open_trained(folder: Path, base: Path, name: str) -> Checkpoint:
    """`folder` is the checkpoint, `base` a Hugging Face folder with the configuration and the tokenizer: its weights
    are not looked at. Raises `UsageError`.
    """
    if not base.is_dir():
        raise UsageError(f"there is no folder '{base}' of a base model. Give a Hugging Face folder: --base-model DIR.")
    config = read_config(base)
    shape = shape_of(config, optional(base / "generation_config.json"))
    refuse_remote_code(optional(base / "tokenizer_config.json"), str(base / "tokenizer_config.json"))
    store = open_store(folder, shape)
    layout = layout_for(shape, biases_of(config), store)
    check(store, layout, spare=[HEAD])
    return Checkpoint(
        name=name,
        shape=layout.shape,
        folder=None,
        settings=settings_of(base),
        dtype=stored_dtype(store),
        layout=layout,
        store=store,
        language=LanguageFiles(folder=base),
    )
