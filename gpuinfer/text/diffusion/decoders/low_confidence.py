"""The schedule of LLaDA: each step commits as many tokens as are due, those that the model is most sure of."""

from __future__ import annotations

from typing import Any

from gpuinfer.text.diffusion.deciding import Decision, UnmaskingDecoder, View, quota
from gpuinfer.text.diffusion.decoders.picking import best


class LowConfidence(UnmaskingDecoder):
    """Each step commits as many tokens as are due, the surest ones; one even where nothing is due. This is
    "low-confidence remasking" (Nie et al. 2025, Large Language Diffusion Models).
    """

    def decide(self, kept: Any, view: View) -> Decision:
        return Decision(best(view.confidence, quota(view.masks, view.steps, view.step)))
