"""A checkpoint that is opened and checked but whose weights are not read yet, and digests of its tensors' bytes.

Digests are computed on all cores, and cached for as long as their file does not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gpuinfer.errors import UsageError
from gpuinfer.host.installation import user_cache_folder
from gpuinfer.host.machine import cores
from gpuinfer.text.checkpoint.gguf_file import GgufFile
from gpuinfer.text.checkpoint.memory_estimate import Estimate, estimate_memory, model_weight_bytes
from gpuinfer.text.checkpoint.tensor_layout import Gpt2Layout, RotaryLayout, Store, read_all_weights
from gpuinfer.text.text_options import WeightFormat
from gpuinfer.text.transformer import Shape, Weights

CHUNK_BYTES = 4 << 20
MOST_KEPT = 256  # files whose digests are kept
SETTLED_S = 2.0  # a file changed more recently than this may change again within one tick of its time stamp
FORMAT = f"sha256 of sha256 of chunks of {CHUNK_BYTES} bytes"

Digests = dict[str, bytes]


class DigestSource(NamedTuple):
    """`size` bytes. `read(start, length)` gives some of them, and is called in several threads at once."""

    size: int
    read: Callable[[int, int], Any]


def tensor_digests(sources: Mapping[str, DigestSource]) -> Digests:
    def leaf(source: DigestSource, at: int) -> bytes:
        return hashlib.sha256(source.read(at, min(CHUNK_BYTES, source.size - at))).digest()

    with ThreadPoolExecutor(cores(), "gpuinfer-digests") as pool:
        leaves = {
            name: [pool.submit(leaf, source, at) for at in range(0, source.size, CHUNK_BYTES)]
            for name, source in sources.items()
        }
        try:
            return {
                name: hashlib.sha256(b"".join(part.result() for part in parts)).digest()
                for name, parts in leaves.items()
            }
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def cached_digests(path: Path, names: Collection[str], compute: Callable[[], Digests]) -> Digests:
    """The digests of these tensors of a file: from the cache, if the file's size, times and inode are unchanged; else
    computed, and cached. If the cache cannot be written, the next run computes them again.
    """
    began, stamp = time.time(), _stamp(path)
    name = hashlib.sha256(str(path.resolve()).encode(errors="replace")).hexdigest()[:32]
    place = user_cache_folder() / "digests" / f"{name}.json"
    if stamp is None:
        return compute()
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        entry = json.loads(place.read_bytes())
        if entry["stamp"] == stamp:
            return {name: bytes.fromhex(entry["digests"][name]) for name in names}
    found = compute()
    if stamp == _stamp(path) and max(stamp["changed"], stamp["moved"]) / 1e9 < began - SETTLED_S:
        with contextlib.suppress(OSError):
            place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            draft = place.with_suffix(f".{os.getpid()}")
            draft.write_text(
                json.dumps({"stamp": stamp, "digests": {name: digest.hex() for name, digest in found.items()}})
            )
            draft.replace(place)
            entries = sorted(place.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
            for old in entries[:-MOST_KEPT]:
                old.unlink(missing_ok=True)
    return found


def _stamp(path: Path) -> dict[str, Any] | None:
    """What changes when the file's content does; None: there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    return {
        "format": FORMAT,
        "path": str(path.resolve()),
        "size": status.st_size,
        "changed": status.st_mtime_ns,
        "moved": status.st_ctime_ns,
        "node": [status.st_dev, status.st_ino],
    }


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


def settings_files(folder: Path) -> list[Path]:
    return [folder / name for name in SETTINGS if (folder / name).is_file()]


@dataclass(frozen=True)
class LanguageFiles:
    """Where a model's tokenizer comes from: exactly one of the first four."""

    folder: Path | None = None  # holds tokenizer.json, or vocab.json and merges.txt
    vocabulary: tuple[str, ...] | None = None  # token i is the i-th text
    bytes: bool = False  # token i is byte i; 256 ends an answer
    gguf: GgufFile | None = None  # holds tokens, merges and template as metadata
    template: str | None = None  # of chats, if there is nothing else to hold one
    separator: str | None = None  # of `vocabulary`: what stands between two tokens in a text; None: found by them


@dataclass(frozen=True)
class Checkpoint:
    name: str
    shape: Shape
    folder: Path | None  # None: built in, or a GGUF file
    dtype: str  # as stored: "bfloat16"
    layout: RotaryLayout | Gpt2Layout
    store: Store
    language: LanguageFiles
    settings: Sequence[Path] = ()  # files that affect the answers, besides the weights
    identity: bytes = b""  # of settings that are in no file of their own

    @cached_property
    def fingerprint(self) -> str:
        """32 hexadecimal digits of settings, tokenizer and weights, which are read unless their digests are cached. The
        folder's path and the division into shards do not matter. Raises `UsageError`.
        """
        digest = hashlib.sha256()

        def add(*pieces: bytes) -> None:
            for piece in pieces:
                digest.update(len(piece).to_bytes(8, "little"))
                digest.update(piece)

        for path in self.settings:
            try:
                with path.open("rb") as file:
                    add(path.name.encode(), hashlib.file_digest(file, "sha256").digest())
            except OSError as error:
                raise UsageError(f"cannot read {path}: {error.strerror}. Check its permissions.") from None
        if self.identity:
            add(self.identity)
        content = self.store.digests(self.store.tensors)
        for name in sorted(self.store.tensors):
            stored = self.store.tensors[name]
            add(f"{name} {stored.dtype} {list(stored.shape)}".encode(), content[name])
        return digest.hexdigest()[:32]

    def weights(self, dtype: torch.dtype, *, by_layer: bool = False) -> Weights:
        """All weights, copied from the file, matrices in `dtype`; `by_layer`: each layer is read on first access.
        Raises `UsageError` for a damaged file, at once or on that access.
        """
        return read_all_weights(self.store, self.layout, dtype, by_layer=by_layer)

    def weight_bytes(self, dtype: torch.dtype, quantised: WeightFormat | None = None, own: bool = False) -> int:
        """Bytes of all weights in a decoder that computes in `dtype`. Loads nothing."""
        return model_weight_bytes(self.layout, dtype, quantised, own)

    def estimate(
        self,
        slots: int,
        pages: int,
        length: int,
        dtype: torch.dtype,
        beside: int = 0,
        own: bool = False,
        quantised: WeightFormat | None = None,
    ) -> Estimate:
        """See `estimate_memory`. `beside`: bytes of adapters, which count as weights; `own`: our own kernels compute;
        `quantised`: what matrices are rounded to. Loads nothing.
        """
        weights = self.weight_bytes(dtype, quantised, own) + beside
        return estimate_memory(self.shape, weights, slots, pages, length, dtype, own)
