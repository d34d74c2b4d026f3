"""The bracketed search, on speeds that are formulas, and the tuner that spends a budget on it."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.lab.bench.tuning import climb_ladder, ladder


@pytest.mark.parametrize(
    ("arguments", "rungs", "start"),
    [
        pytest.param((1, 2, 2), ["1", "2"], 1, id="two cores"),
        pytest.param((1, 6, 6), ["1", "2", "4", "6"], 3, id="the last rung is the most, a doubling or not"),
        pytest.param((100, 800, 300), ["100", "200", "400", "800"], 2, id="the nearest by ratio"),
        pytest.param((5, 5, 5), ["5"], 0, id="nothing to choose"),
    ],
)
def test_a_ladder_doubles_from_the_least_to_the_most(arguments, rungs, start):
    found = ladder("workers", *arguments)
    assert (list(found.rungs), found.start) == (rungs, start)


def peaked(best):
    """A speed with one peak: it falls by a quarter for each doubling away from it."""

    def rate(point):
        away = sum(abs(math.log2(int(point.get(name, default)) / peak)) for name, (default, peak) in best.items())
        rate.asked.append(dict(point))
        return 1000 * 0.75**away

    rate.asked = []
    return rate


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_peak_is_found_wherever_it_is(games, best_games, rows, best_rows):
    rate = peaked({"games": (2**games, 2**best_games), "rows": (2**rows, 2**best_rows)})
    ladders = [ladder("games", 1, 512, 2**games), ladder("rows", 1, 512, 2**rows)]
    found = climb_ladder({}, ladders, rate)
    assert int(found.get("games", 2**games)) == 2**best_games
    assert int(found.get("rows", 2**rows)) == 2**best_rows
    assert len(rate.asked) <= 1 + 2 * 2 + abs(games - best_games) + abs(rows - best_rows)


def test_a_gain_within_the_noise_is_no_reason_to_move():
    assert climb_ladder({}, [ladder("games", 1, 64, 8)], lambda point: 102.0 if point else 100.0) == {}


def test_a_point_that_cannot_run_ends_its_ladder_and_not_the_search():
    def rate(point):
        return None if "workers" in point else 200.0 if point.get("games") == "16" else 100.0

    found = climb_ladder({}, [ladder("workers", 1, 8, 4), ladder("games", 1, 64, 8)], rate)
    assert found == {"games": "16"}
