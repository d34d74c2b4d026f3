"""Scores of masks in torch operations, for CUDA devices and to check the compiled kernels; and the flat arrays in which
the requests of many rows reach either.

Random numbers come from a counter, as in left-to-right sampling (`text/sampling/cpu_draw.py`): each step has a key that
follows from seed, key, sample and step, and under that key each position has its numbers. So no number depends on
other rows, nor on their steps.

Sums are of whole numbers, so that they do not depend on how a device groups them: e^(value - second) in units of 2^-44,
of all tokens but the best, where `second` is the largest of these. So a confidence near 1 is as exact as any other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.generation import Sampling
from gpuinfer.text.decoder.torch_batch import Uploads
from gpuinfer.text.sampling.cpu_draw import BROKEN, EMPTY, UNIT, philox_words
from gpuinfer.text.sampling.slot_settings import settings_of
from gpuinfer.text.sampling.torch_path import (
    Arrays,
    Pairs,
    WantedDraws,
    bits,
    columns_of,
    drawn,
    edited,
    first_of,
    pairs,
    to_host,
)

NOBODY = -1  # owner of logits that no row asks about
TOKENS, CHOICES = 0, 1  # what random numbers are for: to draw a token, to choose among masks
LOW_32 = 0xFFFFFFFF
ROW = np.dtype(
    [
        ("inverse", np.float32),  # 1 / temperature; 0: the likeliest token
        ("floor", np.float64),  # min-p, as a distance from the best logit
        ("top_p", np.float64),
        ("top_k", np.int64),
        ("min_tokens", np.int64),
        ("seed", np.uint64),
        ("key", np.uint64),  # of this step
        ("biases", np.int32),  # where its biases begin, and so those of the row before end
        ("stops", np.int32),  # likewise its stop tokens
    ],
    align=True,
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One row's masks in a step. `first`: the index of its first mask's logits; those of the others follow."""

    sampling: Sampling
    key: str  # names the prompt where random numbers are drawn; of no account where the sampling has a seed
    sample: int
    first: int
    positions: NDArray[np.int32]  # [k] in the answer, from 0
    step: int  # steps of this answer before this one


@dataclass(frozen=True, slots=True)
class FlatRequests:
    """All rows of a call. `rows` has one record more than there are rows: where the lists end."""

    owners: NDArray[np.int32]  # [n] whose each logits are; NOBODY
    positions: NDArray[np.int32]  # [n] in the owner's answer
    rows: NDArray[Any]  # [rows + 1] of ROW
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    stops: NDArray[np.int32]  # of each row, the model's end tokens among them; where `min_tokens` bars them


def flattened_requests(
    asked: Sequence[Asked], count: int, seed: int, ends: Sequence[int], hash_of: Any
) -> FlatRequests:
    """Of `count` logits. `seed`: the run's; `ends`: the model's end tokens; `hash_of`: 64 bits for a key."""
    owners, positions = np.full(count, NOBODY, np.int32), np.zeros(count, np.int32)
    rows = np.zeros(len(asked) + 1, ROW)
    ids, values, stops = list[int](), list[float](), list[int]()
    for number, row in enumerate(asked):
        place = slice(row.first, row.first + len(row.positions))
        owners[place], positions[place] = number, row.positions
        sampling = row.sampling
        inverse, floor, top_p, top_k, min_tokens = settings_of(sampling)[:5]
        own = sampling.seed is not None
        key = 0 if own and not sampling.keyed else hash_of(row.key)
        base = (sampling.seed if own else seed) or 0
        rows[number] = (inverse, floor, top_p, top_k, min_tokens, base & ((1 << 64) - 1), key, len(ids), len(stops))
        ids += sampling.logit_bias
        values += sampling.logit_bias.values()
        if min_tokens:
            stops += [*ends, *sampling.stop_token_ids]
    rows[-1]["biases"], rows[-1]["stops"] = len(ids), len(stops)
    rows["key"][:-1] = keys_of(asked, rows)
    lists = np.array(ids, np.int32), np.array(values, np.float32), np.array(stops, np.int32)
    return FlatRequests(owners, positions, rows, *lists)


def keys_of(asked: Sequence[Asked], rows: NDArray[Any]) -> NDArray[np.uint64]:
    """uint64 [rows]: the key of each row's step."""
    steps = np.array([row.step for row in asked], np.uint64)
    samples = np.array([row.sample & LOW_32 for row in asked], np.uint64)
    a, b, _, _ = philox_of(steps, samples, rows["key"][:-1], rows["seed"][:-1]).T
    keys: NDArray[np.uint64] = (a << np.uint64(32)) | b
    return keys


def units(positions: NDArray[np.int32], use: int, rows: NDArray[Any]) -> NDArray[np.float64]:
    """float64 [k] from 0 to under 1, for positions int32 [k] in the answers of `rows` [k], or [] of one row."""
    count = len(positions)
    keys, seeds = (np.broadcast_to(rows[name], count) for name in ("key", "seed"))
    a, b, _, _ = philox_of(positions.astype(np.uint64), np.full(count, use, np.uint64), keys, seeds).T
    numbers: NDArray[np.float64] = (((a >> np.uint64(5)) << np.uint64(26)) | (b >> np.uint64(6))) * UNIT
    return numbers


def philox_of(
    first: NDArray[np.uint64], second: NDArray[np.uint64], keys: NDArray[np.uint64], seeds: NDArray[np.uint64]
) -> NDArray[np.uint64]:
    """Four random 32-bit numbers for each, uint64 [n, 4]."""
    low, shift = np.uint64(LOW_32), np.uint64(32)
    words = np.stack([first, second, keys & low, keys >> shift, seeds & low, seeds >> shift], 1)
    found = np.zeros((len(words), 4), np.uint64)
    philox_words(words, found)
    return found


ROWS = 64  # at once: a vocabulary of 150,000 in float64 takes 80 MB of them
ONE_WEIGHT = 2.0**44  # of up to 2^18 tokens the sum is still an int64


@dataclass(frozen=True, slots=True)
class LogitSurvey:
    """Of each row: the likeliest token, its logit, the second's, and the sums that all else follows from; [rows]."""

    tokens: Tensor
    best: Tensor  # float64
    second: Tensor  # float64
    total: Tensor  # float64: Σ e^(value - best)
    entropy: Tensor  # float64, in nats


@torch.inference_mode()
def score_rows(logits: Tensor, flat: FlatRequests, mask: int, out: tuple[NDArray[Any], ...], uploads: Uploads) -> None:
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
class LogitPiece:
    """Some of the logits, as many as are scored at once."""

    wants: NDArray[Any]  # of ROW: those of their rows that draw tokens
    arrays: Arrays  # those of `torch_path.edits_of` that there are; `places`, and of rows that draw `drawn`, `columns`


def piece_of(flat: FlatRequests, places: NDArray[np.intp], vocabulary: int) -> LogitPiece:
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
    return LogitPiece(wants, {"places": places, **{name: array for name, array in found.items() if len(array)}})


def scores(logits: Tensor, wants: NDArray[Any], sent: Mapping[str, Tensor]) -> Tensor:
    """Tokens, confidence, margin and entropy of the logits of a piece: float64 [4, rows]. `sent`: its arrays."""
    given = logits.index_select(0, sent["places"]).float()
    broken = ~((given < torch.inf).all(1))
    values = edited(given, sent)
    sure = surveyed(values)
    tokens = sure.tokens
    if "drawn" in sent:
        at = sent["drawn"]
        wanted = WantedDraws.sent(sent["columns"].view(-1, len(at)), wants)
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


def surveyed(values: Tensor) -> LogitSurvey:
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
    return LogitSurvey(tokens, best.double(), second, total, total.log() + scale * (gap * mass + surprise) / total)


def whole_sum(weights: Tensor) -> Tensor:
    return (weights * ONE_WEIGHT).long().sum(1).double() / ONE_WEIGHT
