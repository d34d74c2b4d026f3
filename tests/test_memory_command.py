"""`gpuinfer memory`: an estimate beside what a child process measured."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import torch

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.cli.app import run
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.children import FinishedProgram
from gpuinfer.lab.memory import memory_probe, probe_child
from gpuinfer.lab.memory.memory_options import MemoryOptions
from gpuinfer.lab.memory.probe_child import examine_memory
from gpuinfer.lab.memory.rows_memory import RowsSubject

FREE = "2GiB"


def told(capsys, *words, device="cpu"):
    assert run(["memory", *words, "--json", "-", "--device", device, "-B", "threads=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, memory_probe.memory_schema())
    (device,) = found["devices"]
    return device


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("model", "device"), [("blobnet", "cpu"), ("tiny", "cpu"), ("tiny-llada", "cpu"), ("blobnet-small", "cpu,cpu")]
)
def test_the_estimate_is_near_what_is_measured(model, device, capsys):
    found = told(capsys, "--model", model, "--free", FREE, device=device)
    assert found["not_tried"] is None
    assert found["copies"] == len(device.split(","))
    assert 0.8 < found["tried"][-1]["ratio"] < 1.25  # docs/memory.md has the figures
    assert 0 < found["largest"]["batch"] <= found["largest"]["by_estimate"]


@pytest.mark.thorough
def test_a_batch_that_does_not_fit_is_told_with_the_largest_that_does():
    with pytest.raises(UsageError, match=r"60000: .* full rows need .*fits is --batch-size \d.*in 64 pages"):
        run(["memory", "--model", "tiny", "--batch-size", "60000", "--free", FREE, "--no-probe", "--quiet"])


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"context": 1_000_000}, "the model was made for"),
        ({"spec": {"name": "no/such/folder", "kind": "text"}}, "there is no model folder"),
        ({"spec": {"name": "null", "kind": "text"}}, "computes nothing"),
        ({"devices": ["cuda:77"]}, "no device 'cuda:77'"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_tried(changes, complaint):
    asked = {"spec": {"name": "tiny", "kind": "text"}, "devices": ["cpu"], "dtype": "float32", "seed": 0}
    asked |= {"options": {}, "batch_size": None, "context": None, "free": None, "probe": False}
    with pytest.raises(UsageError, match=complaint):
        next(examine_memory({**asked, **changes}))


@pytest.mark.parametrize(
    ("parameters", "cure"),
    [("actions, seats", "Give --actions N and --seats N"), ("depth", "Give the others defaults")],
)
def test_what_a_factory_wants_is_named_by_its_flags(parameters, cure, tmp_path, monkeypatch):
    module = f"wants_{parameters[:5]}"
    (tmp_path / f"{module}.py").write_text(f"def factory(features, {parameters}):\n    raise AssertionError\n")
    monkeypatch.syspath_prepend(tmp_path)
    setup = Setup(model=ModelSpec(f"{module}:factory", inputs=4), devices=("cpu",))
    options = InProcess.Options(threads=1).model_dump(mode="json")
    with pytest.raises(UsageError, match=cure):
        RowsSubject(setup.model, setup, options, torch.device("cpu"), 1).describe()


@pytest.mark.parametrize(
    ("free", "cure"), [(1 << 20, r"more than the 1\.0 MiB of --free. Give a larger"), (None, "Free some memory")]
)
def test_memory_that_runs_out_at_the_first_look_is_told_without_the_allocators_words(free, cure):
    error = probe_child.no_room(RuntimeError("DefaultCPUAllocator: can't allocate memory"), {"free": free})
    assert re.search(cure, str(error))
    assert "Allocator" not in str(error)
    assert probe_child.no_room(RuntimeError("shapes do not fit"), {"free": free}) is None


@pytest.mark.parametrize(("probe", "said"), [(True, "Try --no-probe"), (False, "`gpuinfer doctor`")])
def test_a_child_without_a_word_is_told_with_a_cure_that_is_left(probe, said, monkeypatch):
    monkeypatch.setattr(memory_probe.children, "run_program", lambda *_: FinishedProgram(1, b"", b"it broke"))
    with pytest.raises(WorkError, match=said) as caught:
        memory_probe.probe_memory(ModelSpec("tiny", kind="text"), Setup(), MemoryOptions(model="tiny", probe=probe), {})
    assert ("--no-probe" in str(caught.value)) == probe


def test_several_batches_are_estimated_and_the_largest_is_what_is_asked_for():
    asked = {"spec": {"name": "tiny", "kind": "text"}, "devices": ["cpu"], "dtype": "float32", "seed": 0}
    asked |= {"options": {}, "batch_size": [2, 8, 64], "context": 64, "free": 4 << 30, "probe": False}
    found = next(examine_memory(asked))
    (device,) = found["devices"]
    assert found["asked"] == device["batch"]["batch"] == 64
    assert [one["batch"] for one in device["also"]] == [2, 8]
    assert memory_probe.memory_columns({**found, "schema": ""}, device)[1:4] == ["2", "8", "64"]
    few, more = (one["estimated_bytes"] for one in device["also"])
    assert few < more < device["batch"]["estimated_bytes"]


PARTS = {"batch": 4, **{f"{part}_bytes": 1 << 20 for part in memory_probe.PARTS}, "estimated_bytes": 5 << 20}
DEVICE = {
    "device": "cuda:0",
    "copies": 1,
    "free_bytes": 10 << 30,
    "room_bytes": 9 << 30,
    "batch": PARTS,
    "stages": [],
    "pages": None,
    "also": [],
    "largest": {"batch": 400, "by_estimate": 400, "by_measurement": None, "bound": "memory"},
    "estimated": {**PARTS, "batch": 400},
    "tried": [],
    "not_tried": None,
    "others": [{"pid": 7, "name": "trainer", "mb": 2048.0}, {"pid": 8, "name": "", "mb": None}],
}
TRIED = {
    **DEVICE,
    "tried": [{**PARTS, "batch": 100, "measured_bytes": 100 << 20, "ratio": 0.05, "seconds": 1.0}],
    "largest": {"batch": 360, "by_estimate": 400, "by_measurement": 360, "bound": "memory"},
}


def said(*devices, asked=None):
    return {
        "model": "toy",
        "kind": "text",
        "dtype": "float32",
        "asked": asked,
        "facts": {"context": 64},
        "devices": list(devices),
    }


def after(monkeypatch, code, *lines, err=b"last words\n"):
    """What becomes of a child that says these lines and ends so."""
    out = b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b'{"half a li'
    monkeypatch.setattr(memory_probe.children, "run_program", lambda *given: FinishedProgram(code, out, err))
    from gpuinfer.api import ModelSpec, Setup
    from gpuinfer.lab.memory.memory_options import MemoryOptions

    found = memory_probe.probe_memory(ModelSpec("toy", kind="text"), Setup(), MemoryOptions(model="toy"), {})
    jsonschema.validate(found, memory_probe.memory_schema())
    return found


@pytest.mark.parametrize(
    ("code", "why"),
    [(-9, "killed by signal 9"), (1, "last words"), (None, "longer than")],
    ids=["killed", "failed", "slow"],
)
def test_a_child_that_dies_while_it_measures_has_told_the_estimate(code, why, monkeypatch):
    other = {**DEVICE, "device": "cuda:1"}
    found = after(monkeypatch, code, said(DEVICE, other), said(TRIED, other))
    one, other = found["devices"]
    assert one["not_tried"] is None
    assert why in other["not_tried"]
    assert ("not tried", other["not_tried"]) in list(memory_probe.memory_notes(found, other))


def test_what_does_not_fit_is_told_of_the_device_with_least_room(monkeypatch):
    small = {
        **DEVICE,
        "device": "cuda:1",
        "batch": {**PARTS, "batch": 401},
        "largest": {**DEVICE["largest"], "batch": 9},
    }
    with pytest.raises(UsageError, match=r"free on cuda:1 may be taken. The largest that fits is --batch-size 9"):
        after(monkeypatch, 0, said(DEVICE, small, asked=401), said(DEVICE, small, asked=401))


def test_people_see_each_batch_and_who_else_is_on_the_device(monkeypatch):
    found = after(monkeypatch, 0, said(DEVICE), said(TRIED))
    (device,) = found["devices"]
    assert memory_probe.memory_columns(found, device) == ["full rows", "4", "100", "400"]
    shown = memory_probe.memory_rows(device)
    assert shown[0] == ("process", "1.0 MiB", "1.0 MiB", "1.0 MiB")
    assert shown[-2:] == [("measured", "–", "100 MiB", "–"), ("ratio", "–", "0.05", "–")]
    notes = [text for _, text in memory_probe.memory_notes(found, device)]
    assert "trainer (pid 7) holds 2.0 GiB of this device" in notes
    assert "a process (pid 8) holds memory that the driver does not tell of this device" in notes
    assert "400 by the estimate, 360 by what was measured" in notes
    assert memory_probe.memory_heading(found, device) == "memory · toy · float32 on cuda:0, a context of 64"
