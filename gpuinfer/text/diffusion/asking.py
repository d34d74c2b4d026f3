"""What a step asks of the logits of many rows' masks, as the flat arrays that kernels take.

Random numbers come from a counter, as when text goes from left to right (`text/sampling/cpu_draw.py`): those of one
step have a key of their own, which follows from seed, key, sample and step; under it each position has its numbers. So
nothing depends on company, nor on the steps that others have made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gpuinfer.generation import Sampling
from gpuinfer.text.sampling.cpu_draw import UNIT, philox_words
from gpuinfer.text.sampling.slots import settings_of

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
class Flat:
    """All rows of a call. `rows` has one record more than there are rows: where the lists end."""

    owners: NDArray[np.int32]  # [n] whose each logits are; NOBODY
    positions: NDArray[np.int32]  # [n] in the owner's answer
    rows: NDArray[Any]  # [rows + 1] of ROW
    bias_ids: NDArray[np.int32]
    bias_values: NDArray[np.float32]
    stops: NDArray[np.int32]  # of each row, the model's end tokens among them; where `min_tokens` bars them


def flat_of(asked: Sequence[Asked], count: int, seed: int, ends: Sequence[int], hash_of: Any) -> Flat:
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
        key = 0 if own else hash_of(row.key)
        base = (sampling.seed if own else seed) or 0
        rows[number] = (inverse, floor, top_p, top_k, min_tokens, base & ((1 << 64) - 1), key, len(ids), len(stops))
        ids += sampling.logit_bias
        values += sampling.logit_bias.values()
        if min_tokens:
            stops += [*ends, *sampling.stop_token_ids]
    rows[-1]["biases"], rows[-1]["stops"] = len(ids), len(stops)
    rows["key"][:-1] = keys_of(asked, rows)
    lists = np.array(ids, np.int32), np.array(values, np.float32), np.array(stops, np.int32)
    return Flat(owners, positions, rows, *lists)


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
