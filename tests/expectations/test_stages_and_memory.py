"""Expectations of the batching toolkit's users: stages by name and by device, memory of training, memory given back."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from one_batch import answered
from text.toy import run
from torch import nn

from gpuinfer.api import ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.models.model_options import with_stage_devices
from gpuinfer.text.generator import open_generator
from gpuinfer.text.text_options import TorchModelOptions

WAIT_S = 120.0
FEATURES = 6
PROMPTS = [Prompt(text=text, key=text, sampling=Sampling(max_tokens=6)) for text in ("x", "def batch(rows):")]


class Coder(nn.Module):
    """Two parts that each hold layers of their own."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(features, 8), *(nn.Linear(8, 8) for _ in range(5)))
        self.decoder = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))

    def forward(self, rows):
        return self.decoder(self.encoder(rows))

    def segments(self):
        return [*self.encoder, *self.decoder]


def gpuinfer(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpuinfer", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)


async def rows_answered(**options):
    spec = ModelSpec(f"{__name__}:Coder", None, FEATURES)
    backend = InProcess(Setup(model=spec, devices=("cpu",), deterministic=True), max_rows=16, **options)
    rows = np.random.default_rng(0).standard_normal((12, FEATURES)).astype(np.float32)
    (answer,) = await answered(backend, [Request(rows, 12)])
    return answer


def texts(**options):
    setup = with_stage_devices(Setup(devices=("cpu",), deterministic=True), options.get("stages", "auto"))
    tuning = TorchModelOptions(slots=4, context=64, step_tokens=24, threads=1, **options)
    generator = open_generator(ModelSpec("tiny", kind="text"), setup, tuning)
    try:
        return [[one.tokens for one in outcome.completions] for outcome in run(generator, PROMPTS)]
    finally:
        generator.close()


# Stages


@pytest.mark.parametrize("points", ["encoder.4", "encoder.2,encoder.4,decoder", "2,encoder.5"])
async def test_split_points_may_be_names_of_layers(points):
    cut = await rows_answered(parallel="pipeline", split_points=points.split(","))
    np.testing.assert_array_equal(cut, await rows_answered())


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("encoder.9", r"no layer of .* is called 'encoder.9'. Did you mean .*encoder.5.* Its 8 layers: encoder.0"),
        ("decoder.1.weight", "inside layer 7, 'decoder.1'"),
        ("decoder,encoder.1", r"are the layers 6, 1 of .*Name the layers at which stages begin in their order"),
    ],
)
async def test_names_that_are_no_beginnings_of_stages_are_refused_with_the_nearest(point, said):
    with pytest.raises(UsageError, match=said):
        await rows_answered(parallel="layers", split_points=point.split(","))


def test_split_points_of_a_model_of_text_are_named_as_its_checkpoint_does():
    whole = texts()
    assert texts(parallel="pipeline", split_points=("model.layers.2", "layers.4")) == whole


async def test_stages_say_the_device_and_the_number_of_layers_of_each():
    shares = {"parallel": "pipeline", "stages": "cpu:5,cpu:1,cpu:2"}
    np.testing.assert_array_equal(await rows_answered(**shares), await rows_answered())
    assert texts(parallel="layers", stages="cpu:1,cpu:5") == texts(parallel="layers", stages=2) == texts()


def test_a_run_has_the_stages_that_were_shared_out(tmp_path):
    words = ["generate", "--model", "tiny", "--prompt", "Hello", "--no-live", "--json", str(tmp_path / "report.json")]
    ended = gpuinfer(*words, "-B", "parallel=pipeline", "-B", "stages=cpu:1,cpu:5")
    assert ended.returncode == 0, ended.stderr
    report = json.loads((tmp_path / "report.json").read_text())
    assert [stage["layers"] for stage in report["stages"]["stages"]] == [[0, 0], [1, 5]]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        ("cpu:12,cpu:20", "puts 32 layers on devices, and model 'tiny' has 6. Share out just these 6"),
        ("cpu:6", "1 stage. Write DEVICE:LAYERS for each stage"),
        ("cpu:3,cuda:1:3", "mixes the CPU with CUDA devices"),
        ("cuda:3,cuda:3", "'cuda:3' names no stage"),
        ("cpu:0,cpu:6", "'cpu:0' names no stage"),
    ],
)
def test_shares_that_do_not_fit_are_refused(stages, said):
    with pytest.raises((UsageError, ValueError), match=said):
        texts(parallel="layers", stages=stages)


def test_devices_of_stages_go_before_a_default_and_against_none_that_is_named():
    assert with_stage_devices(Setup(), "cuda:0:12,cuda:1:20,cuda:0:4").devices == ("cuda:0", "cuda:1")
    with pytest.raises(UsageError, match="Leave --device out"):
        with_stage_devices(Setup(devices=("cuda:0",)), "cuda:0:12,cuda:1:20")
