"""Unmasking by credit: tokens that the model has preferred for several steps need less confidence."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gpuinfer.text.diffusion.cpu_scores import likeliest
from gpuinfer.text.diffusion.decoders import Threshold

Credits = dict[int, dict[int, float]]  # by position, then token; what is not there is 0


class Credit(Threshold):
    """Commits by threshold, after `weight` ln(1 + credit) has been added to the logits. In each step all credits of a
    mask fade by `fading`, and its likeliest token gains p^`power` (Wang et al. 2025, CreditDecoding). Credits are a
    row's own.
    """

    class Options(Threshold.Options):
        weight: float = Field(0.7, ge=0, description="of ln(1 + credit), added to a logit")
        power: float = Field(0.2, ge=0, description="of the likeliest token's probability, as it becomes credit")
        fading: float = Field(0.8, ge=0, le=1, description="of a credit that is left in the next step")

    def begin(self) -> Credits:
        return {}

    def adjust(self, kept: Credits, positions: NDArray[np.int32], logits: NDArray[np.float32]) -> None:
        tokens, chances = likeliest(logits)  # type: ignore[no-untyped-call]
        rows = list(zip(positions.tolist(), tokens.tolist(), chances.tolist(), strict=True))
        faded = {position: self._faded(kept.get(position, {})) for position, _, _ in rows}
        kept.clear()  # of what is no mask any more
        kept.update(faded)
        for row, (position, token, chance) in enumerate(rows):
            credits = kept[position]
            credits[token] = credits.get(token, 0.0) + chance**self.options.power
            for other, credit in credits.items():
                logits[row, other] += self.options.weight * math.log1p(credit)

    def _faded(self, credits: dict[int, float]) -> dict[int, float]:
        return {token: credit * self.options.fading for token, credit in credits.items()}
