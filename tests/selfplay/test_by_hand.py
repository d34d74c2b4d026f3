"""A game by hand: that it is the game, that its search is the search, and that moves can be taken back."""

from __future__ import annotations

import io
import random
import sys

import numpy as np
import pytest
from in_python import ShownBlob, ShownConnectFour
from table import Table, cards

from gpuinfer.testing.reference_search import Thinker, random_linear, search_of
from gpuinfer.workloads.selfplay import arrays
from gpuinfer.workloads.selfplay.games.blob import RANKS, SUITS, Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour
from gpuinfer.workloads.selfplay.manual_play import ManualGame

BOARD, CARDS = ConnectFour(), Blob(None, players=3, cards=3)
GAMES = [
    pytest.param(BOARD, BOARD, id="connect four"),
    pytest.param(CARDS, CARDS, id="blob"),
    pytest.param(ShownConnectFour(), BOARD, id="connect four in Python"),
    pytest.param(ShownBlob(), CARDS, id="blob in Python"),
]


def network(game):
    answer = random_linear(game)
    return lambda rows: answer(rows.copy())


@pytest.mark.sample(2)
@pytest.mark.parametrize(("game", "original"), GAMES)
@pytest.mark.parametrize("number", range(2))
def test_it_is_the_game_of_that_number_and_moves_are_taken_back(game, original, number):
    moves, seen = random.Random(number), []
    hand, rules = (
        ManualGame(game, search_of(evaluator=arrays.UNIFORM), number),
        Table(original, search_of().seed, number),
    )
    while hand.mover is not None:
        while len(rules.legal()) == 1:
            rules.play(*rules.legal())
        assert (hand.mover, list(hand.legal)) == (rules.mover, rules.legal())
        seen.append((hand.mover, list(hand.legal), hand.shown(0)))
        hand.think(network(game))
        move = moves.choice(rules.legal())
        hand.play(move)
        rules.play(move)
    while not rules.over:
        rules.play(*rules.legal())
    assert list(hand.returns) == rules.returns()
    assert hand.shown(0)  # the last position, too
    while seen:
        last = max(place for place, (mover, _, _) in enumerate(seen) if mover == seen[-1][0])
        assert hand.take_back(seen[-1][0])
        assert (hand.mover, list(hand.legal), hand.shown(0)) == seen[last]
        assert hand.think(network(game))
        del seen[last:]
    assert not any(hand.take_back(seat) for seat in range(original.seats))


@pytest.mark.parametrize("game", [BOARD, ShownConnectFour()], ids=["compiled", "Python"])
@pytest.mark.parametrize("evaluator", [arrays.UNIFORM, arrays.NETWORK])
def test_its_search_is_that_of_self_play(game, evaluator):
    """Without noise and with nothing hidden a search depends on the position alone."""
    search = {"evaluator": evaluator, "simulations": 60, "determinizations": 1, "noise": 0.0}
    hand, rules = ManualGame(game, search_of(**search), 0), Table(BOARD, search_of().seed, 0)
    thinker, answer = Thinker(BOARD, **search), random_linear(BOARD)
    for move in (3, 3, 2, 4):
        found = hand.think(network(BOARD))
        wanted = thinker.think(rules.state, answer if evaluator == arrays.NETWORK else None)
        np.testing.assert_allclose([wanted[one.action] for one in found], [one.share for one in found], atol=1e-6)
        assert hand.think(network(BOARD)) == found  # asked again, it remembers
        hand.play(move)
        rules.play(move)


# `gpuinfer play`


@pytest.fixture
def play(gpuinfer, monkeypatch):
    def run(given, words):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given.encode())))
        return gpuinfer("play", "--model", "uniform", *words.split())

    monkeypatch.setenv("COLUMNS", "200")
    return run


def test_a_game_is_played_from_a_pipe_to_its_end(play):
    """Whoever evaluates every move alike and looks at few does not see four in a column."""
    moves = "4\n" * 3 + "\n/hint\n4\n" + "1\n2\n3\n5\n6\n7\n" * 6
    _, out, err = play(moves, "--game connect-four --simulations 4 --deal 1")
    assert "move  visits  value" in out
    assert out.splitlines()[-1].startswith(("You have won: you +1, player 2 -1.", "You have lost: you -1", "A draw: "))
    assert out.count("1 2 3 4 5 6 7") == out.count("You have X.") >= 5
    assert "--deal 1" in err


def test_a_line_that_is_no_move_is_said_and_a_pipe_that_had_one_ends_with_1(play):
    code, out, err = play("8\n/back\n4\n/BACK\n/help\n", "--simulations 2")
    assert code == 1
    assert "'8' is no move here. Moves: 1, 2, 3, 4, 5, 6, 7. Or /help." in err
    assert "no move that could be taken back" in err
    assert out.count(". . . . . . .\nYou have X.") == 2  # the empty board, at first and once the move is taken back
    assert "/hint   search" in out


def test_hidden_cards_of_others_are_not_shown(play):
    code, out, err = play("1\n", "--game blob --players 3 --cards 3 --simulations 4 --deal 5")
    assert code == 0, err
    dealt = Table(CARDS, 0, 5)
    hands = dealt.state[dealt.rules.HANDS :][:3]
    own, *others = [[f"{RANKS[one % 13]}{SUITS[one // 13]}" for one in cards(hand)] for hand in hands]
    assert f"your hand: {' '.join(own)}" in out
    assert not [card for hand in others for card in hand if card in out.partition("player 2 plays")[0]]


def test_chance_moves_by_itself_in_a_game_of_one(play):
    code, out, err = play("WHEEL\n", "--game in_python:ShownWager --deal 1")
    assert code == 0, err
    assert out.splitlines()[0] == "so far: nothing"
    assert out.splitlines()[-1] in ("The game is over: you +1.", "The game is over: you -1.")


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("--game in_python:Wager", "Give its class a method show(position, seat)"),
        ("--seat 3", "--seat 3: connect-four has 2. Give one of them."),
        ("--model blobnt", "Did you mean 'blobnet'?"),
        ("--game connect-for", "Did you mean 'connect-four'?"),
        ("--weights none.safetensors --model blobnet", "no file 'none.safetensors'"),
    ],
)
def test_what_cannot_be_played_is_refused(play, words, cure):
    code, out, err = play("", words)
    assert (code, out) == (2, "")
    assert cure in " ".join(err.split())
