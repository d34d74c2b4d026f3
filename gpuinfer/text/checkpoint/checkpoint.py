"""A checkpoint that is opened and checked but whose weights are not read yet, and digests of its tensors' bytes.

Digests are computed on all cores, and cached for as long as their file does not change.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import platformdirs
import torch

from gpuinfer.errors import UsageError
from gpuinfer.host.machine import cores
from gpuinfer.text.checkpoint.memory_estimate import Estimate, estimate_memory
from gpuinfer.text.checkpoint.tensor_layout import Gpt2Layout, RotaryLayout, Store, read_all_weights
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
    """The digest of each. Raises what `read` raises."""
    with ThreadPoolExecutor(cores(), "gpuinfer-digests") as pool:
        leaves = {
            name: [pool.submit(_leaf, source, at) for at in range(0, source.size, CHUNK_BYTES)]
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


def _leaf(source: DigestSource, at: int) -> bytes:
    return hashlib.sha256(source.read(at, min(CHUNK_BYTES, source.size - at))).digest()


def cached_digests(path: Path, names: Collection[str], compute: Callable[[], Digests]) -> Digests:
    """The digests of these tensors of a file: from the cache, if the file's size, times and inode are unchanged; else
    computed, and cached.
    """
    began, stamp = time.time(), _stamp(path)
    name = hashlib.sha256(str(path.resolve()).encode(errors="replace")).hexdigest()[:32]
    place = Path(platformdirs.user_cache_dir("gpuinfer")) / "digests" / f"{name}.json"
    if stamp is not None and (known := _known(place, stamp)).keys() >= set(names):
        return {name: known[name] for name in names}
    found = compute()
    if stamp is not None and stamp == _stamp(path) and max(stamp["changed"], stamp["moved"]) / 1e9 < began - SETTLED_S:
        _keep(place, {"stamp": stamp, "digests": {name: digest.hex() for name, digest in found.items()}})
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


def _known(place: Path, stamp: Mapping[str, Any]) -> Digests:
    try:
        entry = json.loads(place.read_bytes())
        if entry["stamp"] != stamp:
            return {}
        return {name: bytes.fromhex(digest) for name, digest in entry["digests"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def _keep(place: Path, entry: Mapping[str, Any]) -> None:
    """If the cache cannot be written, the next run computes the digests again."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = place.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(entry))
        draft.replace(place)
        entries = sorted(place.parent.glob("*.json"), key=lambda one: one.stat().st_mtime)
        for old in entries[:-MOST_KEPT]:
            old.unlink(missing_ok=True)


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


def checkpoint_fingerprint(store: Store, files: Iterable[Path]) -> str:
    """32 hexadecimal digits of the files and the weights, which are read unless their digests are cached.

    The folder's path and the division into shards do not matter.
    """
    digest = hashlib.sha256()
    for path in files:
        _add(digest, path.name.encode(), file_digest(path))
    content = store.digests(store.tensors)
    for name in sorted(store.tensors):
        stored = store.tensors[name]
        _add(digest, f"{name} {stored.dtype} {list(stored.shape)}".encode(), content[name])
    return digest.hexdigest()[:32]


def settings_files(folder: Path) -> list[Path]:
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


@dataclass(frozen=True)
class LanguageFiles:
    """Where a model's tokenizer comes from: exactly one of the first three."""

    folder: Path | None = None  # holds tokenizer.json, or vocab.json and merges.txt
    characters: tuple[str, ...] | None = None  # token i is the i-th character
    bytes: bool = False  # token i is byte i; 256 ends an answer
    template: str | None = None  # of chats, if there is no folder to hold one


@dataclass(frozen=True)
class Checkpoint:
    name: str
    shape: Shape
    folder: Path | None  # None: built in
    dtype: str  # as stored: "bfloat16"
    layout: RotaryLayout | Gpt2Layout
    store: Store
    language: LanguageFiles
    settings: Sequence[Path] = ()  # files that affect the answers, besides the weights

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal digest of settings, tokenizer and weights, which this reads. Raises `UsageError`."""
        return checkpoint_fingerprint(self.store, self.settings)

    def weights(self, dtype: torch.dtype, *, by_layer: bool = False) -> Weights:
        """All weights, copied from the file, matrices in `dtype`; `by_layer`: each layer is read on first access.
        Raises `UsageError` for a damaged file, at once or on that access.
        """
        return read_all_weights(self.store, self.layout, dtype, by_layer=by_layer)

    def estimate(
        self, slots: int, pages: int, length: int, dtype: torch.dtype, beside: int = 0, own: bool = False
    ) -> Estimate:
        """See `estimate_memory`. Loads nothing."""
        return estimate_memory(self.layout, slots, pages, length, dtype, beside, own)

    def language_files(self) -> LanguageFiles:
        return self.language
