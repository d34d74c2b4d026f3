"""Masks that already hint at what they will become."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import Field

from gpuinfer.text.diffusion.deciding import Decision, View
from gpuinfer.text.diffusion.decoders.threshold import Threshold


@dataclass(slots=True)
class Made:
    """What is kept of a row: how many of its steps have decided, over all blocks."""

    steps: int = 0


class Smoothing(Threshold):
    """Commits by a threshold that falls from 1 to the given one, and adds to the embedding of a mask a part of what the
    model expects there, a little more each step. This is "iteration smoothing" (Ma et al. 2025, dInfer).
    """

    class Options(Threshold.Options):
        first: float = Field(0.15, ge=0, le=1, description="part that is added after the first step")
        growth: float = Field(0.02, ge=0, le=1, description="by which it grows each step")
        most: float = Field(0.3, ge=0, le=1, description="that it grows to")
        fall: float = Field(0.02, ge=0, le=1, description="of the threshold each step, from 1 to the given one")

    def begin(self) -> Made:
        return Made()

    def blend(self, kept: Made, step: int) -> float:
        options = self.options
        return float(min(options.first + options.growth * max(kept.steps - 1, 0), options.most))

    def decide(self, kept: Made, view: View) -> Decision:
        threshold = max(1.0 - self.options.fall * kept.steps, view.threshold)
        kept.steps += 1
        return Decision(self.reaching(view, threshold))
