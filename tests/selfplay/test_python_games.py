"""A game in Python is played as the same game compiled; chance is drawn as its probabilities say; faults are named."""

from __future__ import annotations

import inspect
import shutil
from pathlib import Path

import numpy as np
import pytest
from broken_in_python import (
    Calling,
    Counting,
    Endless,
    Generator,
    Halves,
    Marked,
    Mask,
    NanFeatures,
    NanLate,
    NanReturns,
    NoApply,
    NoGuess,
    NoLegal,
    NoMover,
    NoPosition,
    OneReturn,
    OneShare,
    OpenCards,
    Overwriting,
    Peeking,
    Remembering,
    Returning,
    Rich,
    SaidToBeOpen,
    Short,
    Unlikely,
    Unsorted,
)
from command import selfplay, shards
from compiled_cards import HighCard
from compiled_cards import Marked as MarkedCompiled
from in_python import Kuhn, PythonBlob, PythonConnectFour, Wager
from matches import arena_of, played, same

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.testing import assert_ok
from gpuinfer.testing.games import check_game
from gpuinfer.testing.hidden_information import CompiledAsPython, fault_of_hiding
from gpuinfer.testing.reference_search import random_linear, search_of
from gpuinfer.workloads.selfplay import arrays, kernels
from gpuinfer.workloads.selfplay.draw import Draw
from gpuinfer.workloads.selfplay.python_arena import PythonArena


@pytest.mark.parametrize("game", [PythonConnectFour(), PythonBlob()], ids=["connect four", "blob"])
@pytest.mark.parametrize("slots", [1, 5], ids=["one by one", "five at once"])
def test_a_game_in_python_goes_as_the_compiled_one(game, slots):
    told = {"evaluator": arrays.NETWORK, "simulations": 12}
    model, numbers = random_linear(game), range(6)
    compiled = played(arena_of(game.original, slots, **told), numbers, model)
    assert same(compiled, played(PythonArena(game, search_of(**told), slots), numbers, model))


def test_playouts_depend_on_the_game_alone():
    game, told = PythonConnectFour(), {"evaluator": arrays.ROLLOUT, "determinizations": 1}
    together, alone = (played(PythonArena(game, search_of(**told), slots), range(4), rounds=9) for slots in (4, 1))
    assert same(together, alone)


def test_chance_is_drawn_as_its_probabilities_say():
    told = {"evaluator": arrays.UNIFORM, "determinizations": 1, "noise": 0.0, "simulations": 4000}
    arena = PythonArena(Wager(), search_of(**told, temperature=0.0), 1)
    part = played(arena, [0], rounds=10_000)
    root = arena._forest.edges[0, :2]
    assert root["q"][Wager.SURE] == pytest.approx(0.3)
    assert root["q"][Wager.WHEEL] == pytest.approx(0.5, abs=0.05)
    assert part["policy"][0, Wager.WHEEL] > 0.9
    assert abs(part["returns"][0, 0]) == 1.0
    wheel = arena._forest.nodes[0]["first"][root["child"][Wager.WHEEL]]
    lost, won, on = arena._forest.edges[0, wheel : wheel + 3]["visits"] / root["visits"][Wager.WHEEL]
    assert (lost, won, on) == pytest.approx((0.125, 0.375, 0.5), abs=0.04)


def test_the_chance_of_the_game_itself_is_drawn_too():
    told = {"evaluator": arrays.UNIFORM, "determinizations": 1, "simulations": 8, "temperature": 1e6, "noise": 0.0}
    part = played(PythonArena(Wager(), search_of(**told), 20), range(2000), rounds=1000)
    shares = [np.mean(np.isclose(part["returns"][:, 0], value)) for value in (0.3, 1.0, -1.0)]
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


class Wide(PythonConnectFour):
    """Says that no more than three actions are ever legal."""

    def __init__(self, setup=None, /, **options):
        super().__init__(setup, **options)
        self.max_legal = 3
        self._actions = np.zeros(7, np.int16)


class Beyond(PythonConnectFour):
    def legal(self, position):
        return [action + 90 for action in super().legal(position)]


class Crowded(PythonConnectFour):
    def to_move(self, position):
        return super().to_move(position) + 2


GIVES = [
    pytest.param(NanReturns, r"`returns` gave \[nan, 1.0\] for seats = 2", id="returns that are no numbers"),
    pytest.param(NanLate, r"`returns` gave \[nan, 1.0\] for seats = 2", id="returns that are none after a while"),
    pytest.param(OneReturn, r"`returns` gave \[-?\d.0\] for seats = 2", id="a return too few"),
    pytest.param(NanFeatures, "`observe` wrote nan to feature 3", id="features that are no numbers"),
    pytest.param(Returning, r"`observe` returned array.* and wrote nothing", id="features returned"),
    pytest.param(Unlikely, "`chances` returned .*adds up to 0.5", id="chances that are not one"),
    pytest.param(OneShare, "`chances` returned .*adds up to nan", id="a chance that is no number"),
    pytest.param(Unsorted, r"`legal` returned \[6, 5.*in ascending order", id="actions out of order"),
    pytest.param(Mask, r"`legal` returned array.*np.flatnonzero", id="a mask"),
    pytest.param(Halves, r"`legal` returned \[0.5, 1.5.*whole numbers", id="half actions"),
    pytest.param(Generator, "`legal` returned <generator.*a list or an array", id="a generator"),
    pytest.param(NoLegal, "`legal` returned None.*a list or an array", id="no list of actions"),
    pytest.param(NoMover, "`to_move` returned None where seats = 2", id="no seat"),
    pytest.param(NoPosition, "`determinize` returned None", id="no guess"),
    pytest.param(NoApply, "`apply` returned None", id="no position"),
    pytest.param(Endless, "goes on after 42 moves.*max_moves", id="longer than it says"),
    pytest.param(Short, "goes on after 6 moves.*max_moves", id="longer than its max_moves"),
]


@pytest.mark.parametrize(
    ("game", "said"),
    [
        pytest.param(Wide, "max_legal = 3", id="more actions than it says"),
        pytest.param(Beyond, "actions = 7", id="actions beyond its actions"),
        pytest.param(Crowded, "seats = 2", id="a seat that nobody has"),
        *GIVES,
    ],
)
@pytest.mark.parametrize("evaluator", [arrays.UNIFORM, arrays.ROLLOUT], ids=["searched", "played out"])
def test_what_a_game_does_wrong_is_said_before_anything_of_it_is_kept(game, said, evaluator):
    arena = PythonArena(game(), search_of(evaluator=evaluator, determinizations=1), 2)
    arena.add_games(range(40))
    with pytest.raises(UsageError, match=said) as caught:
        play_finite(arena)
    assert str(caught.value).startswith(f"game '{game.__name__}': ")
    assert "raised" not in str(caught.value)


def play_finite(arena):
    while arena.busy or arena.queued:
        arena.play(rounds=5)
        if (part := arena.collect()) is not None:
            assert np.isfinite(part["returns"]).all()
            assert np.isfinite(part["value"]).all()


def test_a_run_of_a_faulty_game_in_python_ends_before_it_records_anything(tmp_path):
    words = ["--model", "uniform", "--games", 500, "--simulations", 4, "--workers", 1, "--out", "out", "--quiet"]
    said = {
        "NanReturns": "is not played, since it does what it must not: `returns` gave [nan, 1.0] for seats = 2",
        "Endless": "is not played, since it does what it must not: a game goes on after 42 moves",
        "NanAtLast": "game 'NanAtLast': `returns` gave [nan, 1.0] for seats = 2",  # which it does after the rehearsal
    }
    for name in ("broken_in_python.py", "in_python.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    for name, text in said.items():
        done = selfplay("--game", f"broken_in_python:{name}", *words, cwd=tmp_path)
        assert done.returncode in (1, 2)
        assert text in " ".join(done.stderr.split())
        assert not [path for path in shards(tmp_path / "out") if not np.isfinite(np.load(path)["returns"]).all()]


def test_what_a_method_raises_names_the_game_the_method_and_the_line():
    lines, first = inspect.getsourcelines(Calling.deal)
    arena = PythonArena(Calling(), search_of(), 1)
    arena.add_games([0])
    with pytest.raises(WorkError) as caught:
        arena.play()
    last = first + len(lines) - 1
    assert str(caught.value) == (
        f"game 'Calling': `deal` (broken_in_python.py, line {last}) raised TypeError: 'Draw' object is not callable. "
        "Draw with `draw.below(n)`, a whole number from 0 to n - 1, or `draw.unit()`, a number from 0 to 1."
    )


def test_the_page_says_what_each_function_does_and_how_to_draw():
    page = (Path(__file__).parents[2] / "docs" / "selfplay.md").read_text().partition("## Write a game of your own")[2]
    of_draw = [f"draw.{name}" for name in vars(Draw) if not name.startswith("_")]
    for name in (*kernels.FUNCTIONS, "chances", *of_draw):
        assert f"| `{name}(" in page, name


def test_the_kit_remarks_on_returns_that_are_too_large():
    [found] = [finding for finding in check_game(Rich) if finding.name == "returns are between -1 and 1"]
    assert found.ok
    assert "as large as 100" in found.detail


@pytest.mark.parametrize("game", [PythonConnectFour, PythonBlob, Kuhn, Wager])
def test_a_game_that_keeps_its_promises_passes(game):
    assert_ok(check_game(game))


@pytest.mark.parametrize(
    ("game", "said"),
    [
        pytest.param(Overwriting, "`apply` changes the position", id="one position for all"),
        pytest.param(Peeking, "`determinize` gives a position", id="guesses that cannot be"),
        pytest.param(Counting, "other features at a second look", id="features of the moment"),
        pytest.param(Remembering, "goes another way when other games", id="features of the company"),
        pytest.param(NoGuess, "has no `determinize`", id="hidden and never guessed"),
        pytest.param(OpenCards, "`determinize` gave the true position", id="hidden and guessed to be what it is"),
        pytest.param(Marked, "are searched differently", id="guesses that are too good"),
        pytest.param(SaidToBeOpen, "go on differently, and hidden = False", id="hidden and said to be open"),
    ],
)
def test_what_a_game_does_wrong_is_found_by_the_kit(game, said):
    findings = check_game(game)
    assert any(said in str(finding) for finding in findings), [str(finding) for finding in findings]


def test_guesses_of_a_compiled_game_that_look_at_the_truth_are_found_too():
    assert fault_of_hiding(CompiledAsPython(HighCard())) is None
    assert "are searched differently" in str(fault_of_hiding(CompiledAsPython(MarkedCompiled())))
