"""A checkpoint that has been opened and checked, and whose weights have not been read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from gpuinfer.text.checkpoint.assembly import Gpt2Layout, RotaryLayout, Store, read_weights
from gpuinfer.text.checkpoint.digests import fingerprint
from gpuinfer.text.checkpoint.estimate import Estimate, estimate
from gpuinfer.text.shape import Shape
from gpuinfer.text.weights import Weights


@dataclass(frozen=True)
class LanguageFiles:
    """What text and tokens of a model are made of: exactly one of the first three."""

    folder: Path | None = None  # holds tokenizer.json, or vocab.json and merges.txt
    characters: tuple[str, ...] | None = None  # token i is the i-th character
    bytes: bool = False  # token i is byte i; 256 ends an answer
    template: str | None = None  # of chats, where there is no folder that may hold one


@dataclass(frozen=True)
class Checkpoint:
    name: str
    shape: Shape
    folder: Path | None  # None: built in
    dtype: str  # as stored: "bfloat16"
    layout: RotaryLayout | Gpt2Layout
    store: Store
    language: LanguageFiles
    settings: Sequence[Path] = ()  # files that decide what is computed, beside the weights

    @cached_property
    def fingerprint(self) -> str:
        """Hexadecimal: of settings, tokenizer and all weights, which are read for it. Raises `UsageError`."""
        return fingerprint(self.store, self.settings)

    def weights(self, dtype: torch.dtype, *, by_layer: bool = False) -> Weights:
        """All weights in memory of their own, matrices in `dtype`; `by_layer`: a layer is read when it is asked for.
        Raises `UsageError` for a damaged file, then or now.
        """
        return read_weights(self.store, self.layout, dtype, by_layer=by_layer)

    def estimate(
        self, slots: int, pages: int, length: int, dtype: torch.dtype, beside: int = 0, own: bool = False
    ) -> Estimate:
        """See `estimate.estimate`. Loads nothing."""
        return estimate(self.layout, slots, pages, length, dtype, beside, own)

    def language_files(self) -> LanguageFiles:
        return self.language
