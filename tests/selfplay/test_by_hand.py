"""A game by hand: that it is the game, that its search is the search, and that moves can be taken back."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from forking import Forked, own_environment
from shown import ShownBlob, ShownConnectFour
from table import Table as Rules
from table import cards

from gpuinfer.testing.reference_search import Thinker, random_linear, search_of
from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.games.blob import RANKS, SUITS, Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour
from gpuinfer.workloads.selfplay.manual_play import ManualGame

COMPILED = [
    pytest.param(ConnectFour(), ConnectFour(), id="connect four"),
    pytest.param(Blob(None, players=3, cards=3), Blob(None, players=3, cards=3), id="blob"),
    pytest.param(ShownConnectFour(), ConnectFour(), id="connect four in Python"),
    pytest.param(ShownBlob(), Blob(None, players=3, cards=3), id="blob in Python"),
]


def network(game):
    answer = random_linear(game)
    return lambda rows: answer(rows.copy())


def without_forced_moves(rules):
    while not rules.over and len(rules.legal()) == 1:
        rules.play(*rules.legal())
    return rules


@pytest.mark.parametrize(("game", "original"), COMPILED)
@pytest.mark.parametrize("number", range(4))
def test_it_is_the_game_of_that_number_move_by_move(game, original, number):
    moves = random.Random(number)
    table = ManualGame(game, search_of(evaluator=arrays.UNIFORM), number)
    rules = without_forced_moves(Rules(original, search_of().seed, number))
    while table.mover is not None:
        assert (table.mover, list(table.legal)) == (rules.mover, rules.legal())
        move = moves.choice(rules.legal())
        table.play(move)
        rules.play(move)
        without_forced_moves(rules)
    assert rules.over
    assert list(table.returns) == rules.returns()
    assert table.shown(0)  # the last position, too


@pytest.mark.parametrize(
    "game", [pytest.param(ConnectFour(), id="compiled"), pytest.param(ShownConnectFour(), id="Python")]
)
@pytest.mark.parametrize("evaluator", [arrays.UNIFORM, arrays.NETWORK])
def test_its_search_is_that_of_self_play(game, evaluator):
    """Without noise and with nothing hidden a search depends on the position alone."""
    search = {"evaluator": evaluator, "simulations": 60, "determinizations": 1, "noise": 0.0}
    table, rules = ManualGame(game, search_of(**search), 0), Rules(ConnectFour(), search_of().seed, 0)
    thinker, answer = Thinker(ConnectFour(), **search), random_linear(ConnectFour())
    for move in (3, 3, 2, 4):
        found = table.think(network(ConnectFour()))
        wanted = thinker.think(rules.state, answer if evaluator == arrays.NETWORK else None)
        np.testing.assert_allclose([wanted[one.action] for one in found], [one.share for one in found], atol=1e-6)
        assert table.think(network(ConnectFour())) == found  # asked again, it remembers
        table.play(move)
        rules.play(move)


@pytest.mark.parametrize(("game", "original"), COMPILED)
def test_a_move_is_taken_back_with_all_that_came_after_it(game, original):
    table = ManualGame(game, search_of(evaluator=arrays.UNIFORM), 5)
    seen = []
    moves = random.Random(1)
    while table.mover is not None:
        seen.append((table.mover, list(table.legal), table.shown(0)))
        table.think(network(game))
        table.play(moves.choice(table.legal))
    while seen:
        last = max(place for place, (mover, _, _) in enumerate(seen) if mover == seen[-1][0])
        assert table.take_back(seen[-1][0])
        assert (table.mover, list(table.legal), table.shown(0)) == seen[last]
        assert table.think(network(game))
        del seen[last:]
    assert not any(table.take_back(seat) for seat in range(original.seats))


# `gpuinfer play`


def hands_of(dealt):
    return dealt.state[dealt.rules.HANDS : dealt.rules.HANDS + 3]


def play(given, cwd, *words):
    environment = own_environment(COLUMNS="200", PYTHONPATH=str(Path(__file__).parent))
    with Forked(["gpuinfer", "play", *words], cwd, environment, text=True) as process:
        out, err = process.communicate(given, timeout=240)
    return process.returncode, out, err


def test_a_game_is_played_from_a_pipe_to_its_end(tmp_path):
    """Whoever evaluates every move alike and looks at few does not see four in a column."""
    words = ["--game", "connect-four", "--model", "uniform", "--simulations", "4", "--deal", "1"]
    _, out, err = play("4\n" * 3 + "\n/hint\n4\n" + "1\n2\n3\n5\n6\n7\n" * 6, tmp_path, *words)
    assert "uniform plays " in out
    assert "move  visits  value" in out
    assert out.splitlines()[-1].startswith(("You have won: you +1, player 2 -1.", "You have lost: you -1", "A draw: "))
    assert out.count("1 2 3 4 5 6 7") == out.count("You have X.") >= 5
    assert "--deal 1" in err


def test_a_line_that_is_no_move_is_said_and_a_pipe_that_had_one_ends_with_1(tmp_path):
    code, out, err = play("8\n/back\n4\n/BACK\n/help\n", tmp_path, "--model", "uniform", "--simulations", "2")
    assert code == 1
    assert "gpuinfer: '8' is no move here. Moves: 1, 2, 3, 4, 5, 6, 7. Or /help." in err
    assert "no move that could be taken back" in err
    assert out.count(". . . . . . .\nYou have X.") == 2  # the empty board, at first and once the move is taken back
    assert "/hint   search" in out


def test_hidden_cards_of_others_are_not_shown(tmp_path):
    words = [
        "--game",
        "blob",
        "--players",
        "3",
        "--cards",
        "3",
        "--model",
        "uniform",
        "--simulations",
        "4",
        "--deal",
        "5",
    ]
    code, out, err = play("1\n", tmp_path, *words)
    assert code == 0, err
    dealt = Rules(Blob(None, players=3, cards=3), 0, 5)
    own, *others = [[f"{RANKS[one % 13]}{SUITS[one // 13]}" for one in cards(hand)] for hand in hands_of(dealt)]
    assert f"your hand: {' '.join(own)}" in out
    assert not [card for hand in others for card in hand if card in out.partition("player 2 plays")[0]]


def test_chance_moves_by_itself_in_a_game_of_one(tmp_path):
    code, out, err = play("WHEEL\n", tmp_path, "--game", "shown:ShownWager", "--model", "uniform", "--deal", "1")
    assert code == 0, err
    assert out.splitlines()[0] == "so far: nothing"
    assert out.splitlines()[-1] in ("The game is over: you +1.", "The game is over: you -1.")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--game", "in_python:Wager"], "cannot show itself. Give its class a method show(position, seat)"),
        (["--seat", "3"], "--seat 3: connect-four has 2. Give one of them."),
        (["--model", "blobnt"], "Did you mean 'blobnet'?"),
        (["--game", "connect-for"], "Did you mean 'connect-four'?"),
        (["--weights", "none.safetensors", "--model", "blobnet"], "no file 'none.safetensors'"),
    ],
)
def test_what_cannot_be_played_is_refused(tmp_path, words, said):
    code, out, err = play("", tmp_path, *words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
