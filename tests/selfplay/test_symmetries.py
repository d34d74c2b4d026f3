"""Symmetries that a game declares: that records keep them, that training uses them, and that wrong ones are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import broken_in_python as broken
import forking
import pytest

from gpuinfer.models.positions import PositionsFolder
from gpuinfer.workloads.selfplay.game import OutOfBounds
from gpuinfer.workloads.selfplay.games.connect_four import ConnectFour
from gpuinfer.workloads.selfplay.playthrough import refuse_symmetries

PLAY = "gpuinfer selfplay --model uniform --simulations 2 --workers 1 --quiet --game"


@pytest.mark.thorough
def test_records_say_the_symmetries_of_their_game_and_training_turns_positions(tmp_path):
    def run(words):
        done = forking.run(words.split(), tmp_path)
        assert done.returncode == 0, done.stderr

    run(f"{PLAY} connect-four --games 6 --out games")
    kept = PositionsFolder(tmp_path / "games").symmetries(91, 7)
    assert [(kept.features[0].tolist(), kept.actions[0].tolist())] == ConnectFour().symmetries()
    train = "gpuinfer train --records games --model blobnet-small --steps 3 --device cpu --quiet --out"
    run(f"{train} turned")
    run(f"{train} plain --no-symmetries")
    settings = [json.loads((tmp_path / name / "manifest.json").read_text())["settings"] for name in ("turned", "plain")]
    assert [one.get("symmetries") for one in settings] == [[[6, 5, 4, 3, 2, 1, 0]], None]
    losses = [(tmp_path / name / "loss.jsonl").read_text() for name in ("turned", "plain")]
    assert losses[0] != losses[1]


def test_a_symmetry_that_is_none_is_found_before_a_run_and_by_the_kit():
    """One of which only the edges of the board tell."""
    with pytest.raises(OutOfBounds, match="symmetry 0 of `symmetries` turns"):
        refuse_symmetries(broken.ShiftedBoard(), games=1000, seconds=30.0)


@pytest.mark.thorough
def test_a_true_symmetry_is_borne_out_and_a_wrong_one_named_before_anything_is_played(tmp_path):
    refuse_symmetries(broken.Mirrored(), games=200, seconds=10.0)
    for name in ("broken_in_python.py", "in_python.py"):
        shutil.copy(Path(__file__).with_name(name), tmp_path)
    assert forking.run(f"{PLAY} broken_in_python:Mirrored --games 4".split(), tmp_path).returncode == 0
    done = forking.run(f"{PLAY} broken_in_python:WronglyMirrored --games 4".split(), tmp_path)  # of the same file
    assert done.returncode == 2
    assert "is not played, since it does what it must not: symmetry 0 of `symmetries` turns" in done.stderr
