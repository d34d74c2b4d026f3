"""The built-in unmasking decoders, registered under the entry point group `gpuinfer.decoders` like those of third
parties.

`credit_decoder.py` is apart because it needs compiled code: this file imports neither torch nor Numba.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from gpuinfer import api
from gpuinfer.text.diffusion.unmasking_decoder import Decision, Need, UnmaskingDecoder, View, quota


def best(scores: NDArray[np.float64], count: int) -> NDArray[np.bool_]:
    """The `count` largest of scores [n], at least one and at most all; of equal ones those that come first."""
    chosen = np.zeros(len(scores), np.bool_)
    chosen[np.argsort(-scores, kind="stable")[: max(count, 1)]] = True
    return chosen


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
        edit: NDArray[np.bool_] | None = None
        if (edited := view.edited) is not None:
            edit = (edited.confidence > self.options.edit_threshold) & (edited.likeliest != edited.tokens)
        return Decision(commit if commit.sum() >= due else best(view.confidence, due), edit)


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


class Hierarchical(UnmaskingDecoder):
    """Commits of each run of masks the surest token if it is above `low_threshold`, all tokens above the threshold, and
    the surest of the block always. So runs are halved, as in divide and conquer (Ma et al. 2025, dInfer).
    """

    class Options(api.Options):
        low_threshold: float = Field(0.4, ge=0, le=1, description="confidence that the surest of a run must be above")

    default_threshold: ClassVar[float | None] = 0.9

    def decide(self, kept: Any, view: View) -> Decision:
        commit = best(view.confidence, 1) | (view.confidence > view.threshold)
        for run in runs(view.positions):
            surest = run.start + int(view.confidence[run].argmax())
            commit[surest] |= view.confidence[surest] > self.options.low_threshold
        return Decision(commit)


def runs(positions: NDArray[np.int32]) -> Iterator[slice]:
    """Where positions follow one another without a gap."""
    edges = [0, *(np.flatnonzero(np.diff(positions) != 1) + 1).tolist(), len(positions)]
    return (slice(start, end) for start, end in itertools.pairwise(edges) if end > start)


class LowConfidence(UnmaskingDecoder):
    """Each step commits as many tokens as are due, the surest ones; one even where nothing is due. This is
    "low-confidence remasking" (Nie et al. 2025, Large Language Diffusion Models).
    """

    def decide(self, kept: Any, view: View) -> Decision:
        return Decision(best(view.confidence, quota(view.masks, view.steps, view.step)))


class RandomOrder(UnmaskingDecoder):
    """Each step commits as many tokens as are due, whichever they are; the seed decides, at temperature 0 too. This is
    "random remasking" (Nie et al. 2025, LLaDA).
    """

    def decide(self, kept: Any, view: View) -> Decision:
        return Decision(best(view.uniform(), quota(view.masks, view.steps, view.step)))


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


@dataclass(slots=True)
class SmoothingState:
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

    def begin(self) -> SmoothingState:
        return SmoothingState()

    def blend(self, kept: SmoothingState, step: int) -> float:
        options = self.options
        return float(min(options.first + options.growth * max(kept.steps - 1, 0), options.most))

    def decide(self, kept: SmoothingState, view: View) -> Decision:
        threshold = max(1.0 - self.options.fall * kept.steps, view.threshold)
        kept.steps += 1
        return Decision(self.reaching(view, threshold))
