"""A game in Python is played as the same game compiled; chance is drawn as its probabilities say; faults are named."""

from __future__ import annotations

import inspect
from pathlib import Path

import broken_in_python as broken
import numpy as np
import pytest
from in_python import Kuhn, PythonBlob, PythonConnectFour, Wager
from matches import arena_of, played, same

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.testing import assert_ok
from gpuinfer.testing.games import check_game
from gpuinfer.testing.reference_search import random_linear, search_of
from gpuinfer.workloads.selfplay import arrays, kernels
from gpuinfer.workloads.selfplay.draw import Draw
from gpuinfer.workloads.selfplay.python_arena import PythonArena

ALONE = {"determinizations": 1, "noise": 0.0}


@pytest.mark.sample
@pytest.mark.parametrize("game", [PythonConnectFour(), PythonBlob()], ids=["connect four", "blob"])
def test_a_game_in_python_goes_as_the_compiled_one(game):
    told = {"evaluator": arrays.NETWORK, "simulations": 12}
    model, numbers = random_linear(game), range(6)
    compiled = played(arena_of(game.original, 5, **told), numbers, model)
    for slots in (1, 5):
        assert same(compiled, played(PythonArena(game, search_of(**told), slots), numbers, model))


def test_playouts_depend_on_the_game_alone():
    game, told = PythonConnectFour(), {"evaluator": arrays.ROLLOUT, "determinizations": 1}
    together, alone = (played(PythonArena(game, search_of(**told), slots), range(4), rounds=9) for slots in (4, 1))
    assert same(together, alone)


def test_chance_is_drawn_as_its_probabilities_say_in_the_search_and_in_the_game():
    told = {"evaluator": arrays.UNIFORM, **ALONE}
    arena = PythonArena(Wager(), search_of(**told, simulations=4000, temperature=0.0), 1)
    part = played(arena, [0], rounds=10_000)
    root = arena._forest.edges[0, :2]
    assert root["q"] == pytest.approx([0.3, 0.5], abs=0.05)
    assert part["policy"][0, Wager.WHEEL] > 0.9
    assert abs(part["returns"][0, 0]) == 1.0
    wheel = arena._forest.nodes[0]["first"][root["child"][Wager.WHEEL]]
    lost, won, on = arena._forest.edges[0, wheel : wheel + 3]["visits"] / root["visits"][Wager.WHEEL]
    assert (lost, won, on) == pytest.approx((0.125, 0.375, 0.5), abs=0.04)

    drawn = PythonArena(Wager(), search_of(**told, simulations=8, temperature=1e6), 20)
    returns = played(drawn, range(1000), rounds=1000)["returns"][:, 0]
    shares = [np.mean(np.isclose(returns, value)) for value in (0.3, 1.0, -1.0)]
    assert shares == pytest.approx([0.5, 0.375, 0.125], abs=0.06)


def test_an_opponent_who_plays_out_does_the_same_as_with_compiled_rules():
    game, told = PythonConnectFour(), {"evaluator": arrays.NETWORK, "determinizations": 1}
    model, found = random_linear(game), []
    for arena in (arena_of(game.original, 4, **told), PythonArena(game, search_of(**told), 4)):
        arena.add_games(range(4))
        answers = ()
        for _ in range(12):  # into the search of the second move
            rows = arena.play(*answers)
            answers = model(arena.features[:rows])
        slots, _ = arena.roots()
        logits, values = (np.full((rows, width), 7.0, np.float32) for width in (game.actions, game.seats))
        arena.play_out(np.arange(rows), logits, values)
        found.append((values[np.argsort(slots)].tolist(), logits.tolist()))
    assert found[0] == found[1]
    assert not np.any(found[0][1])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Wide", "max_legal = 3"),
        ("Beyond", "actions = 7"),
        ("Crowded", "seats = 2"),
        ("NanReturns", r"`returns` gave \[nan, 1.0\] for seats = 2"),
        ("NanLate", r"`returns` gave \[nan, 1.0\] for seats = 2"),
        ("OneReturn", r"`returns` gave \[-?\d.0\] for seats = 2"),
        ("NanFeatures", "`observe` wrote nan to feature 3"),
        ("Returning", "`observe` returned array.* and wrote nothing"),
        ("Unlikely", "`chances` returned .*adds up to 0.5"),
        ("OneShare", "`chances` returned .*adds up to nan"),
        ("Unsorted", r"`legal` returned \[6, 5.*in ascending order"),
        ("Mask", "`legal` returned array.*np.flatnonzero"),
        ("Halves", r"`legal` returned \[0.5, 1.5.*whole numbers"),
        ("Generator", "`legal` returned <generator.*a list or an array"),
        ("NoLegal", "`legal` returned None.*a list or an array"),
        ("NoMover", "`to_move` returned None where seats = 2"),
        ("NoPosition", "`determinize` returned None"),
        ("NoApply", "`apply` returned None"),
        ("Endless", "goes on after 42 moves.*max_moves"),
        ("Short", "goes on after 6 moves.*max_moves"),
    ],
)
@pytest.mark.parametrize("evaluator", [arrays.UNIFORM, arrays.ROLLOUT], ids=["searched", "played out"])
def test_what_a_game_does_wrong_is_said_before_anything_of_it_is_kept(name, said, evaluator):
    arena = PythonArena(getattr(broken, name)(), search_of(evaluator=evaluator, determinizations=1), 2)
    arena.add_games(range(40))
    with pytest.raises(UsageError, match=f"^game '{name}': .*{said}") as caught:
        _play_finite(arena)
    assert "raised" not in str(caught.value)


def _play_finite(arena):
    while arena.busy or arena.queued:
        arena.play(rounds=5)
        if (part := arena.collect()) is not None:
            assert np.isfinite(part["returns"]).all()
            assert np.isfinite(part["value"]).all()


def test_what_a_method_raises_names_the_game_the_method_and_the_line():
    lines, first = inspect.getsourcelines(broken.Calling.deal)
    arena = PythonArena(broken.Calling(), search_of(), 1)
    arena.add_games([0])
    with pytest.raises(WorkError, match=r"raised TypeError: .*Draw with `draw.below\(n\)`") as caught:
        arena.play()
    place = f"broken_in_python.py, line {first + len(lines) - 1}"
    assert str(caught.value).startswith(f"game 'Calling': `deal` ({place}) raised")


def test_the_page_says_what_each_function_does_and_how_to_draw():
    page = (Path(__file__).parents[2] / "docs" / "selfplay.md").read_text().partition("## Write a game of your own")[2]
    of_draw = [f"draw.{name}" for name in vars(Draw) if not name.startswith("_")]
    assert [name for name in (*kernels.FUNCTIONS, "chances", *of_draw) if f"| `{name}(" not in page] == []


@pytest.mark.sample
@pytest.mark.parametrize("game", [PythonConnectFour, PythonBlob, Kuhn, Wager])
def test_a_game_that_keeps_its_promises_passes(game):
    assert_ok(check_game(game))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Overwriting", "`apply` changes the position"),
        ("Peeking", "`determinize` gives a position"),
        ("Counting", "other features at a second look"),
        ("Remembering", "goes another way when other games"),
        ("NoGuess", "has no `determinize`"),
        ("OpenCards", "`determinize` gave the true position"),
        ("Marked", "are searched differently"),
        ("SaidToBeOpen", "go on differently, and hidden = False"),
        ("Rich", "as large as 100"),  # which is a remark
        ("Graded", "won_or_lost = True says that they are 1 and -1"),
    ],
)
def test_what_a_game_does_wrong_is_found_by_the_kit(name, said):
    findings = [f"{finding} {finding.detail}" for finding in check_game(getattr(broken, name))]
    assert any(said in finding for finding in findings), findings
