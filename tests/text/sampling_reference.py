"""Sampling in plain NumPy, as its definitions say it, and what the tests of sampling share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from gpuinfer.generation import Sampling
from gpuinfer.text.sampling import Sampler
from gpuinfer.text.sampling.torch_path import TorchPath

NO_TOKENS = np.zeros(0, np.int32)
PATHS = ("compiled", "torch")
KINDS = ("normal", "narrow", "ties", "equal", "few", "nothing", "NaN", "infinite", "huge", "tiny")  # of rows


def sampler(path: str = "compiled", slots: int = 4, vocabulary: int = 50, **given: object) -> Sampler:
    """A sampler on the processor that goes the compiled way, or that of other devices."""
    settings = {"seed": 7, "end_tokens": (0,), "threads": 1, **given}
    found = Sampler(slots, vocabulary, "cpu", **settings)
    if path == "torch":
        found._path = TorchPath(found._slots, vocabulary)
    return found


def draw(found: Sampler, logits: NDArray[np.float32], slots: Iterable[int] | None = None, masks=None):
    which = np.arange(len(logits)) if slots is None else np.array(list(slots))
    return found.draw(torch.from_numpy(np.array(logits, np.float32)), which.astype(np.int32), masks)


def row_of(kind: str, vocabulary: int, random: np.random.Generator) -> NDArray[np.float32]:
    """float32 [vocabulary], of a kind that is hard in its own way."""
    row = (random.standard_normal(vocabulary) * 2).astype(np.float32)
    some = random.integers(0, vocabulary, 3)
    if kind == "narrow":
        row *= np.float32(1e-6)
    elif kind == "ties":
        row = np.round(row)
    elif kind == "equal":
        row[:] = random.choice([0.0, 0.0, 3.5, -7.25])
        if not row.any():
            row[::2] = -0.0
    elif kind in ("few", "nothing"):
        held = row[some]
        row[:] = -np.inf
        row[some] = held if kind == "few" else -np.inf
    elif kind in ("NaN", "infinite"):
        row[some] = random.choice([np.nan, -np.nan]) if kind == "NaN" else np.inf
    elif kind == "huge":
        row *= np.float32(1e37)
    elif kind == "tiny":
        row *= np.float32(1e-42)
    return row


def mask_of(allowed: Iterable[int], vocabulary: int) -> NDArray[np.int32]:
    bits = np.zeros(-(-vocabulary // 32) * 32, np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def edited(
    logits: NDArray[np.float32], sampling: Sampling, prompt: Sequence[int], answer: Sequence[int], ends: Sequence[int]
) -> NDArray[np.float32]:
    """The logits after bias, penalties and min_tokens."""
    found = logits.astype(np.float32).copy()
    for token, bias in sampling.logit_bias.items():
        found[token] += np.float32(bias)
    for token in {*prompt, *answer} if sampling.repetition_penalty != 1 else set(answer):
        found[token] *= (
            np.float32(1) / np.float32(sampling.repetition_penalty)
            if found[token] > 0
            else np.float32(sampling.repetition_penalty)
        )
    for token in set(answer):
        found[token] -= np.float32(sampling.frequency_penalty) * np.float32(list(answer).count(token))
        found[token] -= np.float32(sampling.presence_penalty)
    if len(answer) < sampling.min_tokens:
        found[[*ends, *sampling.stop_token_ids]] = -np.inf
    return found


def probabilities(logits: NDArray[np.float32], temperature: float) -> NDArray[np.float64]:
    scaled = (logits.astype(np.float64) - logits.max()) / temperature
    return np.exp(scaled) / np.exp(scaled).sum()


def filtered(logits: NDArray[np.float32], sampling: Sampling) -> NDArray[np.float64]:
    """The distribution that is drawn from: temperature, then top-k, top-p, min-p, each over what the last one left."""
    chances = probabilities(logits, sampling.temperature)
    likeliest = np.argsort(-logits.astype(np.float64), kind="stable")  # the lowest token first among equals
    if sampling.top_k:
        chances[likeliest[sampling.top_k :]] = 0
        chances /= chances.sum()
    if sampling.top_p < 1:
        before = np.cumsum(chances[likeliest]) - chances[likeliest]
        chances[likeliest[before >= sampling.top_p]] = 0
        chances /= chances.sum()
    chances[chances < sampling.min_p * chances.max()] = 0
    return chances / chances.sum()
