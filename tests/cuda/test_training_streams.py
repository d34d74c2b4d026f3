"""`gpuinfer train` on a device that is recorded: it learns what a CPU does, and leaves no race between its threads."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path += [str(Path(__file__).parents[1] / part) for part in (".", "train")]

from streamed import found
from train_models import positions

from gpuinfer.models.positions import PositionsFolder


@pytest.fixture
def train(gpuinfer, tmp_path):
    """The command on a device, to a folder of that name; the rows of its loss curve."""
    games = PositionsFolder(tmp_path / "games")
    games.open({"game": "made up", "game_options": {}}, resume=False)
    games.write(positions(200))
    games.close(1)

    def run(device, *words, out, steps=6, model="train_models:Normed"):
        told = {"records": tmp_path / "games", "out": tmp_path / out, "model": model, "steps": steps, "device": device}
        told |= {"batch_size": 16, "checkpoint_every": 3, "warmup_steps": 2, "schedule": "constant"}
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in told.items()]
        code, _, errors = gpuinfer("train", *flags, "-B", "threads=1", "--quiet", "--no-picture", *words)
        assert code == 0, errors
        return [json.loads(line) for line in (tmp_path / out / "loss.jsonl").read_text().splitlines()]

    return run


def assert_close(rows, expected):
    assert [row.keys() for row in rows] == [row.keys() for row in expected]
    for row, other in zip(rows, expected, strict=True):
        np.testing.assert_allclose([*row.values()], [*other.values()], rtol=1e-4, err_msg=f"{row} {other}")


@pytest.mark.sample
@pytest.mark.parametrize("device", ["cuda:0", "cuda:1"])
def test_training_on_a_device_is_that_on_a_cpu(recorded, train, device):
    assert_close(train(device, out="there"), train("cpu", out="here"))
    assert found(recorded) == []


@pytest.mark.thorough
def test_what_a_device_has_begun_a_cpu_goes_on_with_and_the_other_way_round(recorded, train):
    expected = train("cpu", out="whole")
    for first, second in (("cuda:0", "cpu"), ("cpu", "cuda:0")):
        out = first.replace(":", "-")
        train(first, out=out, steps=3)
        assert_close(train(second, "--resume", out=out), expected)
    assert found(recorded) == []
