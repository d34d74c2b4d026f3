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
from gpuinfer.workloads.selfplay import arrays, game_records, games
from gpuinfer.workloads.selfplay.draw import Draw
from gpuinfer.workloads.selfplay.python_arena import PythonArena
from gpuinfer.workloads.selfplay.python_game import CHANCE, OVER


def searched(name: str, numbers: range, slots: int = 2, **changed: object) -> dict[str, np.ndarray]:
    """What these games leave behind, by a network of one random matrix."""
    game = OpenSpiel(name=name)
    told = {"evaluator": arrays.NETWORK, "determinizations": 2 if game.hidden else 1}
    arena, model = PythonArena(game, search_of(**{**told, **changed}), slots), random_linear(game)
    arena.add_games(numbers)
    answers, parts = (), []
    while arena.busy or arena.queued:
        rows = arena.play(*answers)
        answers = model(arena.features[:rows]) if rows else ()
        if (part := arena.collect()) is not None:
            parts.append(part)
    return {key: np.concatenate([part[key] for part in parts]) for key in parts[0]}


def test_the_installed_package_keeps_the_contract():
    assert_ok(check_package("gpuinfer-openspiel"))


def test_the_name_follows_a_colon_and_so_do_parameters():
    assert games.build_game("openspiel:go(board_size=5,komi=0.5)", {}).actions == 26
    assert games.build_game("openspiel", {"name": "hex(board_size=3)"}).actions == 9


def test_features_are_openspiels_tensor_for_the_player_to_move():
    game = OpenSpiel(name="connect_four")
    state = game.game.new_initial_state()
    for action in (3, 3, 2):
        state.apply_action(action)
    row = np.zeros(game.features - game.actions, np.float32)
    game.observe(state, row)
    assert row.tolist() == state.observation_tensor(1)
    assert game.to_move(state) == 1


@pytest.mark.parametrize("name", ["tic_tac_toe", "connect_four", "go(board_size=3)", "pig(winscore=20)", "backgammon"])
def test_the_game_is_openspiels_move_by_move(name):
    game, moves = OpenSpiel(name=name), random.Random(3)
    state, ours = game.game.new_initial_state(), game.deal(Draw(np.zeros(2, np.uint64)))
    for _ in range(60):
        if state.is_terminal():
            break
        if state.is_chance_node():
            assert game.to_move(ours) == CHANCE
            assert game.chances(ours) == state.chance_outcomes()
        else:
            assert (game.to_move(ours), game.legal(ours)) == (state.current_player(), state.legal_actions())
        action = moves.choice(state.legal_actions())
        before = str(ours)
        after = game.apply(ours, action)
        assert str(ours) == before
        state.apply_action(action)
        ours = after
    assert game.to_move(ours) == OVER or not state.is_terminal()


def test_returns_are_shares_of_the_most_that_one_can_win_or_lose():
    game = OpenSpiel(name="leduc_poker")
    assert game.game.max_utility() == 13.0
    won = searched("leduc_poker", range(20), simulations=4)["returns"]
    assert np.abs(won).max() <= 1.0
    assert np.isin(np.round(won * 13), np.arange(-13, 14)).all()
    assert np.allclose(won * 13, np.round(won * 13), atol=1e-4)


@pytest.mark.parametrize(
    ("name", "won_or_lost"),
    [
        pytest.param("connect_four", True, id="one wins, one loses, or neither"),
        pytest.param("go(board_size=5)", True, id="by points, and yet won or lost"),
        pytest.param("kuhn_poker", False, id="for one chip or two"),
        pytest.param("pig(winscore=15)", True, id="with dice"),
        pytest.param("pig(players=3,winscore=15)", False, id="three players"),
    ],
)
def test_players_may_resign_where_a_game_is_won_or_lost(name, won_or_lost):
    assert OpenSpiel(name=name).won_or_lost is won_or_lost
    if won_or_lost:
        assert all(
            game_records.is_won_or_lost(one) for one in searched(name, range(4), simulations=4)["returns"].tolist()
        )


@pytest.mark.parametrize("name", ["tic_tac_toe", "pig(winscore=15)", "kuhn_poker"])
def test_games_are_the_same_however_they_are_batched(name):
    alone, together = (searched(name, range(4), slots, simulations=6) for slots in (1, 4))
    first, second = (np.lexsort((part["move"], part["game"])) for part in (alone, together))
    for key in ("observation", "policy", "value", "player"):
        assert np.array_equal(alone[key][first], together[key][second]), key


def test_its_search_sees_the_move_that_wins():
    game = OpenSpiel(name="tic_tac_toe")
    state = game.game.new_initial_state()
    for action in (0, 3, 1, 4):  # 2 completes the first row
        state = state.child(action)
    game.deal = lambda draw: state
    arena = PythonArena(game, search_of(evaluator=arrays.UNIFORM, determinizations=1, simulations=200, noise=0.0), 1)
    arena.add_games([0])
    arena.play(rounds=100_000)
    part = arena.collect()
    assert part["policy"][0].argmax() == 2
    assert part["policy"][0, 2] > 0.8


def test_what_is_hidden_is_dealt_anew_for_each_tree():
    game, draw = OpenSpiel(name="kuhn_poker"), Draw(np.zeros(2, np.uint64))
    state = game.game.new_initial_state().child(0).child(1)  # the first player has card 0, the second 1
    held = {str(game.determinize(state, draw)).split()[1] for _ in range(50)}
    assert held == {"1", "2"}
    assert all(str(game.determinize(state, draw)).split()[0] == "0" for _ in range(10))


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        pytest.param("phantom_ttt", "hidden from its players.*would cheat", id="hidden, and not to be dealt anew"),
        pytest.param("goofspiel", "move at once", id="simultaneous moves"),
        pytest.param("mfg_crowd_modelling", "mean field", id="mean field"),
        pytest.param("bridge_uncontested_bidding", "chance is drawn inside", id="chance without probabilities"),
        pytest.param("coin_game", "no tensor", id="no features"),
        pytest.param("conect_four", "Did you mean 'connect_four'", id="a slip of the pen"),
        pytest.param("go(bord_size=5)", r"go\(board_size=19", id="a parameter that it has not"),
        pytest.param("go(board_size=5", "OpenSpiel does not load", id="a bracket that does not close"),
    ],
)
def test_what_cannot_be_played_is_refused_with_the_reason(name, reason):
    with pytest.raises(UsageError, match=reason):
        OpenSpiel(name=name)


def test_a_guess_that_is_not_what_the_player_knows_is_found(monkeypatch):
    game = pyspiel.load_game("kuhn_poker")
    monkeypatch.setattr(loading, "_seen", lambda state, player: str(state))
    assert "is not what the player to move knows" in loading._fault_of_guesses(game)


def test_a_larger_board_takes_more_memory():
    small, large = (size.position_bytes(pyspiel.load_game(f"go(board_size={side})")) for side in (5, 19))
    assert 200 < small < large < 1_000_000


def test_it_shows_what_openspiel_shows_and_of_hidden_cards_only_ones_own():
    board = OpenSpiel(None, name="tic_tac_toe")
    position = board.apply(board.deal(None), 4)
    assert board.show(position, 0) == "...\n.x.\n..."
    assert board.action_name(position, 0) == "o(0,0)"
    poker = OpenSpiel(None, name="kuhn_poker")
    position = poker.apply(poker.apply(poker.deal(None), 0), 2)  # the first player has card 0, the second card 2
    assert poker.show(position, 0) != poker.show(position, 1)
    other = poker.apply(poker.apply(poker.deal(None), 0), 1)
    assert poker.show(position, 0) == poker.show(other, 0)
