"""Scores of masks in torch operations: for CUDA devices, and a second opinion on the compiled kernels.

Sums are of whole numbers, so that they do not depend on how a device groups them: e^(value - second) in units of 2^-44,
of all tokens but the best, where `second` is the largest of these. So a confidence near 1 is as exact as any other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.decoder.torch_batch import Uploads
from gpuinfer.text.diffusion.asking import NOBODY, TOKENS, Flat, units
from gpuinfer.text.sampling.cpu_draw import BROKEN, EMPTY
from gpuinfer.text.sampling.torch_path import (
    Arrays,
    Pairs,
    Wanted,
    bits,
    columns_of,
    drawn,
    edited,
    first_of,
    pairs,
    to_host,
)

ROWS = 64  # at once: a vocabulary of 150,000 in float64 takes 80 MB of them
ONE_WEIGHT = 2.0**44  # of up to 2^18 tokens the sum is still an int64


@dataclass(frozen=True, slots=True)
class Sure:
    """Of each row: the likeliest token, its logit, the second's, and the sums that all else follows from; [rows]."""

    tokens: Tensor
    best: Tensor  # float64
    second: Tensor  # float64
    total: Tensor  # float64: Σ e^(value - best)
    entropy: Tensor  # float64, in nats


@torch.inference_mode()
def score_rows(logits: Tensor, flat: Flat, mask: int, out: tuple[NDArray[Any], ...], uploads: Uploads) -> None:
    """As `cpu_scores.score_rows`. `out`: tokens, confidence, margin, entropy. What the rows want goes to the device in
    one copy by `uploads`, and the host waits for it once.
    """
    if mask >= 0:
        logits[:, mask] = -torch.inf
    places = np.flatnonzero(flat.owners != NOBODY)
    pieces = [piece_of(flat, places[at : at + ROWS], logits.shape[1]) for at in range(0, len(places), ROWS)]
    if not pieces:
        return
    sent = iter(uploads.sent([array for piece in pieces for array in piece.arrays.values()]))
    parts = [scores(logits, piece.wants, {name: next(sent) for name in piece.arrays}) for piece in pieces]
    for array, values in zip(out, to_host(torch.cat(parts, 1)), strict=True):
        if len(array):
            array[places] = values


@dataclass(frozen=True, slots=True)
class Piece:
    """Some of the logits, as many as are scored at once."""

    wants: NDArray[Any]  # of ROW: those of their rows that draw tokens
    arrays: Arrays  # those of `torch_path.edits_of` that there are; `places`, and of rows that draw `drawn`, `columns`


def piece_of(flat: Flat, places: NDArray[np.intp], vocabulary: int) -> Piece:
    owners, positions = flat.owners[places], flat.positions[places]
    rows, entries = listed(flat.rows["biases"], owners)
    found = {"bias_at": rows * vocabulary + flat.bias_ids[entries], "bias_values": bits(flat.bias_values[entries])}
    early = np.flatnonzero(positions < flat.rows["min_tokens"][owners])
    rows, entries = listed(flat.rows["stops"], owners[early])
    found["barred_at"] = early[rows] * vocabulary + flat.stops[entries]
    at = np.flatnonzero(flat.rows["inverse"][owners] != 0)
    wants = flat.rows[owners[at]]
    if len(at):
        found |= {"drawn": at, "columns": columns_of(wants, units(positions[at], TOKENS, wants)).ravel()}
    return Piece(wants, {"places": places, **{name: array for name, array in found.items() if len(array)}})


def scores(logits: Tensor, wants: NDArray[Any], sent: Mapping[str, Tensor]) -> Tensor:
    """Tokens, confidence, margin and entropy of the logits of a piece: float64 [4, rows]. `sent`: its arrays."""
    given = logits.index_select(0, sent["places"]).float()
    broken = ~((given < torch.inf).all(1))
    values = edited(given, sent)
    sure = surveyed(values)
    tokens = sure.tokens
    if "drawn" in sent:
        at = sent["drawn"]
        wanted = Wanted.sent(sent["columns"].view(-1, len(at)), wants)
        found, _ = drawn(values.index_select(0, at), sure.best.index_select(0, at).float(), wanted)
        tokens = tokens.index_copy(0, at, found)
    own = values.gather(1, tokens[:, None]).squeeze(1).double()
    confidence = (own - sure.best).exp() / sure.total
    margin = (1 - (sure.second - sure.best).exp()) / sure.total
    tokens = tokens.masked_fill(sure.best == -torch.inf, EMPTY).masked_fill(broken, BROKEN)
    return torch.stack([tokens.double(), confidence, margin, sure.entropy])


def listed(starts: NDArray[np.int32], owners: NDArray[np.int32]) -> Pairs:
    """Of rows with these owners all entries of their lists: the row of each, and where it stands."""
    rows, places = pairs(starts[owners + 1] - starts[owners])
    return rows, starts[owners][rows] + places


def surveyed(values: Tensor) -> Sure:
    best = values.amax(1)
    tokens = first_of(values, best)
    rest = values.scatter(1, tokens[:, None], -torch.inf).double()
    second = rest.amax(1)
    below = (second[:, None] - rest).nan_to_num_(nan=torch.inf)  # where there is nothing but the best
    weights = (-below).exp()
    mass = whole_sum(weights)
    surprise = whole_sum((weights * below).nan_to_num_(nan=0.0))
    gap = (best.double() - second).nan_to_num_(nan=torch.inf, posinf=1e300)
    scale = (-gap).exp()
    total = 1 + scale * mass
    return Sure(tokens, best.double(), second, total, total.log() + scale * (gap * mass + surprise) / total)


def whole_sum(weights: Tensor) -> Tensor:
    return (weights * ONE_WEIGHT).long().sum(1).double() / ONE_WEIGHT
