"""What changes single logits before a token is drawn, in torch operations: see `cpu_edits`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.text.sampling.slots import Slots

Pairs = tuple[NDArray[np.int64], NDArray[np.int64]]  # (row, place in the list of the row's slot)


def edited(
    values: Tensor, slots: NDArray[np.int32], records: NDArray[Any], masks: NDArray[np.int32] | None, lists: Slots
) -> Tensor:
    """The logits as they count: float32 [rows, vocabulary], a copy where anything is to be changed."""
    early = records["drawn"] < records["min_tokens"]
    if masks is None and not (early.any() or records["biases"].any() or records["penalised"].any()):
        return values
    values = values.clone()
    add_biases(values, slots, records, lists)
    penalise(values, slots, records, lists)
    if masks is not None:
        values.masked_fill_(~allowed(torch.from_numpy(masks).to(values.device), values.shape[1]), -torch.inf)
    if early.any():
        bar_ends(values, slots, records, early, lists)
    return values


def add_biases(values: Tensor, slots: NDArray[np.int32], records: NDArray[Any], lists: Slots) -> None:
    rows, places = pairs(records["biases"])
    if len(rows):
        at = on(values, rows), on(values, lists.bias_ids.values[slots[rows], places].astype(np.int64))
        values[at] += on(values, lists.bias_values.values[slots[rows], places])


def penalise(values: Tensor, slots: NDArray[np.int32], records: NDArray[Any], lists: Slots) -> None:
    """See `cpu_edits.penalise`."""
    rows, places = pairs(records["seen"])
    if not len(rows):
        return
    at = on(values, rows), on(values, lists.seen_ids.values[slots[rows], places].astype(np.int64))
    counts = on(values, lists.seen_counts.values[slots[rows], places].astype(np.float32))
    repetition, presence, frequency = (
        on(values, records[name][rows]) for name in ("repetition", "presence", "frequency")
    )
    found = values[at]
    found = torch.where(found > 0, found / repetition, found * repetition)
    values[at] = torch.where(counts > 0, (found - frequency * counts) - presence, found)


def allowed(words: Tensor, vocabulary: int) -> Tensor:
    """bool [rows, vocabulary] from bits, int32 [rows, words]."""
    bits = torch.arange(32, dtype=torch.int32, device=words.device)
    return ((words[:, :, None] >> bits) & 1).bool().flatten(1)[:, :vocabulary]


def bar_ends(
    values: Tensor, slots: NDArray[np.int32], records: NDArray[Any], early: NDArray[np.bool_], lists: Slots
) -> None:
    """Take end and stop tokens away from early rows, but for those that would be left with nothing."""
    stop_rows, places = pairs(np.where(early, records["stops"], 0))
    stops = lists.stops.values[slots[stop_rows], places]
    early_rows = np.flatnonzero(early)
    rows = np.concatenate([stop_rows, np.repeat(early_rows, len(lists.ends))])
    at = on(values, rows), on(values, np.concatenate([stops, np.tile(lists.ends, len(early_rows))]).astype(np.int64))
    before = values[at]
    values[at] = -torch.inf
    emptied = (values.amax(1) == -torch.inf)[at[0]]
    values[at] = torch.where(emptied, before, -torch.inf)


def pairs(lengths: NDArray[Any]) -> Pairs:
    """Row and place of every entry of lists that are so long."""
    rows = np.repeat(np.arange(len(lengths)), lengths)
    starts = np.cumsum(lengths) - lengths
    return rows, np.arange(len(rows)) - np.repeat(starts, lengths)


def on(values: Tensor, array: NDArray[Any]) -> Tensor:
    """The array as a tensor beside the logits."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(values.device)
