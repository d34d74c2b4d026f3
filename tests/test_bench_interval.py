"""Intervals from a handful of runs hold what they promise."""

import math
import random
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.lab.bench.measurement import interval, ratio, ratio_of_turns

speeds = st.floats(0.1, 1e7)


@given(st.lists(speeds, min_size=2, max_size=20))
def test_the_median_lies_within_its_interval(values):
    found = interval(values)
    assert found.median == median(values)
    assert found.low <= found.median * (1 + 1e-9)
    assert found.high >= found.median * (1 - 1e-9)


@pytest.mark.parametrize("n", [2, 3, 5, 6, 9, 20])
def test_the_interval_holds_the_truth_in_95_of_100_series(n):
    noise = random.Random(n)
    series = 4000
    held = sum(interval([100 * math.exp(noise.gauss(0, 0.1)) for _ in range(n)]).holds(100) for _ in range(series))
    assert held / series > 0.95 - 0.01


@pytest.mark.parametrize(
    "values", [pytest.param([5.0], id="one run"), pytest.param([5.0, 0.0], id="a run that did nothing")]
)
def test_without_noise_to_go_by_there_is_no_interval(values):
    found = interval(values)
    assert (found.known, found.ends) == (False, None)
    assert found.holds(1e9)


@given(st.lists(st.tuples(speeds, st.floats(0.5, 2.0)), min_size=2, max_size=9))
def test_what_slows_both_runs_of_a_pair_does_not_touch_their_ratio(pairs):
    theirs = [speed for speed, _ in pairs]
    ours = [speed * times for speed, times in pairs]
    assert ratio(ours, theirs).median == pytest.approx(median(times for _, times in pairs))


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_interval_of_turns_holds_the_truth_in_95_of_100_series_whatever_the_drift(n):
    """Turns A B B A …, each with noise of 5 %: those of a machine that keeps its pace, and of one that slows down."""
    dice = random.Random(100 * n)
    for drift in (0.0, 0.02):
        held, series = 0, 3000
        for _ in range(series):
            rates = ([], [])
            for turn in range(2 * n):
                which = (0, 1, 1, 0)[turn % 4]
                rates[which].append(math.exp(0.4 * which - drift * turn + dice.gauss(0, 0.05)))
            held += ratio_of_turns(rates[1], rates[0]).holds(math.exp(0.4))
        assert held / series > 0.95 - 0.01
