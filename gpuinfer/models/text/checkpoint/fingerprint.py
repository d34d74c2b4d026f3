"""Tells one checkpoint from another: by its settings, its tokenizer, and all bytes of all its tensors."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from gpuinfer.errors import UsageError
from gpuinfer.models.text.checkpoint.store import Store

SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)


def fingerprint(store: Store, files: Iterable[Path]) -> str:
    """32 hexadecimal digits. All weights are read for it, unless they are known from before and unchanged.

    The folder's place and how the weights are cut into shards do not enter.
    """
    digest = hashlib.sha256()
    for path in files:
        _add(digest, path.name.encode(), file_digest(path))
    content = store.digests(store.tensors)
    for name in sorted(store.tensors):
        stored = store.tensors[name]
        _add(digest, f"{name} {stored.dtype} {list(stored.shape)}".encode(), content[name])
    return digest.hexdigest()[:32]


def settings_of(folder: Path) -> list[Path]:
    return [folder / name for name in SETTINGS if (folder / name).is_file()]


def file_digest(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}. Check its permissions.") from None


def _add(digest: hashlib._Hash, *pieces: bytes) -> None:
    for piece in pieces:
        digest.update(len(piece).to_bytes(8, "little"))
        digest.update(piece)
