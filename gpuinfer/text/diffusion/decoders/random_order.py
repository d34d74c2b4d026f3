"""The schedule of LLaDA, in any order."""

from __future__ import annotations

from typing import Any

from gpuinfer.text.diffusion.deciding import Decision, UnmaskingDecoder, View, quota
from gpuinfer.text.diffusion.decoders.picking import best


class RandomOrder(UnmaskingDecoder):
    """Each step commits as many tokens as are due, whichever they are; the seed decides, at temperature 0 too. This is
    "random remasking" (Nie et al. 2025, LLaDA).
    """

    def decide(self, kept: Any, view: View) -> Decision:
        return Decision(best(view.uniform(), quota(view.masks, view.steps, view.step)))
