"""Symmetries that a game declares: that they are true, that records keep them, and what is refused."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import forking
import numpy as np
import pytest
from broken_in_python import Mirrored, Shifted, ShiftedBoard, WronglyMirrored
from table import Table

from gpuinfer.errors import UsageError
from gpuinfer.models.positions import PositionsFolder, checked
from gpuinfer.workloads.selfplay.game import OutOfBounds
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour
from gpuinfer.workloads.selfplay.playthrough import refuse_symmetries

PLAIN = ["--game", "connect-four", "--model", "uniform", "--simulations", "2", "--workers", "1"]


@pytest.mark.parametrize("number", range(5))
def test_a_game_in_the_mirror_is_the_mirrored_game(number):
    game, draw = ConnectFour(), random.Random(number)
    (features, actions), *others = game.symmetries()
    assert not others
    table, mirrored = Table(game), Table(game)
    while not table.over:
        assert [actions[move] for move in reversed(mirrored.legal())] == table.legal()
        np.testing.assert_array_equal(mirrored.observe(), table.observe()[features])
        move = draw.choice(table.legal())
        table.play(move)
        mirrored.play(actions.index(move))
    assert mirrored.over
    assert mirrored.returns() == table.returns()


def test_records_say_the_symmetries_of_their_game_and_training_turns_positions(tmp_path):
    words = ["gpuinfer", "selfplay", *PLAIN, "--games", "6", "--out", "games", "--quiet"]
    done = forking.run(words, tmp_path)
    assert done.returncode == 0, done.stderr
    kept = PositionsFolder(tmp_path / "games").symmetries(91, 7)
    assert [(kept.features[0].tolist(), kept.actions[0].tolist())] == ConnectFour().symmetries()
    train = ["gpuinfer", "train", "--records", "games", "--model", "blobnet-small", "--steps", "3", "--device", "cpu"]
    for name, more in (("turned", []), ("plain", ["--no-symmetries"])):
        done = forking.run([*train, "--out", name, "--quiet", *more], tmp_path)
        assert done.returncode == 0, done.stderr
    settings = [json.loads((tmp_path / name / "manifest.json").read_text())["settings"] for name in ("turned", "plain")]
    assert [one.get("symmetries") for one in settings] == [[[6, 5, 4, 3, 2, 1, 0]], None]
    losses = [(tmp_path / name / "loss.jsonl").read_text() for name in ("turned", "plain")]
    assert losses[0] != losses[1]


@pytest.mark.parametrize("game", [WronglyMirrored, Shifted, ShiftedBoard], ids=lambda game: game.__name__)
def test_a_symmetry_that_is_none_is_found_before_a_run_and_by_the_kit(game):
    with pytest.raises(OutOfBounds, match="symmetry 0 of `symmetries` turns"):
        refuse_symmetries(game(), games=1000, seconds=30.0)


def test_a_true_symmetry_is_borne_out_and_a_wrong_one_named_before_anything_is_played(tmp_path):
    refuse_symmetries(Mirrored(), games=200, seconds=10.0)
    for name in ("broken_in_python.py", "in_python.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    words = ["gpuinfer", "selfplay", "--model", "uniform", "--games", "4", "--workers", "1", "--quiet", "--game"]
    assert forking.run([*words, "broken_in_python:Mirrored"], tmp_path).returncode == 0
    done = forking.run(
        [*words, "broken_in_python:WronglyMirrored"], tmp_path
    )  # another game of a file that was looked at
    assert done.returncode == 2
    assert "is not played, since it does what it must not: symmetry 0 of `symmetries` turns" in done.stderr


GOOD = ([1, 0, 2], [1, 0])


@pytest.mark.parametrize(
    "pair",
    [
        pytest.param(([1, 0], [1, 0]), id="too few features"),
        pytest.param(([1, 0, 2], [1, 1]), id="an action twice"),
        pytest.param(([0, 1, 2], [1, 0]), id="the mask of legal actions stays"),
        pytest.param(([1.0, 0.0, 2.0], [1, 0]), id="no whole numbers"),
        pytest.param([1, 0, 2], id="no pair"),
        pytest.param((["b", "a", "c"], [1, 0]), id="words"),
    ],
)
def test_what_is_no_symmetry_is_refused_with_its_number(pair):
    assert len(checked([GOOD], 3, 2, "game 'g'")) == 1
    with pytest.raises(UsageError, match="game 'g': symmetry 1 is no permutation of 3 features with one of 2 actions"):
        checked([GOOD, pair], 3, 2, "game 'g'")
