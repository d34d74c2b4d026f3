"""`gpuinfer memory`: an estimate beside what a child process measured."""

from __future__ import annotations

import json

import pytest

from gpuinfer.cli.app import run
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.commands import Ended
from gpuinfer.memory import document, probing
from gpuinfer.units import size

FREE = "2GiB"


def told(capsys, *words):
    assert run(["memory", *words, "--json", "-", "--device", "cpu", "-B", "threads=1"]) == 0
    return json.loads(capsys.readouterr().out)


def parts_add_up(said):
    parts = [said[f"{part}_bytes"] for part in document.PARTS]
    return sum(parts) == said["estimated_bytes"]


def test_a_network_of_rows_without_a_probe(capsys):
    found = told(capsys, "--model", "blobnet-small", "--no-probe", "--free", FREE)
    assert found["schema"] == "gpuinfer.memory/1"
    assert (found["kind"], found["tried"], found["free_bytes"]) == ("rows", [], size(FREE))
    assert parts_add_up(found["batch"])
    assert parts_add_up(found["estimated"])
    assert found["estimated"]["estimated_bytes"] <= found["room_bytes"]
    assert found["largest"]["batch"] == found["estimated"]["batch"] > 10_000


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["blobnet", "tiny", "tiny-llada"])
def test_the_estimate_is_near_what_is_measured(model, capsys):
    found = told(capsys, "--model", model, "--free", FREE)
    assert found["not_tried"] is None
    assert 0.8 < found["tried"][-1]["ratio"] < 1.25  # docs/memory.md has the figures of a quiet machine
    assert 0 < found["largest"]["batch"] <= found["largest"]["by_estimate"]


@pytest.mark.thorough
def test_a_batch_that_does_not_fit_is_told_with_the_largest_that_does():
    with pytest.raises(UsageError, match=r"60000: .* slots need .*largest that fits is --batch-size \d"):
        run(["memory", "--model", "tiny", "--batch-size", "60000", "--free", FREE, "--no-probe", "--quiet"])


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "tiny", "--context", "1000000"], "the model was made for"),
        (["--model", "no/such/folder"], "there is no model folder"),
        (["--model", "tiny", "--free", "64MB"], "does not fit.*not enough for one.*a shorter --context"),
        (["--model", "null"], "computes nothing"),
    ],
)
def test_errors_of_the_child_are_the_commands_own(words, complaint):
    with pytest.raises(UsageError, match=complaint):
        run(["memory", *words, "--no-probe", "--quiet", "--device", "cpu"])


@pytest.mark.parametrize("given", [["--free", "much"], ["--batch-size", "0"], ["--dtype", "int4"]])
def test_what_is_no_value_is_refused_before_anything_is_started(given):
    with pytest.raises(UsageError):
        run(["memory", "--model", "blobnet", *given])


SAID = {
    "model": "toy",
    "kind": "text",
    "asked": False,
    "device": "cuda:0",
    "dtype": "float32",
    "facts": {"context": 64},
    "free_bytes": 10 << 30,
    "room_bytes": 9 << 30,
    "batch": {"batch": 4, **{f"{part}_bytes": 1 << 20 for part in document.PARTS}, "estimated_bytes": 5 << 20},
    "largest": {"batch": 400, "by_estimate": 400, "by_measurement": None, "bound": "memory"},
    "estimated": {"batch": 400, **{f"{part}_bytes": 1 << 20 for part in document.PARTS}, "estimated_bytes": 5 << 20},
    "tried": [],
    "others": [{"pid": 7, "name": "trainer", "mb": 2048.0}, {"pid": 8, "name": "", "mb": None}],
}


def after(monkeypatch, code, *lines, err=b"last words\n"):
    """What becomes of a child that says these lines and ends so."""
    out = b"".join(json.dumps(line).encode() + b"\n" for line in lines) + b'{"half a li'
    monkeypatch.setattr(probing.commands, "run", lambda *given: Ended(code, out, err))
    from gpuinfer.api import ModelSpec, Setup
    from gpuinfer.memory.asked import Options

    return probing.examined(ModelSpec("toy", kind="text"), Setup(), Options(model="toy"), {})


@pytest.mark.parametrize(
    ("code", "why"),
    [(-9, "killed by signal 9"), (1, "last words"), (None, "longer than")],
    ids=["killed", "failed", "slow"],
)
def test_a_child_that_dies_while_it_measures_has_told_the_estimate(code, why, monkeypatch):
    found = after(monkeypatch, code, SAID)
    assert why in found["not_tried"]
    assert ("not tried", found["not_tried"]) in list(document.notes(found))


def test_a_child_that_dies_at_once_is_an_error_with_a_cure(monkeypatch):
    with pytest.raises(WorkError, match=r"last words.*--no-probe"):
        after(monkeypatch, 1)


def test_people_see_each_batch_and_who_else_is_on_the_device(monkeypatch):
    tried = {**SAID["batch"], "batch": 100, "measured_bytes": 100 << 20, "ratio": 0.05, "seconds": 1.0}
    largest = {"batch": 360, "by_estimate": 400, "by_measurement": 360, "bound": "memory"}
    found = after(monkeypatch, 0, SAID, {**SAID, "tried": [tried], "not_tried": None, "largest": largest})
    assert document.columns(found) == ["slots", "4", "100", "400"]
    shown = document.rows(found)
    assert shown[0] == ("process", "1.0 MiB", "1.0 MiB", "1.0 MiB")
    assert shown[-2:] == [("measured", "–", "100 MiB", "–"), ("ratio", "–", "0.05", "–")]
    notes = [text for _, text in document.notes(found)]
    assert "trainer (pid 7) holds 2.0 GiB of this device" in notes
    assert "a process (pid 8) holds memory that the driver does not tell of this device" in notes
    assert "400 by the estimate, 360 by what was measured" in notes
    assert document.heading(found) == "memory · toy · float32 on cuda:0, a context of 64"
