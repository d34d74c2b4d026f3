"""The schedule of Dream: time runs from 1 to almost 0, and with it the share of masks."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gpuinfer import api
from gpuinfer.text.diffusion.deciding import Decision, Need, UnmaskingDecoder, View
from gpuinfer.text.diffusion.decoders.picking import best

NEEDS: Mapping[str, frozenset[Need]] = {"margin": frozenset({"margin"}), "entropy": frozenset({"entropy"})}


class Dream(UnmaskingDecoder):
    """From time t to time s a step commits the share 1 - s / t of the masks, rounded down, and the last one all that
    are left. Times lie evenly between 1 and `last_time` (Ye et al. 2025, Dream 7B). Which masks: by the probability of
    their token (Chang et al. 2022, MaskGIT), the margin to the second, or the least entropy.

    Steps in which nothing would be committed are left out: they would change nothing.
    """

    class Options(api.Options):
        algorithm: Literal["probability", "margin", "entropy"] = Field("entropy", description="measure of sureness")
        temperature: float = Field(0.0, ge=0, description="randomness in the order of masks; 0: the surest first")
        last_time: float = Field(1e-3, gt=0, lt=1, description="at which the schedule ends; it begins at 1")

    def __init__(self, options: api.Options | None = None) -> None:
        super().__init__(options)
        self.needs = NEEDS.get(self.options.algorithm, frozenset())

    def decide(self, kept: Any, view: View) -> Decision:
        scores = self._scores(view)
        if self.options.temperature:
            scores = scores / self.options.temperature + gumbel(view.uniform())
        return Decision(best(scores, due(view.masks, view.steps, self.options.last_time, len(scores))))

    def _scores(self, view: View) -> NDArray[np.float64]:
        if view.margin is not None and self.options.algorithm == "margin":
            return view.margin
        if view.entropy is not None and self.options.algorithm == "entropy":
            return -view.entropy
        return view.confidence


def gumbel(uniform: NDArray[np.float64]) -> NDArray[np.float64]:
    """Noise with which the n largest of scores are drawn like n without replacement, by e^score (Kool et al. 2019)."""
    return np.array([-math.log(-math.log(max(number, 1e-300))) for number in uniform.tolist()])


def due(masks: int, steps: int, last_time: float, left: int) -> int:
    """How many of the `left` masks go next, of a block that began with `masks`."""
    return schedule(masks, steps, last_time).get(left, 1)


@functools.lru_cache(maxsize=1024)
def schedule(masks: int, steps: int, last_time: float) -> Mapping[int, int]:
    """By the masks that are left, how many a step commits; of steps that commit any. However many steps there are, only
    those are looked at.
    """
    found: dict[int, int] = {}
    span, left, step = (1.0 - last_time) / steps, masks, 0
    while left:
        step = max(step, math.floor(1.0 / span - left) - 1)  # earlier shares are less than 1: left * span < time
        time = 1.0 - span * step
        share = left if step >= steps - 1 else int(left * (1.0 - (time - span) / time))
        if share > 0:
            found[left] = share
        left -= share
        step += 1
    return found
