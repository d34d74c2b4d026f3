"""Expectations of the batching toolkit's users: stages by name and by device, memory of training, memory given back."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import jsonschema
import numpy as np
import pytest
import torch
from one_batch import answered
from text.toy import run
from torch import nn

from gpuinfer.api import ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.config.options import GivenValue, check
from gpuinfer.errors import UsageError
from gpuinfer.generation import Prompt, Sampling
from gpuinfer.gradients import TrainingBatch
from gpuinfer.lab.memory.memory_options import MemoryOptions, memory_model
from gpuinfer.lab.memory.memory_probe import SCHEMA, memory_pages, memory_schema
from gpuinfer.lab.memory.probe_child import examine_memory
from gpuinfer.lab.memory.training_memory import TrainingSubject
from gpuinfer.models.footprint import traced_peak
from gpuinfer.models.gradients import GradientPass
from gpuinfer.models.model_options import with_stage_devices
from gpuinfer.models.networks import BlobNet
from gpuinfer.text.decoder.compiled_decoder import CpuDecoder
from gpuinfer.text.decoder.torch_decoder import TorchDecoder
from gpuinfer.text.generator import open_generator
from gpuinfer.text.generator.memory_fitting import MemoryFitter
from gpuinfer.text.generator.prompts import Prepared
from gpuinfer.text.text_options import TorchModelOptions
from gpuinfer.workloads.optimizer import Stepper

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


class NoLayers(nn.Module):
    """Answers one tensor, and has no list of layers."""

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(features, 8), nn.Linear(8, 2)

    def forward(self, rows):
        return self.second(self.first(rows))


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
        ("encoder", "is layer 0, where the first stage begins anyway. Leave it out, and name .* such as encoder.1"),
        ("decoder,encoder.1", r"are the layers 6, 1 of .*Name the layers at which stages begin in their order"),
    ],
)
async def test_names_that_are_no_beginnings_of_stages_are_refused_with_the_nearest(point, said):
    with pytest.raises(UsageError, match=said):
        await rows_answered(parallel="layers", split_points=point.split(","))


def test_a_split_point_that_is_no_layers_number_is_complained_about_once():
    with pytest.raises(UsageError) as refused:
        check(InProcess.Options, {"split_points": GivenValue("0", "-B split_points")}, "inprocess")
    assert str(refused.value) == "-B split_points: '0' is less than 1. Give 1 or more."


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


# Memory of training

SIZED = {"inputs": FEATURES, "input_dtype": "float32"}
TUNING = InProcess.Options(threads=1).model_dump(mode="json")


@pytest.mark.parametrize("segments", [pytest.param(None, marks=pytest.mark.thorough), 2])
def test_training_is_estimated_near_the_tensors_that_a_real_step_holds_at_its_peak(segments):
    spec = ModelSpec("blobnet", None, 96, "uint8", {"actions": 40, "seats": 4})
    setup, device, rows = Setup(model=spec, devices=("cpu",)), torch.device("cpu"), 1024
    subject = TrainingSubject(spec, setup, TUNING, device, segments)
    subject.describe()

    def trained():  # as `gpuinfer train` does
        passes = GradientPass(BlobNet(96, 40, 4).float(), spec, checkpoint_segments=segments)
        stepper = Stepper(spec, 0, weight_decay=0.01, clip_norm=1.0)
        features = np.ones((rows, 96), np.uint8)
        targets = {"policy": np.full((rows, 40), 1 / 40, np.float32), "value": np.zeros((rows, 4), np.float32)}
        for version in range(2):
            stepper.step(passes(TrainingBatch(features, targets, stepper.weights, version)), rate=1e-3)
        return passes, stepper

    ratio = subject.tensor_bytes(rows) / traced_peak(trained)
    assert 0.9 < ratio < 1.25
    parts = subject.parts(rows)
    trained_numbers = sum(one.numel() for one in BlobNet(96, 40, 4).parameters())
    assert (parts.gradients, parts.optimizer) == (4 * trained_numbers, 8 * trained_numbers)


def examined_training(spec, **more):
    asked = {"spec": spec, "devices": ["cpu"], "dtype": "float32", "seed": 0, "options": {**TUNING, **more}}
    asked |= {"batch_size": [], "context": None, "free": 2 * GIB, "probe": False, "training": True}
    for found in examine_memory(asked):
        document = {"schema": SCHEMA, **found}
    jsonschema.validate(document, memory_schema())
    return document


@pytest.mark.usefixtures("unbounded_memory")
def test_training_with_checkpointing_has_fewer_activations_and_larger_batches():
    found = examined_training({"name": "blobnet", "inputs": 96, "arguments": {"actions": 40, "seats": 4}})
    kept, divided = found["devices"]
    assert (kept["checkpoint_segments"], divided["checkpoint_segments"]) == (None, 2)
    assert divided["activation_row_bytes"] < 0.8 * kept["activation_row_bytes"]
    assert divided["largest"]["batch"] > 1.2 * kept["largest"]["batch"] > 0
    *_, page = memory_pages(found)
    assert page.table.columns[1:] == ["all activations kept", "checkpoint_segments=2"]
    assert f"{divided['largest']['batch']:,}" in page.verdict


@pytest.mark.usefixtures("unbounded_memory")
def test_training_of_a_model_whose_layers_cannot_be_told_apart_says_why_there_is_one_column():
    found = examined_training({"name": f"{__name__}:NoLayers", **SIZED})
    assert len(found["devices"]) == 1
    assert "cannot be told apart" in dict(list(memory_pages(found))[-1].notes)["checkpointing"]
    with pytest.raises(UsageError, match="cannot be told apart"):
        examined_training({"name": f"{__name__}:NoLayers", **SIZED}, checkpoint_segments=2)


@pytest.mark.thorough
def test_memory_with_training_shows_both_ways_at_the_command_line():
    said = gpuinfer("memory", "--model", "blobnet", "--training", "--free", "1GiB", "--no-probe").stdout
    for words in ("gradients", "optimizer", "activations of a row", "checkpoint_segments=2", "largest batch"):
        assert words in said


def test_training_is_of_networks_of_rows():
    with pytest.raises(UsageError, match="is a model of text"):
        memory_model(MemoryOptions(model="tiny", training=True), Setup())


# Memory that others need

GIB = 1 << 30
LONG = [
    Prompt(text=f"prompt {n} " * 4, key=str(n), sampling=Sampling(max_tokens=16, ignore_eos=True)) for n in range(6)
]


class FakeDevice:
    """How much is free, as a test says."""

    def __init__(self) -> None:
        self.free = 4 * GIB

    def __call__(self) -> int:
        return self.free


@contextlib.contextmanager
def opened_text(dtype="float32", slots=16, context=256, **options):
    setup = Setup(devices=("cpu",), dtype=dtype, deterministic=True)
    tuning = TorchModelOptions(slots=slots, context=context, step_tokens=64, threads=1, **options)
    generator = open_generator(ModelSpec("tiny", kind="text"), setup, tuning)
    try:
        yield generator
    finally:
        generator.close()


def stepped(generator, at=None):
    """The tokens of all answers; `at` says what is done once so many steps are."""
    waiting = list(enumerate(generator.prepare(LONG)))
    assert all(isinstance(one, Prepared) for _, one in waiting)
    outcomes, steps = {}, 0
    while waiting or generator.busy:
        while waiting and waiting[0][1].samples <= generator.free_slots:
            generator.add(*waiting.pop(0))
        outcomes.update(generator.step().finished)
        steps += 1
        if at and steps in at:
            at[steps]()
    return [outcomes[number].completions[0].tokens for number in range(len(LONG))]


@pytest.mark.parametrize("way", ["pages go back one by one", "torch's cache on a CPU", "a cache of another size"])
def test_slots_follow_what_is_free_down_and_up_again_between_bounds_and_no_answer_changes(way, monkeypatch):
    if way == "a cache of another size":  # as on CUDA
        monkeypatch.setattr(TorchDecoder, "pages_go_back", False)
    dtype = "float32" if way == "pages go back one by one" else "float16"
    with opened_text(dtype) as generator:
        assert isinstance(generator.decoder, CpuDecoder if dtype == "float32" else TorchDecoder)
        whole = stepped(generator)
    device, told = FakeDevice(), list[int]()
    with opened_text(dtype) as generator:
        fitter = MemoryFitter(generator, device, keep_free=GIB, min_slots=3, resized=told.append)
        pages = generator.decoder.pages

        def free(size, due=True):
            device.free = size
            assert fitter.is_due == due
            return fitter.fit()

        at = {
            3: lambda: free(2 * GIB, due=False),
            6: lambda: free(0),
            8: lambda: free(0),  # as low as it goes
            12: lambda: free(GIB + 60 * fitter.bounds.page_bytes),
            14: lambda: free(GIB + 1, due=False),  # no fewer, no more
            16: lambda: free(4 * GIB),
        }
        assert stepped(generator, at) == whole
    assert told[0] == 3
    assert told == sorted(told)
    assert told[-1] == 16
    counted = fitter.counted()
    assert (counted["slots"], counted["pages"], counted["shortages"]) == (16, pages, 2)
    assert counted["resized"] == len(told) == 3


def test_prompt_of_more_samples_than_slots_are_left_is_answered():
    device = FakeDevice()
    prompt = Prompt(text="Hello", sampling=Sampling(max_tokens=4, ignore_eos=True), samples=8)
    with opened_text() as generator:
        fitter = MemoryFitter(generator, device, keep_free=GIB)
        device.free = 0
        fitter.fit()
        assert fitter.counted()["slots"] < 8
        (outcome,) = run(generator, [prompt])
        assert len(outcome.completions) == 8


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_memory_of_pages_that_are_not_in_use_goes_back_to_the_system(dtype):
    with opened_text(dtype, slots=64, context=512) as generator:
        fitter = MemoryFitter(generator, lambda: GIB)
        whole = stepped(generator)
        kept = generator.pages_in_use
        generator.decoder.empty()  # every page has been written
        freed = fitter.give_back()
        assert kept > 0
        assert freed.freed_pages == kept
        assert generator.pages_in_use == 0
        assert freed.freed_bytes > generator.decoder.cache_bytes() / 2
        assert stepped(generator) == whole


def asked(url, body=None, key=None):
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    request = urllib.request.Request(url, None if body is None else json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=WAIT_S) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_server_leaves_memory_to_others_by_itself_and_by_a_request(tmp_path):
    (tmp_path / "key").write_text("sesame")
    (tmp_path / "key").chmod(0o600)
    words = ["serve", "--model", "tiny", "--port", "0", "--admin-key-file", str(tmp_path / "key"), "--context", "256"]
    command = [sys.executable, "-m", "gpuinfer", *words, "-B", "keep_free=900TiB", "-B", "min_slots=3"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert server.stdout is not None
        url, said = "", ""
        for line in server.stdout:  # until it has found out, or ended
            url = url or "".join(re.findall(r"(http://\S+:\d+),", line))
            said += line
            if "slots" in line:
                break
        assert re.search(r"free on cpu, less than keep_free=900 TiB: 64 → 3 slots", said), said
        assert re.search(r"^gpuinfer_slots 3.0$", asked(f"{url}/metrics")[1], re.MULTILINE)
        assert asked(f"{url}/v1/free_memory", {})[0] == 401
        status, answer = asked(f"{url}/v1/free_memory", {}, "sesame")
        assert status == 200
        assert {"freed_bytes", "free_bytes", "freed_pages"} < json.loads(answer).keys()
        asking = {"model": "tiny", "prompt": ["Hello"] * 5, "max_tokens": 4}
        assert len(json.loads(asked(f"{url}/v1/completions", asking)[1])["choices"]) == 5
        server.send_signal(signal.SIGINT)
        server.communicate(timeout=WAIT_S)
    finally:
        server.kill()
        server.communicate()
    assert server.returncode in (0, 3, -signal.SIGINT)
