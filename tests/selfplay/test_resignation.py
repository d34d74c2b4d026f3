"""Who resigns and when, which games nobody may resign, and what is counted of them, against plain recounts."""

from __future__ import annotations

import functools

import jsonschema
import numpy as np
import pytest
from command import played_by, records_of, selfplay
from complaints import complaint
from hypothesis import given, settings
from hypothesis import strategies as st
from in_python import PythonConnectFour
from matches import FIELDS, arena_of, played, same
from scipy import stats
from table import Table

from gpuinfer.report import report
from gpuinfer.report.game_statistics import MOST_FALSE, Resignations, of_resignation, wilson
from gpuinfer.testing.reference_search import ReferenceTree, Thinker, random_linear, search_of
from gpuinfer.workloads.selfplay import arrays, game_records
from gpuinfer.workloads.selfplay.draw import seed_stream, unit_of
from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour
from gpuinfer.workloads.selfplay.python_arena import PythonArena

PLAYED_OUT = (
    "--game connect-four --simulations 24 --no-roofline --quiet --json - --model rollout --resign 0.4 "
    "--resign-check 0.3"
)


def compiled(slots=3, **told):
    return arena_of(ConnectFour(), slots, **told)


def in_python(slots=3, **told):
    return PythonArena(PythonConnectFour(), search_of(**told), slots)


@pytest.mark.parametrize("arena", [compiled, in_python])
@pytest.mark.parametrize(
    ("first_seat", "threshold", "loser", "move"),  # what a position with so many stones is worth to the first seat
    [
        ([0, 0, -1, -1], 0.9, 0, 2),
        ([0, 0, 0, 1, 1], 0.9, 1, 3),
        ([0, 0, -0.5, -0.5, -0.5], 0.5, 0, 2),  # at the threshold itself
        ([0, 0, -0.5, -0.5, -0.5], 0.51, -1, None),
        ([0, 0, -1, 0], 0.5, -1, None),  # the root alone is worth that little
        ([0, 0, 0, -1], 0.6, -1, None),  # a move alone
        ([0, 0, 0, -1], 0.5, 0, 2),
        ([0, 1, 1, 1, 1], 0.9, 1, 1),  # the other one thinks it has won, and does not resign
        ([], 0.001, -1, None),
    ],
)
def test_a_player_resigns_when_root_and_best_move_are_both_worth_too_little(arena, first_seat, threshold, loser, move):
    """Two simulations: the root is worth the mean of its own value and that of one move."""

    def answer(features):
        stones = features[:, 7:].sum(axis=1).astype(int)
        worth = np.array([*first_seat, *[0.0] * 43], np.float32)[stones]
        worth = np.where(stones % 2 == 0, worth, -worth)  # to whoever moves
        return np.zeros((len(features), 7), np.float32), np.stack([worth, -worth], axis=1)

    told = {"evaluator": arrays.NETWORK, "simulations": 2, "determinizations": 1, "resign": threshold}
    games = played(arena(**told), range(4), answer)
    assert games["resigned"].tolist() == [loser] * 4
    assert not games["checked"].any()
    last = [games["move"][games["game"] == number].max() for number in range(4)]
    if move is None:
        assert min(last) > len(first_seat)
    else:
        assert last == [move] * 4
        assert (games["returns"] == ([-1, 1] if loser == 0 else [1, -1])).all()
        mine = games["player"] == loser
        assert (games["value"] == np.where(mine[:, None], [-1, 1], [1, -1])).all()


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(4))
def test_what_a_position_is_worth_is_that_of_a_plain_search(number):
    """Of all determinizations together, in a game with hidden cards."""
    game, told = Blob(), {"evaluator": arrays.NETWORK, "determinizations": 3, "simulations": 30}
    model, table = random_linear(game), Table(game, 5, number)
    thinker = Thinker(game, **told, resign=1000.0)
    thinker.begin(table.state)
    means, visits, sums = [], 0, 0
    for position in thinker.roots:
        tree = ReferenceTree(game, position, model, 1.5)
        tree.visits(30)
        root, of_moves = tree.root, np.array(tree.root.sums)
        means.append((root.values[root.mover] + of_moves.sum()) / (1 + sum(root.visits)))
        visits, sums = visits + np.array(root.visits), sums + of_moves
    thinker.finish(model)
    lowest, best = thinker.arena._games.lowest[0], visits.argmax()
    assert lowest[table.mover] == pytest.approx(max(np.mean(means), sums[best] / visits[best]), abs=1e-5)
    assert np.isinf(np.delete(lowest, table.mover)).all()


def test_a_game_in_python_is_resigned_as_the_compiled_one():
    told = {"evaluator": arrays.NETWORK, "simulations": 20, "resign": 0.3, "resign_check": 0.3}
    model, numbers = random_linear(ConnectFour()), range(40)
    games = played(compiled(4, **told), numbers, model)
    assert same(games, played(in_python(5, **told), numbers, model))
    assert 0 < (games["resigned"] >= 0).sum() < 40


PLAYOUTS = {"evaluator": arrays.ROLLOUT, "determinizations": 1, "simulations": 40, "resign": 0.5, "resign_check": 0.3}


@functools.cache
def played_out(**changed):
    return played(compiled(**{**PLAYOUTS, **changed}), range(80))


def test_games_are_resigned_alike_in_any_company_and_order():
    assert same(played_out(), played(compiled(7, **PLAYOUTS), range(79, -1, -1), rounds=100))


@pytest.mark.parametrize("checked", [0.0, 0.3, 1.0])
def test_a_checked_game_is_the_one_that_nobody_may_resign(checked):
    """All that is recorded of it is what is recorded without `--resign`; others end early."""
    without, games = played_out(resign=0.0), played_out(resign_check=checked)
    assert not set(arrays.OF_RESIGNATION) & without.keys()
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
    assert played_out()["checked"].tolist() == [unit_of(11, number) < 0.3 for number in range(80)]


@pytest.mark.parametrize(("hits", "trials"), [(0, 1), (1, 1), (0, 40), (2, 61), (7, 20), (500, 1000)])
def test_the_interval_is_that_of_wilson(hits, trials):
    expected = stats.binomtest(hits, trials).proportion_ci(0.95, "wilson")
    assert wilson(hits, trials) == pytest.approx([expected.low, expected.high], abs=1e-6)


THOUGHTS = st.lists(st.tuples(st.integers(0, 1), st.integers(-100, 100)), min_size=1, max_size=8)
RESULTS = st.sampled_from([(1.0, -1.0), (-1.0, 1.0), (0.0, 0.0)])


@settings(max_examples=300)
@given(st.lists(st.tuples(THOUGHTS, RESULTS), min_size=1, max_size=25), st.integers(1, 100))
def test_at_a_threshold_that_is_advised_no_more_than_a_twentieth_is_false(games, hundredths):
    """Of checked games: what each mover in turn found its position to be worth, in hundredths, and the result."""

    def losers(threshold):
        found = []
        for thoughts, _ in games:
            worth = ((seat, np.float32(one / 100)) for seat, one in thoughts)
            found.append(next((seat for seat, one in worth if one <= np.float32(-threshold)), -1))
        return found

    def false_and_all(threshold):
        resigned = [(loser, result) for loser, (_, result) in zip(losers(threshold), games, strict=True) if loser != -1]
        return sum(result[loser] > -1 for loser, result in resigned), len(resigned)

    threshold, lowest = hundredths / 100, np.full((len(games), 2), np.inf, np.float32)
    for row, (thoughts, _) in zip(lowest, games, strict=True):
        for seat, worth in thoughts:
            if np.float32(worth / 100) < row.min():
                row[seat] = worth / 100
    as_arrays = {
        "finished": np.arange(len(games)),
        "returns": np.array([result for _, result in games], np.float32),
        "resigned": np.array(losers(threshold), np.int8),
        "checked": np.ones(len(games), np.bool_),
        "lowest": lowest,
    }
    tally = Resignations(threshold)
    for _ in range(2):  # a worker's word and the records: each game once
        tally.add(game_records.ended_games(as_arrays))
    told = of_resignation(tally.facts())
    false, would = false_and_all(threshold)
    assert (told["false"], told["would_have_resigned"]) == (false, would)
    assert (told["advice"] is not None) == (false > MOST_FALSE * would)
    if (advised := told["advised"]) is None:
        return
    assert threshold < advised <= 1
    assert f"--resign {advised:g}" in told["advice"]
    false, would = false_and_all(advised)
    assert would > 0
    assert false <= MOST_FALSE * would


@pytest.mark.thorough
def test_a_run_reports_what_its_records_say_and_goes_on_with_them(tmp_path):
    def recounted(records):
        """What is counted of records, in the plainest way."""
        loser, checked, returns = (records[name] for name in ("resigned", "checked", "returns"))
        would = checked & (loser != -1)
        return {
            "threshold": 0.4,
            "games": len(loser),
            "resigned": int((~checked & (loser != -1)).sum()),
            "checked": int(checked.sum()),
            "would_have_resigned": int(would.sum()),
            "false": sum(returns[row][loser[row]] > -1 for row in np.flatnonzero(would)),
        }

    made = played_by(*PLAYED_OUT.split(), "--games", 120, "--workers", 1, "--out", "games", cwd=tmp_path)
    jsonschema.validate(made, report.schema())
    assert made["resignation"].items() >= recounted(records_of(tmp_path / "games")).items()
    assert min(made["resignation"]["resigned"], made["resignation"]["would_have_resigned"]) > 0
    again = played_by(*PLAYED_OUT.split(), "--games", 160, "--workers", 2, "--out", "games", "--resume", cwd=tmp_path)
    whole = played_by(*PLAYED_OUT.split(), "--games", 160, "--workers", 2, "--out", "whole", cwd=tmp_path)
    records = records_of(tmp_path / "games")
    assert same(records, records_of(tmp_path / "whole"))
    assert again["resignation"] == whole["resignation"]
    assert again["resignation"].items() >= recounted(records).items()
    for words in (["--resign-check", 0.5], ["--resign", 0.5]):
        other = selfplay(*PLAYED_OUT.split(), *words, "--games", 170, "--out", "games", "--resume", cwd=tmp_path)
        assert "was made with other settings (resign" in complaint(other)
