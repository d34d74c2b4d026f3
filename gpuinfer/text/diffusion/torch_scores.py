"""Scores of masks in torch operations: for CUDA devices, and a second opinion on the compiled kernels.

Sums are of whole numbers, so that they do not depend on how a device groups them: e^(value - second) in units of 2^-44,
of all tokens but the best, where `second` is the largest of these. So a confidence near 1 is as exact as any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.text.diffusion.asking import NOBODY, TOKENS, Flat, units
from gpuinfer.text.sampling.cpu_draw import BROKEN, EMPTY
from gpuinfer.text.sampling.torch_path import Pairs, Wanted, drawn, first_of, on, pairs

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
def score_rows(logits: Tensor, flat: Flat, mask: int, out: tuple[NDArray[Any], ...]) -> None:
    """As `cpu_scores.score_rows`. `out`: tokens, confidence, margin, entropy."""
    if mask >= 0:
        logits[:, mask] = -torch.inf
    places = np.flatnonzero(flat.owners != NOBODY)
    parts = [scores(logits, flat, places[at : at + ROWS]) for at in range(0, len(places), ROWS)]
    if parts:
        for array, values in zip(out, torch.cat(parts, 1).cpu().numpy(), strict=True):  # one way over for all of it
            if len(array):
                array[places] = values


def scores(logits: Tensor, flat: Flat, places: NDArray[np.intp]) -> Tensor:
    """Tokens, confidence, margin and entropy of some of the logits: float64 [4, rows]."""
    given = logits[on(logits, places)].float()
    broken = ~((given < torch.inf).all(1))
    values = edited(given, flat, places)
    sure = surveyed(values)
    tokens = sampled(values, sure, flat, places)
    own = values.gather(1, tokens[:, None]).squeeze(1).double()
    confidence = (own - sure.best).exp() / sure.total
    margin = (1 - (sure.second - sure.best).exp()) / sure.total
    tokens = tokens.masked_fill(sure.best == -torch.inf, EMPTY).masked_fill(broken, BROKEN)
    return torch.stack([tokens.double(), confidence, margin, sure.entropy])


def edited(values: Tensor, flat: Flat, places: NDArray[np.intp]) -> Tensor:
    """The logits as they count, a copy where anything is to be changed."""
    if not flat.edited:
        return values
    values, owners = values.clone(), flat.owners[places]
    rows, entries = listed(flat.rows["biases"], owners)
    biased = on(values, rows), on(values, flat.bias_ids[entries].astype(np.int64))
    values[biased] += on(values, flat.bias_values[entries])
    early = np.flatnonzero(flat.positions[places] < flat.rows["min_tokens"][owners])
    rows, entries = listed(flat.rows["stops"], owners[early])
    values[on(values, early[rows]), on(values, flat.stops[entries].astype(np.int64))] = -torch.inf
    return values


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


def sampled(values: Tensor, sure: Sure, flat: Flat, places: NDArray[np.intp]) -> Tensor:
    """The tokens, int64 [rows]: drawn for those that have a temperature."""
    records = flat.rows[flat.owners[places]]
    rows = np.flatnonzero(records["inverse"] != 0)
    if not len(rows):
        return sure.tokens
    wants = records[rows]
    wanted = Wanted.of(wants, units(flat.positions[places[rows]], TOKENS, wants), values.device)
    at, tokens = on(values, rows), sure.tokens.clone()
    tokens[at], _ = drawn(values[at], sure.best[at].float(), wanted)
    return tokens
