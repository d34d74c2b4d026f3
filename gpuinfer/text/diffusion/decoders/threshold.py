"""All tokens that the model is sure enough of, in as few steps as that takes."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from gpuinfer import api
from gpuinfer.text.diffusion.deciding import Decision, UnmaskingDecoder, View, quota
from gpuinfer.text.diffusion.decoders.picking import best


class Threshold(UnmaskingDecoder):
    """Commits what has the threshold's confidence or more, and the surest token always (Wu et al. 2025).

    `least=quota`: where fewer reach it than a schedule without threshold would commit, as many as that (Cheng et al.
    2025, SDAR). `near`: what is so little below the surest goes with it, so that their place decides nothing between
    tokens that are as good as equal (Ma et al. 2025, dInfer: 0.00001).
    """

    class Options(api.Options):
        least: Literal["one", "quota"] = Field("one", description="tokens of a step in any case")
        near: float = Field(0.0, ge=0, le=1, description="confidence below the surest token's that counts as its")

    default_threshold: ClassVar[float | None] = 0.9

    def decide(self, kept: Any, view: View) -> Decision:
        return Decision(self.reaching(view, view.threshold))

    def reaching(self, view: View, threshold: float) -> Any:
        """bool [n]: what is committed with this threshold."""
        near = float(view.confidence.max(initial=0.0)) - self.options.near if self.options.near else 1.0
        commit = view.confidence >= min(threshold, near)
        due = quota(view.masks, view.steps, view.step) if self.options.least == "quota" else 1
        return commit if commit.sum() >= due else best(view.confidence, due)
