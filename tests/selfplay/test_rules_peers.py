"""The rules against those that someone else wrote: OpenSpiel's oh_hell and connect_four."""

from __future__ import annotations

import random

import pytest
from counts import counts
from table import Table, cards, play_out

from gpuinfer.workloads.selfplay.games.blob import Blob
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour

pyspiel = pytest.importorskip("pyspiel", exc_type=ImportError)

SIZES = [(3, 1), (3, 2), (4, 5), (3, 13), (5, 7), (7, 7), (4, 12), (6, 8), (7, 1)]


def theirs(card: int) -> int:
    """Our card, 13 × suit + rank, as OpenSpiel numbers it."""
    return card % 13 * 4 + card // 13


def dealt_alike(table: Table, dealer: int):
    """OpenSpiel's oh_hell with the cards that lie on our table."""
    players, tricks = int(table.game.config[0]), int(table.game.config[1])
    game = pyspiel.load_game(f"oh_hell(players={players},num_tricks_fixed={tricks})")
    state = game.new_initial_state()
    state.apply_action(tricks)
    state.apply_action(dealer)
    hands = [cards(table.state[table.rules.HANDS + seat]) for seat in range(players)]
    for place in range(tricks):
        for player in range(players):
            state.apply_action(theirs(hands[(player - dealer - 1) % players][place]))
    state.apply_action(theirs(int(table.state[table.rules.TURNED])))
    return state


@pytest.mark.parametrize("games", counts(300, 10_000))
def test_blob_has_the_moves_and_scores_of_openspiel(games):
    moves = random.Random(7)
    for number in range(games):
        players, tricks = SIZES[number % len(SIZES)]
        table = Table(Blob(None, players=players, cards=tricks, scoring="oh-hell"), seed=1, number=number)
        dealer = moves.randrange(players)
        other = dealt_alike(table, dealer)
        for placed, move in enumerate(play_out(table, moves)):
            bidding = placed < players
            translated = {52 + action if bidding else theirs(action) for action in table.legal()}
            assert other.current_player() == (table.mover + dealer + 1) % players
            assert set(other.legal_actions()) == translated
            other.apply_action(52 + move if bidding else theirs(move))
        assert other.is_terminal()
        scores = [round(share * (10 + tricks), 4) for share in table.returns()]
        assert scores == [other.returns()[(seat + dealer + 1) % players] for seat in range(players)]


@pytest.mark.parametrize("games", counts(300, 10_000))
def test_connect_four_has_the_moves_and_results_of_openspiel(games):
    moves, peer = random.Random(7), pyspiel.load_game("connect_four")
    for _ in range(games):
        table, other = Table(ConnectFour()), peer.new_initial_state()
        for move in play_out(table, moves):
            assert other.current_player() == table.mover
            assert other.legal_actions() == table.legal()
            other.apply_action(move)
        assert other.is_terminal()
        assert other.returns() == table.returns()
