"""Divergences against what they are by definition, and the controller of their coefficient."""

import math

import numpy as np
import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from played import game, trajectory, turn

from gpuinfer.rollouts.kl import AdaptiveKl, divergence, drift, from_reference, from_trainer
from gpuinfer.rollouts.record import Group

DISTRIBUTION = st.lists(st.floats(0.01, 1.0), min_size=4, max_size=4).map(lambda xs: np.array(xs) / sum(xs))


def made(*turns, **more):
    return Group(id="0", number=0, environment="toy", games=(game(trajectory(*turns, **more)),))


@settings(max_examples=examples(100), deadline=None)
@given(DISTRIBUTION, DISTRIBUTION)
@pytest.mark.property
def test_both_estimators_have_the_divergence_as_their_expectation(policy, reference):
    """Each token as often as the policy draws it: the means are weighted, so tokens are repeated by share."""
    exact = float((policy * np.log(policy / reference)).sum())
    one_by_one = [divergence([math.log(p)], [math.log(r)]) for p, r in zip(policy, reference, strict=True)]
    assert sum(p * one.k1 for p, one in zip(policy, one_by_one, strict=True)) == pytest.approx(exact, abs=1e-9)
    assert sum(p * one.k3 for p, one in zip(policy, one_by_one, strict=True)) == pytest.approx(exact, abs=1e-9)
    assert all(one.k3 >= 0 for one in one_by_one)


@settings(max_examples=examples(100), deadline=None)
@given(DISTRIBUTION, DISTRIBUTION)
@pytest.mark.property
def test_the_mean_importance_ratio_is_one_in_expectation(sampler, trainer):
    ratios = [drift([math.log(t)], [math.log(s)]).mean for t, s in zip(trainer, sampler, strict=True)]
    assert sum(s * ratio for s, ratio in zip(sampler, ratios, strict=True)) == pytest.approx(1.0)


def test_divergence_and_drift_at_the_edges():
    same = [-0.5, -3.0, -0.01]
    assert structs.astuple(divergence(same, same)) == (3, 0.0, 0.0, 0.0)
    moved = drift(same, same)
    assert (moved.mean, moved.largest, moved.effective) == (1.0, 1.0, 1.0)
    assert drift([0.0, -50.0, -50.0, -50.0], [-1.0] * 4).effective == pytest.approx(0.25)  # one outweighs all others
    assert drift([-0.1, -2000.0], [-2000.0, -0.1]).effective == pytest.approx(0.5)  # nothing overflows
    assert math.isfinite(divergence([-1000.0, -1.0], [-0.1, -2000.0]).k3)
    assert (divergence([], []), drift([], [])) == (None, None)
    with pytest.raises(ValueError, match="cannot be compared"):
        divergence([-1.0], [-1.0, -2.0])


def test_the_reference_is_compared_with_the_policy_before_temperature_and_filters():
    plain = turn(logprobs=(-1.0,), reference=(-1.5,))
    heated = turn(logprobs=(-9.0,), policy=(-1.0,), reference=(-1.5,))
    without = turn(logprobs=(-4.0,))
    assert from_reference([made(plain, heated, without)]).k1 == pytest.approx(0.5)
    assert from_reference([made(plain, heated, without)]).tokens == 2
    assert from_reference([made(without)]) is None
    assert from_reference([made(plain, trainable=False)]) is None


def test_the_trainers_logprobs_are_held_against_the_sampled_ones():
    played = made(turn(logprobs=(-1.0, -2.0)), turn(logprobs=(-3.0,)), id="0/0/a")
    assert from_trainer([played], {}) is None
    found = from_trainer([played], {"0/0/a": [[-1.0, -2.0], [-3.0 + math.log(4)]]})
    assert (found.tokens, found.largest) == (3, pytest.approx(4.0))
    with pytest.raises(ValueError, match=r"0/0/a the trainer tells \[2\] .* \[2, 1\] were drawn"):
        from_trainer([played], {"0/0/a": [[-1.0, -2.0]]})


def test_the_coefficient_moves_against_the_error_and_keeps_the_target():
    """Ziegler et al. 2019: an error of at most 0.2, times a gain of 0.1 a batch, which is a horizon of ten batches."""
    for seen, factor in ((6.0, 1.0), (6.3, 1.005), (60.0, 1.02), (0.0, 0.98), (math.nan, 1.0)):
        assert AdaptiveKl(6.0, 0.2, horizon=640).update(seen, 64) == pytest.approx(0.2 * factor)
    assert AdaptiveKl(None, 0.05).update(3.0, 1000) == 0.05
    controller = AdaptiveKl(0.5, 0.01, horizon=100)
    for _ in range(2000):
        controller.update(1 / controller.coefficient, 10)  # a divergence that falls as its coefficient grows
    assert 1 / controller.coefficient == pytest.approx(0.5, rel=0.01)
