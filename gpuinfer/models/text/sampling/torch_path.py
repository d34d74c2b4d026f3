"""The way from logits to tokens in torch operations: for CUDA devices, and a second opinion on the compiled kernels.

Values in a total order, and weights in whole numbers, as `cpu_values` describes them: no result depends on how a device
groups its sums, nor on the other rows of a call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gpuinfer.models.text.sampling import cpu_edits, cpu_random, torch_filters
from gpuinfer.models.text.sampling.cpu_draw import BROKEN, EMPTY
from gpuinfer.models.text.sampling.slots import Slots
from gpuinfer.models.text.sampling.torch_edits import edited
from gpuinfer.models.text.sampling.torch_filters import Asked

ROWS = 64  # at once: filters take some tens of bytes for each logit


class TorchPath:
    """Draws and log-probabilities over logits on any device. One call at a time."""

    def __init__(self, slots: Slots, vocabulary: int) -> None:
        self._slots, self._vocabulary = slots, vocabulary

    @torch.inference_mode()
    def draw(self, logits: Tensor, slots: NDArray[np.int32], masks: NDArray[np.int32] | None) -> NDArray[np.int32]:
        """A token for each row, or BROKEN or EMPTY; noted in the slots."""
        parts = [
            self._some(logits[at : at + ROWS], slots[at : at + ROWS], None if masks is None else masks[at : at + ROWS])
            for at in range(0, len(slots), ROWS)
        ]
        tokens = torch.cat(parts).cpu().numpy().astype(np.int32) if parts else np.zeros(0, np.int32)
        cpu_edits.note_all(tokens, slots, self._slots.records, self._slots.lists())
        return tokens

    @torch.inference_mode()
    def logprobs(
        self, logits: Tensor, rows: NDArray[np.int64], chosen: NDArray[np.int32], wanted: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.float64], NDArray[np.int32]]:
        """Ranks, log-probabilities and likeliest tokens: see `cpu_logprobs.logprob_rows`."""
        most, parts = int(wanted.max(initial=0)), []
        for at in range(0, len(rows), ROWS):
            values = logits[torch.from_numpy(rows[at : at + ROWS]).to(logits.device)]
            tokens = torch.from_numpy(chosen[at : at + ROWS].astype(np.int64)).to(logits.device)
            parts.append(torch_filters.logprobs(values.float(), tokens, most))
        if not parts:
            return np.zeros(0, np.int64), np.zeros((0, 1)), np.zeros((0, 0), np.int32)
        ranks, found, likeliest = (torch.cat(part).cpu().numpy() for part in zip(*parts, strict=True))
        return ranks, found, likeliest

    def close(self) -> None:
        """Nothing to let go of."""

    def _some(self, logits: Tensor, slots: NDArray[np.int32], masks: NDArray[np.int32] | None) -> Tensor:
        """Tokens int64 [rows], for few enough rows."""
        values, records = logits.float(), self._slots.records[slots]
        broken = ~((values < torch.inf).all(1))
        values = edited(values, slots, records, masks, self._slots)
        best = values.amax(1)
        if (records["inverse"] == 0).all():
            tokens = torch_filters.first_of(values, best)
        else:
            tokens = self._mixed(values, best, slots, records)
        empty = tokens.new_tensor(EMPTY).where(best == -torch.inf, tokens)
        return tokens.new_tensor(BROKEN).where(broken, empty)

    def _mixed(self, values: Tensor, best: Tensor, slots: NDArray[np.int32], records: NDArray[Any]) -> Tensor:
        """Rows that take the likeliest token, and rows that draw, each by the cheapest way."""
        units = np.zeros(len(slots))
        cpu_random.units(self._slots.records, slots, units)
        tokens = torch.zeros(len(slots), dtype=torch.int64, device=values.device)
        sorts = ((records["top_k"] > 0) & (records["top_k"] < self._vocabulary)) | (records["top_p"] < 1)
        greedy = records["inverse"] == 0
        for chosen, way in ((greedy, "first"), (~greedy & sorts, "sort"), (~greedy & ~sorts, "draw")):
            if chosen.any():
                rows = torch.from_numpy(np.flatnonzero(chosen)).to(values.device)
                of_rows, best_of_rows = values[rows], best[rows]
                if way == "first":
                    tokens[rows] = torch_filters.first_of(of_rows, best_of_rows)
                else:
                    asked = Asked.of(records[chosen], units[chosen], values.device)
                    tokens[rows] = torch_filters.drawn(of_rows, best_of_rows, asked, way == "sort")
        return tokens
