"""Who resigns and when, which games nobody may resign, and what is counted of them, against plain recounts."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import jsonschema
import numpy as np
import pytest
from broken_in_python import Graded
from command import records_of, selfplay
from complaints import complaint
from hypothesis import given, settings
from hypothesis import strategies as st
from in_python import PythonConnectFour
from matches import FIELDS, arena_of, played, same
from scipy import stats
from table import Table

from gpuinfer.api import Setup
from gpuinfer.errors import UsageError
from gpuinfer.report import report
from gpuinfer.report.game_statistics import MOST_FALSE, Resignations, of_resignation, wilson
from gpuinfer.testing.games import check_game
from gpuinfer.testing.reference_search import ReferenceTree, Thinker, random_linear, search_of
from gpuinfer.workloads.selfplay import arrays, game_records
from gpuinfer.workloads.selfplay.draw import seed_stream, unit_of
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour
from gpuinfer.workloads.selfplay.python_arena import PythonArena
from gpuinfer.workloads.selfplay.workload import SelfPlay

HERE = Path(__file__).parent
SMALL_SHARDS = str(HERE / "small_shards.py")
BOARD = ["--game", "connect-four", "--simulations", 24, "--no-roofline", "--quiet", "--json", "-"]
PLAYED_OUT = [*BOARD, "--model", "rollout", "--resign", 0.4, "--resign-check", 0.3]


def compiled(slots=3, **told):
    return arena_of(ConnectFour(), slots, **told)


def in_python(slots=3, **told):
    return PythonArena(PythonConnectFour(), search_of(**told), slots)


def by_stones(first_seat):
    """A model of Connect Four to which a position is worth so much to the first seat, by how many stones lie there; 0
    beyond the list.
    """

    def answer(features):
        stones = features[:, 7:].sum(axis=1).astype(int)
        worth = np.array([*first_seat, *[0.0] * 43], np.float32)[stones]
        worth = np.where(stones % 2 == 0, worth, -worth)  # to whoever moves
        return np.zeros((len(features), 7), np.float32), np.stack([worth, -worth], axis=1)

    return answer


@pytest.mark.parametrize("arena", [compiled, in_python])
@pytest.mark.parametrize(
    ("worth", "threshold", "loser", "move"),
    [
        pytest.param([0, 0, -1, -1], 0.9, 0, 2, id="the first seat, as soon as it moves there"),
        pytest.param([0, 0, 0, 1, 1], 0.9, 1, 3, id="the second seat"),
        pytest.param([0, 0, -0.5, -0.5, -0.5], 0.5, 0, 2, id="at the threshold itself"),
        pytest.param([0, 0, -0.5, -0.5, -0.5], 0.51, -1, None, id="not above it"),
        pytest.param([0, 0, -1, 0], 0.5, -1, None, id="a root worth that little and a move that is not"),
        pytest.param([0, 0, 0, -1], 0.6, -1, None, id="a move worth that little and a root that is not"),
        pytest.param([0, 0, 0, -1], 0.5, 0, 2, id="both"),
        pytest.param([0, 1, 1, 1, 1], 0.9, 1, 1, id="the other one thinks it has won, and does not resign"),
        pytest.param([], 0.001, -1, None, id="nobody thinks anything"),
    ],
)
def test_a_player_resigns_when_root_and_best_move_are_both_worth_too_little(arena, worth, threshold, loser, move):
    """Two simulations: the root is worth the mean of its own value and that of one move."""
    told = {"evaluator": arrays.NETWORK, "simulations": 2, "determinizations": 1, "resign": threshold}
    games = played(arena(**told), range(4), by_stones(worth))
    assert games["resigned"].tolist() == [loser] * 4
    assert not games["checked"].any()
    last = [games["move"][games["game"] == number].max() for number in range(4)]
    if move is None:
        assert min(last) > len(worth)
    else:
        assert last == [move] * 4
        assert (games["returns"] == ([-1, 1] if loser == 0 else [1, -1])).all()
        mine = games["player"] == loser
        assert (games["value"] == np.where(mine[:, None], [-1, 1], [1, -1])).all()


def mean_and_best(root):
    """Of the root of a `Tree`: its mean value to whoever moves, and visits and sums of its moves."""
    visits, sums = np.array(root.visits), np.array(root.sums)
    return (root.values[root.mover] + sums.sum()) / (1 + visits.sum()), visits, sums


@pytest.mark.parametrize("number", range(4))
def test_what_a_position_is_worth_is_that_of_a_plain_search(number):
    """Of all determinizations together, in a game with hidden cards."""
    game, told = Blob(), {"evaluator": arrays.NETWORK, "determinizations": 3, "simulations": 30}
    model, table = random_linear(game), Table(game, 5, number)
    thinker = Thinker(game, **told, resign=1000.0)
    thinker.begin(table.state)
    trees = [ReferenceTree(game, root, model, 1.5) for root in thinker.roots]
    for tree in trees:
        tree.visits(30)
    means, visits, sums = (np.array(part) for part in zip(*(mean_and_best(tree.root) for tree in trees), strict=True))
    best = visits.sum(axis=0).argmax()
    thinker.finish(model)
    lowest = thinker.arena._games.lowest[0]
    assert lowest[table.mover] == pytest.approx(
        max(means.mean(), sums.sum(axis=0)[best] / visits.sum(axis=0)[best]), abs=1e-5
    )
    assert np.isinf(np.delete(lowest, table.mover)).all()


@pytest.mark.parametrize("slots", [1, 5])
def test_a_game_in_python_is_resigned_as_the_compiled_one(slots):
    told = {"evaluator": arrays.NETWORK, "simulations": 20, "resign": 0.3, "resign_check": 0.3}
    model, numbers = random_linear(ConnectFour()), range(40)
    games = played(compiled(4, **told), numbers, model)
    assert same(games, played(in_python(slots, **told), numbers, model))
    assert 0 < (games["resigned"] >= 0).sum() < 40


PLAYOUTS = {"evaluator": arrays.ROLLOUT, "determinizations": 1, "simulations": 40, "resign": 0.5, "resign_check": 0.3}


@functools.cache
def with_playouts():
    return played(compiled(**PLAYOUTS), range(80))


def test_games_are_resigned_alike_in_any_company_and_order():
    assert same(with_playouts(), played(compiled(7, **PLAYOUTS), range(79, -1, -1), rounds=100))


@pytest.mark.parametrize("checked", [0.0, 0.3, 1.0])
def test_a_checked_game_is_the_one_that_nobody_may_resign(checked):
    """All that is recorded of it is what is recorded without `--resign`; others end early."""
    without = played(compiled(**{**PLAYOUTS, "resign": 0.0}), range(80))
    assert not set(arrays.OF_RESIGNATION) & without.keys()
    games = played(compiled(**{**PLAYOUTS, "resign_check": checked}), range(80))
    assert abs(games["checked"].mean() - checked) < 0.2
    numbers = games["finished"][games["checked"]]
    for name in FIELDS:
        mine, other = (part[name][np.isin(part["game"], numbers)] for part in (games, without))
        assert np.array_equal(mine, other)
    assert np.array_equal(games["returns"][games["checked"]], without["returns"][games["checked"]])
    resigned = ~games["checked"] & (games["resigned"] >= 0)
    for number in games["finished"][resigned]:
        mine, other = (part["policy"][part["game"] == number] for part in (games, without))
        assert len(mine) < len(other)
        assert np.array_equal(mine, other[: len(mine)])
    assert (games["resigned"] >= 0).sum() > 10


def test_which_games_are_checked_is_drawn_from_seed_and_number_alone():
    drawn = np.array([[unit_of(seed, number) for number in range(4000)] for seed in (0, 1)])
    assert all(stats.kstest(one, "uniform").pvalue > 1e-4 for one in drawn)
    assert abs(np.corrcoef(drawn)[0, 1]) < 0.06
    streams = np.zeros((4000, 2), np.uint64)
    for number, stream in enumerate(streams):
        seed_stream(stream, 0, number)
    assert abs(np.corrcoef(drawn[0], streams[:, 0] / 2.0**64)[0, 1]) < 0.06
    assert with_playouts()["checked"].tolist() == [unit_of(11, number) < 0.3 for number in range(80)]


def recounted(games, threshold):
    """What is counted of records, in the plainest way."""
    found = {"games": 0, "resigned": 0, "checked": 0, "would_have_resigned": 0, "false": 0}
    for loser, checked, returns in zip(games["resigned"], games["checked"], games["returns"], strict=True):
        found["games"] += 1
        if checked:
            found["checked"] += 1
            if loser != -1:
                found["would_have_resigned"] += 1
                found["false"] += bool(returns[loser] > -1)
        elif loser != -1:
            found["resigned"] += 1
    return {"threshold": threshold, **found}


def counted(games, threshold):
    tally = Resignations(threshold)
    tally.add(game_records.ended_games(games))
    tally.add(game_records.ended_games(games))  # a worker's word and the records: each game once
    return of_resignation(tally.facts())


@pytest.mark.parametrize(("hits", "trials"), [(0, 1), (1, 1), (0, 40), (2, 61), (7, 20), (500, 1000)])
def test_the_interval_is_that_of_wilson(hits, trials):
    expected = stats.binomtest(hits, trials).proportion_ci(0.95, "wilson")
    assert wilson(hits, trials) == pytest.approx([expected.low, expected.high], abs=1e-6)


THOUGHTS = st.lists(st.tuples(st.integers(0, 1), st.integers(-100, 100)), min_size=1, max_size=8)
RESULTS = st.sampled_from([(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0)])


def would_be_resigned(thoughts, threshold):
    """Who resigns, of what each mover in turn found its position to be worth, in hundredths."""
    return next((seat for seat, worth in thoughts if np.float32(worth / 100) <= np.float32(-threshold)), -1)


def as_arrays(games, threshold):
    """The arrays of checked games, of thoughts and results."""
    lowest = np.full((len(games), 2), np.inf, np.float32)
    for row, (thoughts, _) in zip(lowest, games, strict=True):
        for seat, worth in thoughts:
            if np.float32(worth / 100) < row.min():
                row[seat] = worth / 100
    return {
        "finished": np.arange(len(games)),
        "returns": np.array([result for _, result in games], np.float32),
        "resigned": np.array([would_be_resigned(thoughts, threshold) for thoughts, _ in games], np.int8),
        "checked": np.ones(len(games), np.bool_),
        "lowest": lowest,
    }


@settings(max_examples=300)
@given(st.lists(st.tuples(THOUGHTS, RESULTS), min_size=1, max_size=25), st.integers(1, 100))
def test_at_a_threshold_that_is_advised_no_more_than_a_twentieth_is_false(games, hundredths):
    threshold = hundredths / 100
    told = counted(as_arrays(games, threshold), threshold)
    losers = [(would_be_resigned(thoughts, threshold), result) for thoughts, result in games]
    false = sum(loser != -1 and result[loser] > -1 for loser, result in losers)
    would = sum(loser != -1 for loser, _ in losers)
    assert (told["false"], told["would_have_resigned"]) == (false, would)
    assert (told["advice"] is not None) == (false > MOST_FALSE * would)
    if (advised := told["advised"]) is None:
        return
    assert threshold < advised <= 1
    assert f"--resign {advised:g}" in told["advice"]
    losers = [(would_be_resigned(thoughts, advised), result) for thoughts, result in games]
    false = sum(loser != -1 and result[loser] > -1 for loser, result in losers)
    would = sum(loser != -1 for loser, _ in losers)
    assert would > 0
    assert false <= MOST_FALSE * would


def sure(worth, lost, count):
    """So many games in which the first seat finds its position worth that much, and then loses or not."""
    return [([(0, worth)], (-1.0, 1.0) if lost else (1.0, -1.0))] * count


def done(*words, cwd):
    made = selfplay(*words, cwd=cwd)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


def test_a_run_reports_what_its_records_say_and_goes_on_with_them(tmp_path):
    made = done(*PLAYED_OUT, "--games", 120, "--workers", 1, "--out", "games", cwd=tmp_path)
    jsonschema.validate(made, report.schema())
    told, records = made["resignation"], records_of(tmp_path / "games")
    assert {name: told[name] for name in recounted(records, 0.4)} == recounted(records, 0.4)
    assert min(told["resigned"], told["would_have_resigned"]) > 0
    again = done(*PLAYED_OUT, "--games", 160, "--workers", 2, "--out", "games", "--resume", cwd=tmp_path)
    whole = done(*PLAYED_OUT, "--games", 160, "--workers", 2, "--out", "whole", cwd=tmp_path)
    records = records_of(tmp_path / "games")
    assert same(records, records_of(tmp_path / "whole"))
    assert again["resignation"] == whole["resignation"]
    assert {name: again["resignation"][name] for name in recounted(records, 0.4)} == recounted(records, 0.4)
    for words in (["--resign-check", 0.5], ["--resign", 0.5]):
        other = selfplay(*PLAYED_OUT, *words, "--games", 170, "--out", "games", "--resume", cwd=tmp_path)
        assert "was made with other settings (resign" in complaint(other)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"resign": 0.9}, "game 'blob' has 4 players, .* Leave --resign out.", id="four players"),
        pytest.param(
            {"resign": 0.9, "game": "in_python:Wager"}, "has 1 player, .* Leave --resign out.", id="a player alone"
        ),
        pytest.param(
            {"resign": 0.9, "game": "in_python:Kuhn"}, "Set won_or_lost = True in its class .*; else leave", id="stakes"
        ),
        pytest.param(
            {"resign": 0.9, "game": "connect-four", "simulations": 1}, "Ask for --simulations 2 or more.", id="no move"
        ),
        pytest.param(
            {"resign_check": 0.2, "game": "connect-four"},
            "--resign-check 0.2: nobody resigns. Add --resign 0.9.",
            id="a check of nothing",
        ),
    ],
)
def test_a_game_in_which_nobody_can_resign_is_refused_with_the_cure(options, said):
    with pytest.raises(UsageError, match=said):
        SelfPlay(Setup(), **options)


def test_a_game_that_says_it_is_won_or_lost_and_is_not_is_found_by_the_kit_and_ends_the_run():
    assert any("won_or_lost = True says that they are 1 and -1" in str(one) for one in check_game(Graded))
    words = ["--game", "broken_in_python:Graded", "--model", "uniform", "--workers", 1, "--games", 20, "--quiet"]
    made = selfplay(*words, "--resign", 1, "--resign-check", 1, cwd=HERE)
    assert made.returncode == 2, made.stderr
    assert "won_or_lost = True says that they are 1 and -1" in complaint(made)
    assert complaint(made).endswith("Give those, or leave won_or_lost out.")
