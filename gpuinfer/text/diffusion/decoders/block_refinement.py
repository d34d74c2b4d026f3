"""The schedule of LLaDA2: by threshold, at least what is due; and tokens that the model doubts by now are replaced."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gpuinfer import api
from gpuinfer.text.diffusion.deciding import Decision, Edited, UnmaskingDecoder, View, quota
from gpuinfer.text.diffusion.decoders.picking import best


class BlockRefinement(UnmaskingDecoder):
    """Commits what is above the threshold if that is at least what is due, else the surest that are due. With an
    `edit_threshold` tokens of the block give way to others that are above it, until a step after the last mask changes
    nothing. As LLaDA2.0 and LLaDA2.1 do (Bie et al. 2025).
    """

    class Options(api.Options):
        edit_threshold: float = Field(0.0, ge=0, le=1, description="confidence to replace a token with; 0: never")

    default_threshold: ClassVar[float | None] = 0.95

    def __init__(self, options: api.Options | None = None) -> None:
        super().__init__(options)
        self.edits = self.options.edit_threshold > 0

    def decide(self, kept: Any, view: View) -> Decision:
        commit = view.confidence > view.threshold
        due = max(quota(view.masks, view.steps, view.step), 1)
        edit = None if view.edited is None else self._doubted(view.edited)
        return Decision(commit if commit.sum() >= due else best(view.confidence, due), edit)

    def _doubted(self, edited: Edited) -> NDArray[np.bool_]:
        surer = edited.confidence > self.options.edit_threshold
        doubted: NDArray[np.bool_] = surer & (edited.likeliest != edited.tokens)
        return doubted
