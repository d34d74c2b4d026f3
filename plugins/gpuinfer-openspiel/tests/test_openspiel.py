"""OpenSpiel's games by self-play: searched as ours, refused where that would be no honest play."""

from __future__ import annotations

import random

import numpy as np
import pyspiel
import pytest
from gpuinfer_openspiel import OpenSpiel, loading, size

from gpuinfer.errors import UsageError
from gpuinfer.testing import assert_ok, check_package
from gpuinfer.testing.reference_search import random_linear, search_of
from gpuinfer.workloads.selfplay import arrays, game, games
from gpuinfer.workloads.selfplay.draw import Draw
from gpuinfer.workloads.selfplay.python_arena import PythonArena
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER

DRAW = Draw(np.zeros(2, np.uint64))


def searched(name: str, numbers: range, slots: int = 2, simulations: int = 4) -> dict[str, np.ndarray]:
    """What these games leave behind, by a network of one random matrix, in their order."""
    game = OpenSpiel(name=name)
    told = {"evaluator": arrays.NETWORK, "determinizations": 2 if game.hidden else 1, "simulations": simulations}
    arena, model = PythonArena(game, search_of(**told), slots), random_linear(game)
    arena.add_games(numbers)
    answers, parts = (), []
    while arena.busy or arena.queued:
        rows = arena.play(*answers)
        answers = model(arena.features[:rows]) if rows else ()
        if (part := arena.collect()) is not None:
            parts.append(part)
    whole = {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}
    order = np.lexsort((whole["move"], whole["game"]))
    return {key: one[order] if len(one) == len(order) else one for key, one in whole.items()}


def test_the_installed_package_keeps_the_contract():
    assert_ok(check_package("gpuinfer-openspiel"))


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four", "go(board_size=3)", "pig(winscore=20)", "backgammon"])
def test_the_game_is_openspiels_move_by_move(name):
    game, moves = OpenSpiel(name=name), random.Random(3)
    state, ours = game.game.new_initial_state(), game.deal(DRAW)
    for _ in range(60):
        if state.is_terminal():
            break
        if state.is_chance_node():
            assert game.to_move(ours) == CHANCE
            assert game.chances(ours) == state.chance_outcomes()
        else:
            assert (game.to_move(ours), game.legal(ours)) == (state.current_player(), state.legal_actions())
            game.observe(ours, row := np.zeros(game.features - game.actions, np.float32))
            assert row.tolist() == state.observation_tensor(state.current_player())
        action = moves.choice(state.legal_actions())
        before = str(ours)
        after = game.apply(ours, action)
        assert str(ours) == before
        state.apply_action(action)
        ours = after
    assert game.to_move(ours) == OVER or not state.is_terminal()


def test_returns_are_shares_of_the_most_that_one_can_win_or_lose():
    assert OpenSpiel(name="leduc_poker").game.max_utility() == 13.0
    won = searched("leduc_poker", range(20))["returns"] * 13
    assert np.abs(won).max() <= 13.0
    assert np.allclose(won, np.round(won), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "won_or_lost"),
    [
        ("connect_four", True),
        ("go(board_size=5)", True),  # by points, and yet won or lost
        ("kuhn_poker", False),  # for one chip or two
        ("pig(winscore=15)", True),
        ("pig(players=3,winscore=15)", False),
    ],
)
def test_players_may_resign_where_a_game_is_won_or_lost(name, won_or_lost):
    assert OpenSpiel(name=name).won_or_lost is won_or_lost
    if won_or_lost:
        assert all(map(game.is_won_or_lost, searched(name, range(4))["returns"].tolist()))


@pytest.mark.parametrize("name", ["tic_tac_toe", "pig(winscore=15)", "kuhn_poker"])
def test_games_are_the_same_however_they_are_batched(name):
    alone, together = (searched(name, range(4), slots, 6) for slots in (1, 4))
    for key in ("observation", "policy", "value", "player"):
        assert np.array_equal(alone[key], together[key]), key


def test_what_is_hidden_is_dealt_anew_for_each_tree_and_shown_to_nobody_else(monkeypatch):
    poker = OpenSpiel(name="kuhn_poker")
    state = poker.game.new_initial_state().child(0).child(1)  # the first player has card 0, the second 1
    guesses = [str(poker.determinize(state, DRAW)).split()[:2] for _ in range(50)]
    assert {own for own, _ in guesses} == {"0"}
    assert {held for _, held in guesses} == {"1", "2"}
    position, other = (poker.apply(poker.apply(poker.deal(None), 0), card) for card in (2, 1))
    assert poker.show(position, 0) != poker.show(position, 1)
    assert poker.show(position, 0) == poker.show(other, 0)
    monkeypatch.setattr(loading, "_seen", lambda state, player: str(state))
    assert "is not what the player to move knows" in loading._fault_of_guesses(pyspiel.load_game("kuhn_poker"))


def test_it_shows_what_openspiel_shows_and_a_name_has_parameters():
    board = OpenSpiel(None, name="tic_tac_toe")
    position = board.apply(board.deal(None), 4)
    assert board.show(position, 0) == "...\n.x.\n..."
    assert board.action_name(position, 0) == "o(0,0)"
    assert games.build_game("openspiel:go(board_size=5,komi=0.5)", {}).actions == 26
    assert games.build_game("openspiel", {"name": "hex(board_size=3)"}).actions == 9
    small, large = (size.position_bytes(pyspiel.load_game(f"go(board_size={side})")) for side in (5, 19))
    assert 200 < small < large < 1_000_000


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("phantom_ttt", "hidden from its players.*would cheat"),
        ("goofspiel", "move at once"),
        ("mfg_crowd_modelling", "mean field"),
        ("bridge_uncontested_bidding", "chance is drawn inside"),
        ("coin_game", "no tensor"),
        ("conect_four", "Did you mean 'connect_four'"),
        ("go(bord_size=5)", r"go\(board_size=19"),
        ("go(board_size=5", "OpenSpiel does not load"),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_reason(name, reason):
    with pytest.raises(UsageError, match=reason):
        OpenSpiel(name=name)
