"""As many tokens at once as are sure enough for so many."""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from gpuinfer import api
from gpuinfer.text.diffusion.deciding import Decision, UnmaskingDecoder, View
from gpuinfer.text.diffusion.decoders.picking import best


class Factor(UnmaskingDecoder):
    """Commits the n surest tokens, for the largest n of which the least sure has a confidence of 1 - factor / (n + 1);
    at least one. So many are drawn independently nearly as if they were drawn together (Wu et al. 2025, Fast-dLLM).
    """

    class Options(api.Options):
        factor: float = Field(1.0, gt=0, description="larger: more tokens a step; of the room that n + 1 tokens share")

    def decide(self, kept: Any, view: View) -> Decision:
        surest = np.sort(view.confidence)[::-1]
        bounds = 1.0 - self.options.factor / np.arange(2, len(surest) + 2)
        return Decision(best(view.confidence, int((surest >= bounds).sum())))  # bounds only grow: none passes later
