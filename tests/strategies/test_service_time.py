"""What a strategy learns of its backend's service time."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.strategies.service_time import ServiceTime, size_class


def learnt(model, sizes, seed=1, times=1.0, known=None):
    known, dice = known or ServiceTime(), random.Random(seed)
    for rows in sizes:
        known.learn(rows, times * model.draw(rows, dice))
    return known


def spread_sizes(count, seed=2, most=64):
    dice = random.Random(seed)
    return [dice.randint(1, most) for _ in range(count)]


@pytest.mark.parametrize("jitter", [0.0, 0.1, 0.3])
def test_a_line_is_found_through_noise(jitter):
    model = ServiceModel(alpha=0.001, beta=0.01, jitter=jitter)
    known = learnt(model, spread_sizes(400))
    for rows in (1, 10, 30, 64):
        assert known.seconds(rows) == pytest.approx(model.seconds(rows), rel=0.05 + 0.6 * jitter)
    assert known.spread >= jitter


def test_one_batch_in_twenty_takes_longer_than_late():
    model = ServiceModel(alpha=0.001, beta=0.01, jitter=0.2)
    known, dice = learnt(model, spread_sizes(400)), random.Random(9)
    late = sum(model.draw(rows, dice) > known.late(rows) for rows in spread_sizes(2000, seed=5))
    assert 0.005 < late / 2000 < 0.1


def test_a_step_is_known_on_both_sides():
    model = ServiceModel(alpha=0.00005, beta=0.002, step_rows=64, step_s=0.005)
    known = learnt(model, spread_sizes(600, most=128))
    assert known.seconds(64) == pytest.approx(model.seconds(64), rel=0.05)
    assert known.seconds(70) == pytest.approx(model.seconds(70), rel=0.05)
    assert [known.better_below(rows) for rows in (40, 64, 65, 100)] == [40, 64, 64, 64]


@pytest.mark.parametrize("factor", [0.5, 2.0])
@pytest.mark.parametrize("jitter", [0.0, 0.1])
def test_everything_that_becomes_slower_or_faster_is_noticed_within_few_batches(factor, jitter):
    model = ServiceModel(alpha=0.001, beta=0.01, jitter=jitter)
    known = learnt(model, spread_sizes(300))
    learnt(model, spread_sizes(8, seed=3), known=known, times=factor)
    for rows in (1, 32, 64):
        assert known.seconds(rows) == pytest.approx(factor * model.seconds(rows), rel=0.25)


@pytest.mark.parametrize("seconds", [1e-12, 0.01, 1e300, float("nan")])
def test_a_clock_that_has_not_moved_spoils_nothing(seconds):
    known = ServiceTime()
    for _ in range(20):
        known.learn(4, 0.0)
    for _ in range(100):
        known.learn(4, seconds)
    for _ in range(100):
        known.learn(4, 0.02)
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
    fits = known.rows_within(limit, most)
    assert 0 <= fits <= most
    assert 1 <= known.better_below(most) <= most
    assert 0 <= known.unknown_below(most) < most + (most == 1)
