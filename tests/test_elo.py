"""Strength in numbers: Elo by its formula, and an interval that holds what it promises."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.cli.screen import workload_rows as shown
from gpuinfer.report.game_statistics import ScoreTally, elo, in_elo, in_score, of_strength

SCORED = st.sampled_from([0.0, 0.5, 1.0])


def strength_of(points):
    return of_strength(ScoreTally(dict(enumerate(points))).facts())


@given(st.dictionaries(st.integers(0, 40), SCORED, min_size=1), st.randoms(use_true_random=False))
def test_the_order_in_which_games_are_told_does_not_matter(points, order):
    tally, numbers = ScoreTally(), [*points, *points]  # each twice
    order.shuffle(numbers)
    for number in numbers:
        tally.add({number: points[number]})
    assert tally.facts() == pytest.approx(ScoreTally(points).facts())
    found = of_strength(tally.facts())
    assert found["games"] == len(points) == found["wins"] + found["draws"] + found["losses"]
    assert found["score_ci95"][0] <= found["score"] <= found["score_ci95"][1]


@given(st.lists(st.tuples(SCORED, SCORED), min_size=1, max_size=40))
def test_the_interval_of_pairs_is_that_of_their_means(pairs):
    found = strength_of([one for pair in pairs for one in pair])
    means = np.array([sum(pair) / 2 for pair in pairs] + [1.0, 0.0])
    reach = 1.959964 * means.std() / np.sqrt(len(means))
    expected = np.clip([means.mean() - reach, means.mean() + reach], 0, 1)
    assert found["score_ci95"] == pytest.approx(expected, abs=1e-6)
    assert found["pairs"] == len(pairs)


@pytest.mark.parametrize("win", [0.5, 0.75, 0.95])
def test_nineteen_of_twenty_intervals_hold_the_truth(win):
    """Of 100 pairs whose two games are one another's mirror image half of the time."""
    draw, held = np.random.default_rng(1), 0
    for _ in range(400):
        first = draw.random(100) < win
        second = np.where(draw.random(100) < 0.5, first, draw.random(100) < win)
        low, high = strength_of(np.stack([first, second], 1).ravel().astype(float).tolist())["score_ci95"]
        held += low <= win <= high
    assert 0.92 < held / 400 < 0.985


def test_strength_is_elo_by_the_logistic_curve_and_a_bound_alone_where_all_games_are_won():
    assert [elo(score) for score in (0.5, 0.75, 0.25, 10 / 11)] == pytest.approx([0, 190.849, -190.849, 400], abs=1e-3)
    won = strength_of([1.0] * 400)
    assert (won["elo"], won["elo_ci95"][1]) == (None, None)
    assert 600 < won["elo_ci95"][0] < 1000
    assert in_elo(won).startswith("more than +")
    assert in_elo(strength_of([0.0] * 400)).startswith("less than −")
    found = strength_of([1.0, 0.5, 1.0, 0.0])
    assert in_elo(found).startswith("+89 Elo (−")
    assert in_score(found).startswith("62.5 % (")
    (row,) = shown.strength_rows(found)
    assert row.text.endswith("of 4 games: 2 wins, 1 draws, 1 losses")
    assert list(shown.strength_rows(None)) == []
