"""`gpuinfer memory` of a model in stages: what each takes, and what all of them in one memory do."""

from __future__ import annotations

import json

import jsonschema
import pytest
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.cli.app import run
from gpuinfer.errors import UsageError
from gpuinfer.lab.memory import memory_probe, probe_child
from gpuinfer.lab.memory.batch_trials import MemoryParts, StagesHere
from gpuinfer.lab.memory.probe_child import examine_memory
from gpuinfer.lab.memory.rows_memory import StagedRows
from gpuinfer.lab.memory.text_memory import StagedText, TextSubject
from gpuinfer.models.footprint import CpuMemoryMeter
from gpuinfer.models.pipeline import stage_plan
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.memory_estimate import empty_weights, model_weight_bytes
from gpuinfer.text.stages.open_staged_decoder import layer_bytes

ROWS = {"name": "blobnet-small", "inputs": 64, "input_dtype": "uint8", "arguments": {"actions": 8, "seats": 2}}
TEXT = {"name": "tiny", "kind": "text"}
OPTIONS = {"split_points": None, "stages": "auto", "micro_batch_rows": None, "layers": None, "threads": 1}
OF_ROWS = {"in_flight": None, "chunk_rows": None, "max_rows": None, "compile": False, "compute": "auto", "graphs": True}
BYTES = [f"{part}_bytes" for part in ("weights", "cache", "activations", "working")]


@pytest.fixture(autouse=True)
def in_this_process(monkeypatch):
    """What the child would do to itself is not done to a process of tests, nor what only a probe needs."""
    monkeypatch.setattr(CpuMemoryMeter, "bound", lambda self, beside: None)
    monkeypatch.setattr(CpuMemoryMeter, "forget", lambda self: None)
    for subject in (StagedRows, StagedText, TextSubject):
        monkeypatch.setattr(subject, "warm_up", lambda self: None)
    monkeypatch.setattr(stage_plan, "BUDGET_S", 0.0)
    yield
    torch.set_num_threads(1)


def looked_at(spec, batches=(), devices=("cpu",), context=None, **options):
    """The whole document, and its only memory."""
    asked = {"spec": spec, "devices": list(devices), "dtype": "float32", "seed": 0, "probe": False}
    asked |= {"options": {**OPTIONS, **OF_ROWS, **options}, "batch_size": list(batches), "context": context}
    told = next(examine_memory({**asked, "free": 4 << 30}))
    found = {"schema": memory_probe.SCHEMA, **told}
    (device,) = found["devices"]
    return found, device


def of_all(device, name):
    return sum(stage[name] for stage in device["stages"])


@pytest.mark.parametrize("spec", [ROWS, TEXT], ids=["rows", "text"])
def test_stages_add_up_to_the_memory_that_they_share(spec):
    found, device = looked_at(spec, [48], parallel="pipeline", split_points=[1])
    assert device["stages"][0]["layers"] == [0, 0]
    assert [stage["stage"] for stage in device["stages"]] == [0, 1]
    assert all(of_all(device, name) == device["batch"][name] for name in BYTES)
    assert all(sum(stage[name] for name in BYTES) == stage["estimated_bytes"] for stage in device["stages"])
    assert device["batch"]["estimated_bytes"] == of_all(device, "estimated_bytes") + device["batch"]["process_bytes"]
    assert (found["facts"]["split"], found["facts"]["stages"]) == ("given", 2)
    assert device["largest"]["batch"] > 48
    jsonschema.validate(found, memory_probe.memory_schema())


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")], ids=["one", "two stand-ins"])
def test_each_stage_of_text_has_its_share_of_the_cache(devices):
    _, device = looked_at(TEXT, [8], devices, 64, parallel="layers", split_points=[2])
    first, second = device["stages"]
    assert second["layers"] == [2, 5]
    assert second["cache_bytes"] == 2 * first["cache_bytes"] > 0
    _, whole = looked_at(TEXT, [8], context=64, parallel="data")
    assert first["cache_bytes"] + second["cache_bytes"] == whole["batch"]["cache_bytes"]
    assert whole["stages"] == []


@pytest.mark.parametrize("parallel", ["data", "layers"])
def test_pages_that_are_asked_for_are_what_every_batch_has(parallel):
    """Ten pages hold one full row of eight, and no more than ten rows have one each."""
    found, device = looked_at(TEXT, [4, 64], context=256, pages=10, parallel=parallel, split_points=[2])
    assert (device["pages"]["pages"], device["pages"]["slots"]) == (10, 10)
    assert [one["batch"] for one in (*device["also"], device["batch"])] == [4, 10]
    assert {one["cache_bytes"] for one in (*device["also"], device["batch"])} == {device["pages"]["cache_bytes"]}
    assert device["largest"]["batch"] == 10
    said = dict(memory_probe.memory_notes(found, device))
    assert said["largest batch"] == "10 rows at once, of which 1 may be full: -B pages allows no more"
    assert "as -B pages says" in said[""]
    jsonschema.validate(found, memory_probe.memory_schema())


@pytest.mark.parametrize(
    ("spec", "options", "words"),
    [
        pytest.param(ROWS, {"stages": 9}, r"9 stages, and .* 3 layers.*Use -B stages=3", id="rows, too many stages"),
        pytest.param(TEXT, {"stages": 9}, r"9 stages, and .* 6 layers.*Use -B stages=6", id="text, too many stages"),
        pytest.param(ROWS, {"split_points": [3]}, "Name points from 1 to 2", id="rows, a point beyond"),
        pytest.param(TEXT, {"split_points": [2, 6]}, "Name points from 1 to 5", id="text, a point beyond"),
        pytest.param({"name": "null", "kind": "text"}, {}, "Leave -B parallel out", id="no layers"),
    ],
)
def test_stages_that_cannot_be_are_refused_with_the_cure(spec, options, words):
    with pytest.raises(UsageError, match=words):
        looked_at(spec, parallel="pipeline", **options)


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        (["parallel=pipeline", "split_points=2,1"], "Name the layers at which stages begin in their order"),
        (["split_points=2"], "Add -B parallel=pipeline"),
        (["parallel=layers", "stages=3", "split_points=2"], "Leave one of them out"),
    ],
)
def test_points_that_do_not_go_together_are_refused_before_anything_is_started(words, cure, gpuinfer):
    options = [part for word in words for part in ("-B", word)]
    code, _, said = gpuinfer("memory", "--model", "blobnet", *options)
    assert code == 2
    assert cure in " ".join(said.split())


@pytest.mark.parametrize("name", ["tiny", "tiny-llada-moe", "tiny-sdar"])
def test_weights_without_memory_are_as_large_as_those_with_it(name):
    checkpoint = open_checkpoint(ModelSpec(name, kind="text"))
    empty = empty_weights(checkpoint.layout, torch.bfloat16)
    assert list(layer_bytes(empty)) == list(layer_bytes(checkpoint.weights(torch.bfloat16)))
    assert sum(layer_bytes(empty)) >= model_weight_bytes(
        checkpoint.layout, torch.bfloat16
    )  # a head may be the embedding


class Three:
    """Stages on two devices, of which the first has two."""

    first, most, usual, timed = 1, 1000, 10, False
    places = ("cuda:0", "cuda:1", "cuda:0")

    def warm_up(self):
        pass

    describe = facts = warm_up

    def pages(self, free):
        return None

    def layers(self):
        return [(0, 1), (2, 2), (3, 5)]

    def parts(self, batch):
        return [MemoryParts(0, 100 * number, batch, 10, 1) for number in (1, 2, 3)]

    def run(self, batch):
        return 0.0


def test_a_memory_has_the_stages_that_lie_on_its_device_and_the_process():
    here = StagesHere(Three(), "cuda:0")
    here.process = 7
    assert here.parts(5) == MemoryParts(7, 400, 10, 20, 2)
    assert [(one.stage, one.layers) for one in here.stages(5)] == [(0, (0, 1)), (2, (3, 5))]


def test_each_device_is_one_memory_whatever_the_model_does_there(monkeypatch):
    devices = [torch.device("cuda", number) for number in (0, 1)]
    setup = Setup(devices=("cuda:0", "cuda:1"))
    monkeypatch.setattr(probe_child, "_staged", lambda *_: Three())
    monkeypatch.setattr(probe_child, "_whole", lambda spec, own, *_: own.devices)

    def subjects(parallel, devices):
        return list(probe_child._subjects(ModelSpec("net"), setup, {"options": {"parallel": parallel}}, devices))

    first, second = subjects("pipeline", devices)
    assert [one.stage for one in first[2].stages(1)] == [0, 2]
    assert [one.stage for one in second[2].stages(1)] == [1]
    assert subjects("data", devices) == [(devices[0], 1, ("cuda:0",)), (devices[1], 1, ("cuda:1",))]
    cpu = torch.device("cpu")
    assert subjects("data", [cpu, cpu]) == [(cpu, 2, ("cpu",))]  # two copies in one memory


def a_stage(number, layers, **changes):
    sizes = dict.fromkeys([*BYTES, "estimated_bytes"], 1 << 20)
    return {"stage": number, "layers": layers, **sizes, **changes}


def a_device(name, largest, *stages):
    batch = {"batch": 4, "process_bytes": 0, **dict.fromkeys([*BYTES, "estimated_bytes"], 1 << 20)}
    return {
        "device": name,
        "copies": 1,
        "free_bytes": 10 << 30,
        "room_bytes": 9 << 30,
        "batch": batch,
        "stages": list(stages),
        "pages": None,
        "also": [],
        "largest": {"batch": largest, "by_estimate": largest, "by_measurement": None, "bound": "memory"},
        "estimated": {**batch, "batch": largest},
        "tried": [],
        "not_tried": None,
        "others": [],
    }


def test_people_see_the_stages_of_all_devices_in_their_order_and_the_least_largest_batch():
    facts = {"parallel": "pipeline", "stages": 3, "split": "time", "micro_batch_rows": 512, "forwards": 4}
    found = {
        "schema": memory_probe.SCHEMA,
        "model": "net",
        "kind": "rows",
        "dtype": "float32",
        "asked": None,
        "facts": facts,
        "devices": [
            a_device("cuda:0", 900, a_stage(0, [0, 1]), a_stage(2, [4, 4])),
            a_device("cuda:1", 70, a_stage(1, [2, 3], cache_bytes=0)),
        ],
    }
    jsonschema.validate(found, memory_probe.memory_schema())
    assert memory_probe.in_stages(found)
    assert memory_probe.memory_heading(found, found["devices"][0]).endswith(
        "on cuda:0, 2 of 3 stages in one memory (pipeline)"
    )
    assert memory_probe.stage_columns(found) == ["stage", "on", "weights", "caches", "activations", "working", "in all"]
    assert [row[:2] for row in memory_probe.stage_rows(found)] == [
        ("0, layers 0 to 1", "cuda:0"),
        ("1, layers 2 to 3", "cuda:1"),
        ("2, layer 4", "cuda:0"),
    ]
    notes = dict(memory_probe.stage_notes(found))
    assert notes["largest batch"] == "70 rows: the least of all, on cuda:1"
    assert notes["free"] == "10.0 GiB on cuda:0, 10.0 GiB on cuda:1"
    assert "-B split_points=2,4 keeps it so" in notes["split"]
    assert notes["micro-batches"].endswith("of 4 batches in flight")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("blobnet-small", ["parallel=pipeline"]),
        ("tiny", ["parallel=layers", "stages=3"]),
    ],
)
def test_the_estimate_of_all_stages_is_near_what_is_measured(model, words, capsys):
    options = [part for word in words for part in ("-B", word)]
    assert run(["memory", "--model", model, "--free", "2GiB", "--device", "cpu", "--json", "-", *options]) == 0
    (device,) = json.loads(capsys.readouterr().out)["devices"]
    assert device["not_tried"] is None
    assert 0.75 < device["tried"][-1]["ratio"] < 1.3  # docs/memory.md has figures
    assert 0 < device["largest"]["batch"] <= device["largest"]["by_estimate"]
    assert len(device["stages"]) == (3 if model == "tiny" else 2)
