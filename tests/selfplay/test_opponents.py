"""`gpuinfer selfplay --opponent-model`: two networks at the command line, what they leave, and what is refused."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import jsonschema
import pytest
import torch
from command import SECONDS, records_of, selfplay, shards, started, until
from complaints import complaint
from matches import same
from safetensors.torch import save_file

from gpuinfer.report import report
from gpuinfer.report.game_statistics import ScoreTally, of_strength
from gpuinfer.workloads.selfplay.evaluator import Pairing, points_of_pairing

HERE = Path(__file__).parent
SMALL_SHARDS = str(HERE / "small_shards.py")
BOARD = ["--game", "connect-four", "--simulations", 8, "--no-roofline", "--quiet", "--json", "-"]
PAIRED = [*BOARD, "--model", "blobnet-small", "--opponent-model", "blobnet-small", "--opponent-weights", "other.pt"]


@pytest.fixture
def folder(tmp_path):
    """One that holds `other.pt`, weights of blobnet-small for Connect Four that nobody has trained."""
    draw = torch.Generator().manual_seed(5)
    shapes = {"first": (128, 91), "second": (128, 128), "policy": (7, 128), "value": (2, 128)}
    weights = {f"{name}.weight": torch.randn(shape, generator=draw) / 8 for name, shape in shapes.items()}
    torch.save(
        {**weights, **{f"{name}.bias": torch.zeros(shape[0]) for name, shape in shapes.items()}}, tmp_path / "other.pt"
    )
    return tmp_path


def done(*words, cwd):
    made = selfplay(*words, cwd=cwd)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout)


def strength_of(records):
    found = dict(
        zip(records["finished"].tolist(), map(points_of_pairing, records["returns"], records["sides"]), strict=True)
    )
    return of_strength(ScoreTally(found).facts())


def test_a_match_says_who_is_stronger_and_records_say_whose_the_seats_were(tmp_path):
    words = [*BOARD, "--model", "blobnet-small", "--opponent-model", "uniform", "--workers", 1, "--out", "games"]
    made = done(*words, "--games", 11, cwd=tmp_path)
    jsonschema.validate(made, report.schema())
    records = records_of(tmp_path / "games")
    assert records["sides"].tolist() == [Pairing(2, 0).of(number).tolist() for number in range(11)]
    assert made["strength"] == strength_of(records)
    assert (made["strength"]["games"], made["strength"]["pairs"]) == (11, 5)
    again = done(*words, "--games", 14, "--resume", cwd=tmp_path)
    assert again["strength"] == strength_of(records_of(tmp_path / "games"))
    assert again["strength"]["games"] == 14


@pytest.mark.thorough
def test_a_match_that_was_killed_is_finished_by_the_next(folder):
    words = [*PAIRED, "--workers", 2, "--games", 300, "--deterministic"]
    whole = done(*words, "--out", "whole", cwd=folder)
    with started(*words, "--out", "games", cwd=folder, program=SMALL_SHARDS) as process:
        until(lambda: shards(folder / "games"), process)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=SECONDS)
    made = done(*words, "--out", "games", "--resume", cwd=folder)
    assert made["progress"]["before"] > 0
    assert made["strength"] == whole["strength"]
    assert same(records_of(folder / "games"), records_of(folder / "whole"))
    other = selfplay(*words, "--opponent-weights", "", "--out", "games", "--resume", cwd=folder)
    assert other.returncode == 2


@pytest.mark.sample
@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["--opponent-weights", __file__], "Name one with --opponent-model", id="weights of no network"),
        pytest.param(
            ["--opponent-model", "uniform", "--opponent-weights", __file__], "uniform has no weights", id="of uniform"
        ),
        pytest.param(
            ["--opponent-model", "blobnet", "--opponent-weights", "nowhere"],
            "--opponent-weights: no file 'nowhere'",
            id="weights that are not there",
        ),
        pytest.param(["--opponent-model", "blobnte"], "Did you mean 'blobnet'?", id="no such opponent"),
        pytest.param(["--opponent-model", "no_such_module:make"], "set PYTHONPATH", id="no such module"),
        pytest.param(
            ["--model", "rollout", "--opponent-model", "blobnet"],
            "Name the network with --model; rollout may be the opponent.",
            id="no network",
        ),
    ],
)
def test_an_opponent_that_is_none_is_refused_at_once(words, message):
    made = selfplay(*words, cwd=HERE)
    assert made.returncode == 2, made.stderr
    assert message in complaint(made)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param(["strange_models:wrong_shapes"], "Let it return policy logits [2, 7]", id="of other outputs"),
        pytest.param(["strange_models:raises"], "the factory raised RuntimeError", id="cannot be built"),
        pytest.param(
            ["blobnet-small", "--opponent-weights", "small.safetensors"], "small.safetensors do not fit", id="of others"
        ),
        pytest.param(["blobnet-small", "--backend", "central"], "--backend inprocess", id="beside a server's model"),
    ],
)
def test_an_opponent_that_cannot_play_is_refused(tmp_path, words, message):
    (tmp_path / "strange_models.py").write_text((HERE / "strange_models.py").read_text())
    save_file({"first.weight": torch.zeros(3, 3)}, str(tmp_path / "small.safetensors"))
    match = [*BOARD, "--games", 4, "--workers", 1, "--model", "blobnet-small", "--opponent-model"]
    made = selfplay(*match, *words, cwd=tmp_path)
    assert made.returncode == 2, made.stderr
    assert message in complaint(made)
