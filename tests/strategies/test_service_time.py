"""What a strategy learns of its backend's service time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.strategies.service_time import ServiceTime, size_class


def learnt(model, count, seed=2, most=64, times=1.0, known=None):
    """From batches of random sizes."""
    known, dice, sizes = known or ServiceTime(), random.Random(1), random.Random(seed)
    for _ in range(count):
        rows = sizes.randint(1, most)
        known.learn(rows, times * model.draw(rows, dice))
    return known


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3])
def test_a_line_is_found_through_noise_and_a_change_is_noticed_within_few_batches(jitter):
    model = ServiceModel(alpha=0.001, beta=0.01, jitter=jitter)
    known = learnt(model, 400)
    for rows in (1, 10, 30, 64):
        assert known.seconds(rows) == pytest.approx(model.seconds(rows), rel=0.05 + 0.6 * jitter)
    assert known.spread >= jitter
    dice = random.Random(9)
    late = sum(model.draw(rows, dice) > known.late(rows) for rows in (dice.randint(1, 64) for _ in range(2000)))
    assert late / 2000 < 0.1
    assert jitter == 0 or late / 2000 > 0.005, "one batch in twenty takes longer"
    for factor in (0.5, 2.0) if jitter < 0.2 else ():
        changed = learnt(model, 8, seed=3, known=learnt(model, 300), times=factor)
        for rows in (1, 32, 64):
            assert changed.seconds(rows) == pytest.approx(factor * model.seconds(rows), rel=0.25)


def test_a_step_is_known_on_both_sides():
    model = ServiceModel(alpha=0.00005, beta=0.002, step_rows=64, step_s=0.005)
    known = learnt(model, 600, most=128)
    assert [known.seconds(rows) for rows in (64, 70)] == pytest.approx([model.seconds(64), model.seconds(70)], rel=0.05)
    assert [known.better_below(rows) for rows in (40, 64, 65, 100)] == [40, 64, 64, 64]


@pytest.mark.parametrize("seconds", [1e-12, 0.01, 1e300, float("nan")])
def test_a_clock_that_has_not_moved_spoils_nothing(seconds):
    known = ServiceTime()
    for took, times in ((0.0, 20), (seconds, 100), (0.02, 100)):
        for _ in range(times):
            known.learn(4, took)
    assert known.seconds(4) == pytest.approx(0.02, rel=0.2)


@given(st.integers(1, 4096))
def test_sizes_end_at_powers_of_two_and_are_never_wider_than_a_quarter(rows):
    assert size_class(rows) <= size_class(rows + 1)
    if rows & (rows - 1) == 0:
        assert size_class(rows) < size_class(rows + 1)
    alike = [other for other in range(max(1, rows // 2), 2 * rows) if size_class(other) == size_class(rows)]
    assert max(alike) <= max(1.25 * min(alike), min(alike) + 1)


@given(st.lists(st.tuples(st.integers(1, 512), st.floats(0, 10)), max_size=60), st.floats(0, 5), st.integers(1, 512))
def test_whatever_is_learnt_times_stay_times(batches, limit, most):
    known = ServiceTime()
    for rows, seconds in batches:
        known.learn(rows, seconds)
    assert 0 <= known.fixed < 100
    assert 0 <= known.seconds(most) < 1000
    assert 0 <= known.rows_within(limit, most) <= most
    assert 1 <= known.better_below(most) <= most
    assert 0 <= known.unknown_below(most) < most + (most == 1)
