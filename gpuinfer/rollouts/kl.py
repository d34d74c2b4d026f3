"""Divergence of the policy from its reference, and of the trainer's policy from the sampled one.

Log-probabilities are natural, one for each token that was drawn.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from msgspec import Struct
from numpy.typing import ArrayLike, NDArray

from gpuinfer.rollouts.record import Group, Trajectory

MOST_LOG_RATIO = 60.0  # e^60 is what a ratio counts for at most: beyond it a sum of others would be lost in it


class KlDivergence(Struct, frozen=True, kw_only=True):
    """KL(policy ‖ reference) for each token, estimated from tokens that the policy drew (Schulman 2020, "Approximating
    KL divergence"). With r = reference / policy: k1 = -log r, without bias but of either sign; k3 = (r - 1) - log r,
    without bias too, never negative, and of smaller variance.
    """

    tokens: int
    k1: float
    k3: float
    largest: float  # k3 of one token


class Drift(Struct, frozen=True, kw_only=True):
    """Importance ratios trainer / sampler of the same tokens. Were both the same policy, all were 1."""

    tokens: int
    mean: float
    largest: float
    effective: float  # the effective sample size (Kong 1992) as a share of the tokens: 1 when no ratio differs


def divergence(policy: ArrayLike, reference: ArrayLike) -> KlDivergence | None:
    """Of log-probabilities [tokens] of the same tokens; None of none. Raises `ValueError` for unlike lengths."""
    ratio = _log_ratio(reference, policy)
    if not ratio.size:
        return None
    k3 = np.expm1(np.minimum(ratio, MOST_LOG_RATIO)) - ratio
    return KlDivergence(
        tokens=int(ratio.size), k1=float(-ratio.mean()), k3=float(k3.mean()), largest=float(k3.max(initial=0.0))
    )


def drift(trainer: ArrayLike, sampler: ArrayLike) -> Drift | None:
    """Of log-probabilities [tokens] of the same tokens; None of none. Raises `ValueError` for unlike lengths."""
    ratio = _log_ratio(trainer, sampler)
    if not ratio.size:
        return None
    weights = np.exp(np.minimum(ratio, MOST_LOG_RATIO))
    scaled = np.exp(ratio - ratio.max())  # the share does not depend on the scale, and squares do not overflow so
    effective = float(scaled.sum() ** 2 / np.square(scaled).sum() / scaled.size)
    return Drift(
        tokens=int(ratio.size), mean=float(weights.mean()), largest=float(weights.max()), effective=min(1.0, effective)
    )


def from_reference(groups: Iterable[Group]) -> KlDivergence | None:
    """Of all trainable tokens whose reference was computed; None where none was.

    The policy's log-probabilities are those before temperature and filters, as the reference's are.
    """
    pairs = [
        (turn.policy_logprobs if turn.policy_logprobs is not None else turn.logprobs, turn.reference_logprobs)
        for trajectory in _trajectories(groups)
        for turn in trajectory.turns
        if turn.reference_logprobs is not None
    ]
    return divergence(_joined(policy for policy, _ in pairs), _joined(reference for _, reference in pairs))


def from_trainer(groups: Iterable[Group], logprobs: Mapping[str, Sequence[Sequence[float]]]) -> Drift | None:
    """How far the trainer's log-probabilities of turns are from those that the turns were drawn with; None without any.

    Raises `ValueError` that names a trajectory where the trainer counts turns or tokens otherwise.
    """
    pairs: list[tuple[Sequence[float], Sequence[float]]] = []
    for trajectory in _trajectories(groups):
        if (theirs := logprobs.get(trajectory.id)) is None:
            continue
        drawn = [turn.logprobs for turn in trajectory.turns]
        if [len(one) for one in theirs] != [len(one) for one in drawn]:
            raise ValueError(
                f"of {trajectory.id} the trainer tells {[len(one) for one in theirs]} log-probabilities in its turns, "
                f"and {[len(one) for one in drawn]} were drawn. Tell one for each completion token."
            )
        pairs += zip(theirs, drawn, strict=True)
    return drift(_joined(theirs for theirs, _ in pairs), _joined(drawn for _, drawn in pairs))


@dataclass(slots=True)
class AdaptiveKl:
    """A coefficient that keeps the divergence near a target: a log-space proportional controller (Ziegler et al. 2019,
    "Fine-Tuning Language Models from Human Preferences", section 2.2).

    A step of n games multiplies it by 1 + error · n / `horizon`, the error cut off at 0.2 either way; the paper's gain
    of 0.1 for each batch is a horizon of ten batches. Without a target it stays what it is.
    """

    target: float | None
    coefficient: float
    horizon: float = 10_000.0

    def update(self, divergence: float, games: int) -> float:
        """The coefficient after a step of so many games that had this divergence."""
        if self.target is not None and games and math.isfinite(divergence):
            error = min(0.2, max(-0.2, divergence / self.target - 1.0))
            self.coefficient *= max(0.0, 1.0 + error * games / self.horizon)
        return self.coefficient


def _log_ratio(over: ArrayLike, under: ArrayLike) -> NDArray[np.float64]:
    above, below = np.asarray(over, np.float64), np.asarray(under, np.float64)
    if above.shape != below.shape or above.ndim != 1:
        raise ValueError(f"log-probabilities of {above.shape} and of {below.shape} tokens cannot be compared")
    return above - below


def _joined(parts: Iterable[Sequence[float]]) -> list[float]:
    return list(itertools.chain.from_iterable(parts))


def _trajectories(groups: Iterable[Group]) -> Iterator[Trajectory]:
    for group in groups:
        for game in group.games:
            yield from (trajectory for trajectory in game.trajectories if trajectory.trainable)
