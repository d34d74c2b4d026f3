"""`gpuinfer memory`: an estimate beside what a child process measured, of whole models and of stages."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from gpuinfer.api import ModelSpec, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.cli.app import run
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.child import ChildLost
from gpuinfer.lab.memory import memory_probe, probe_child, rows_memory
from gpuinfer.lab.memory.batch_trials import MemoryParts, StageParts, StagesHere, largest_batch
from gpuinfer.lab.memory.memory_options import MemoryOptions, memory_model
from gpuinfer.lab.memory.probe_child import examine_memory
from gpuinfer.lab.memory.rows_memory import RowsSubject, StagedRows
from gpuinfer.lab.memory.text_memory import StagedText, TextSubject
from gpuinfer.models.footprint import HELD, activations, weight_bytes
from gpuinfer.models.networks import PackedAffine
from gpuinfer.models.pipeline import stage_plan
from gpuinfer.text.checkpoint import open_checkpoint
from gpuinfer.text.checkpoint.memory_estimate import empty_weights, model_weight_bytes, page_bytes, working
from gpuinfer.text.decoder.compiled_decoder import CpuDecoder, cpu_available
from gpuinfer.text.stages.open_staged_decoder import layer_bytes
from gpuinfer.units import memory, size

ROWS = {"name": "blobnet-small", "inputs": 64, "input_dtype": "uint8", "arguments": {"actions": 8, "seats": 2}}
TEXT = {"name": "tiny", "kind": "text"}
OPTIONS = {"split_points": None, "stages": "auto", "micro_batch_rows": None, "layers": None, "threads": 1}
OPTIONS |= {
    "in_flight": None,
    "chunk_rows": None,
    "max_rows": None,
    "compile": False,
    "compute": "auto",
    "graphs": True,
}
BYTES = [f"{part}_bytes" for part in ("weights", "cache", "activations", "working")]


# The command, with a child process that measures


def measured(capsys, *words, device="cpu"):
    threads = ("-B", "threads=1") if "-B" not in words else ()
    assert run(["memory", "--json", "-", "--device", device, *threads, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    jsonschema.validate(found, memory_probe.memory_schema())
    (only,) = found["devices"]
    assert only["not_tried"] is None
    assert 0 < only["largest"]["batch"] <= only["largest"]["by_estimate"]
    return only


@pytest.mark.thorough
@pytest.mark.usefixtures("children_forked")
def test_the_estimate_alone_comes_from_a_child_process_too(capsys):
    assert measured(capsys, "--model", "tiny", "--no-probe")["tried"] == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "device", "stages"),
    [
        ("--model blobnet-small", "cpu,cpu", 0),
        ("--model tiny", "cpu", 0),
        *(pytest.param(f"--model {name}", "cpu", 0, marks=pytest.mark.soak) for name in ("blobnet", "tiny-llada")),
        ("--model blobnet-small -B parallel=pipeline", "cpu", 2),
        ("--model tiny -B parallel=layers -B stages=3", "cpu", 3),
    ],
)
def test_the_estimate_is_near_what_is_measured(words, device, stages, capsys):
    found = measured(capsys, *words.split(), "--free", "2GiB", device=device)
    assert (found["copies"], len(found["stages"])) == (len(device.split(",")), stages)
    assert 0.75 < found["tried"][-1]["ratio"] < 1.3  # docs/memory.md has the figures


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("model", ["blobnet", "tiny", "tiny-llada"])
def test_memory_of_a_device_is_near_what_is_estimated(model, capsys):
    ratios = {one["batch"]: one["ratio"] for one in measured(capsys, "--model", model, device="cuda")["tried"]}
    assert all(0.7 < ratio < 1.4 for ratio in ratios.values()), ratios


@pytest.mark.thorough
def test_a_batch_that_does_not_fit_is_told_with_the_largest_that_does():
    with pytest.raises(UsageError, match=r"60000: .* full rows need .*fits is --batch-size \d.*in 64 pages"):
        run(["memory", "--model", "tiny", "--batch-size", "60000", "--free", "2GiB", "--no-probe", "--quiet"])


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
    found = {"model": "toy", "kind": "text", "dtype": "float32", "asked": asked, "facts": {"context": 64}}
    return {**found, "devices": list(devices)}


def after(monkeypatch, *messages, probe=True):
    """The document, and pages, after a child that answers so; a text: it is lost."""

    class Answers:
        def __init__(self, *given):
            self.left = iter(messages)

        def receive(self, within_s):
            found = next(self.left)
            if isinstance(found, str):
                raise ChildLost(found)
            return found

        def ask(self, request, within_s):
            return self.receive(within_s)

        def close(self):
            pass

    monkeypatch.setattr(memory_probe, "Conversation", Answers)
    monkeypatch.setattr(memory_probe, "Channel", lambda end: None)
    monkeypatch.setattr(memory_probe, "Child", lambda *given, **named: Answers())
    monkeypatch.setattr(Answers, "end", None, raising=False)
    options = MemoryOptions(model="toy", probe=probe)
    found = memory_probe.probe_memory(ModelSpec("toy", kind="text"), Setup(), options, {})
    jsonschema.validate(found, memory_probe.memory_schema())
    return found, list(memory_probe.memory_pages(found))


@pytest.mark.parametrize(("probe", "cure"), [(True, "Try --no-probe"), (False, "`gpuinfer doctor`")])
def test_a_child_without_a_word_is_told_with_a_cure_that_is_left(probe, cure, monkeypatch):
    with pytest.raises(WorkError, match=cure) as caught:
        after(monkeypatch, "it ended with exit code 1.", probe=probe)
    assert ("--no-probe" in str(caught.value)) == probe


@pytest.mark.parametrize("end", ["it was killed.", {"failed": "RuntimeError: last words"}], ids=str)
def test_a_child_that_dies_while_it_measures_has_told_the_estimate(end, monkeypatch):
    other = {**DEVICE, "device": "cuda:1"}
    found, (_, page) = after(monkeypatch, said(DEVICE, other), said(TRIED, other), end)
    one, other = found["devices"]
    assert one["not_tried"] is None
    assert ("was killed" in other["not_tried"]) or ("last words" in other["not_tried"])
    assert ("not tried", other["not_tried"]) in page.notes


def test_training_that_fits_in_neither_way_is_not_advised_to_try_the_other(monkeypatch):
    ways = [{**DEVICE, "largest": {**DEVICE["largest"], "batch": 0}, "checkpoint_segments": way} for way in (None, 2)]
    message = said(*ways)
    message["facts"] = {"training": True}
    with pytest.raises(UsageError, match="does not fit") as caught:
        after(monkeypatch, message, {"failed": ""}, probe=False)
    assert "checkpoint_segments" not in str(caught.value)


def test_what_does_not_fit_is_told_of_the_device_with_least_room(monkeypatch):
    least = {
        **DEVICE,
        "device": "cuda:1",
        "batch": {**PARTS, "batch": 401},
        "largest": {**DEVICE["largest"], "batch": 9},
    }
    document = said(DEVICE, least, asked=401)
    with pytest.raises(UsageError, match=r"free on cuda:1 may be taken. The largest that fits is --batch-size 9"):
        after(monkeypatch, document, {"failed": ""})


def test_people_see_each_batch_and_who_else_is_on_the_device(monkeypatch):
    _, (page,) = after(monkeypatch, said(DEVICE), said(TRIED), {"failed": ""})
    assert page.table.columns == ["full rows", "4", "100", "400"]
    assert page.table.rows[0] == ("process", "1.0 MiB", "1.0 MiB", "1.0 MiB")
    assert page.table.rows[-2:] == [("measured", "–", "100 MiB", "–"), ("ratio", "–", "0.05", "–")]
    notes = [text for _, text in page.notes]
    assert "trainer (pid 7) holds 2.0 GiB of this device" in notes
    assert "a process (pid 8) holds memory that the driver does not tell of this device" in notes
    assert "400 by the estimate, 360 by what was measured" in notes
    assert page.title == "memory · toy · float32 on cuda:0, a context of 64"


def test_people_see_the_stages_of_all_devices_in_their_order_and_the_least_largest_batch():
    sizes = dict.fromkeys([*BYTES, "estimated_bytes"], 1 << 20)
    found = {**said(), "schema": memory_probe.SCHEMA, "model": "net", "kind": "rows"}
    found["facts"] = {"parallel": "pipeline", "stages": 3, "split": "time", "micro_batch_rows": 512, "forwards": 4}
    for name, most, stages in (
        ("cuda:0", 900, [{"stage": 0, "layers": [0, 1], **sizes}, {"stage": 2, "layers": [4, 4], **sizes}]),
        ("cuda:1", 70, [{"stage": 1, "layers": [2, 3], **sizes, "cache_bytes": 0}]),
    ):
        largest = {**DEVICE["largest"], "batch": most, "by_estimate": most}
        found["devices"].append({**DEVICE, "device": name, "stages": stages, "largest": largest, "others": []})
    jsonschema.validate(found, memory_probe.memory_schema())
    first, _, page = memory_probe.memory_pages(found)
    assert first.title.endswith("on cuda:0, 2 of 3 stages in one memory (pipeline)")
    assert page.table.columns == ["stage", "on", "weights", "caches", "activations", "working", "in all"]
    shown = [("0, layers 0 to 1", "cuda:0"), ("1, layers 2 to 3", "cuda:1"), ("2, layer 4", "cuda:0")]
    assert [row[:2] for row in page.table.rows] == shown
    notes = dict(page.notes)
    assert notes["largest batch"] == "70 rows: the least of all, on cuda:1"
    assert notes["free"] == "10.0 GiB on cuda:0, 10.0 GiB on cuda:1"
    assert "-B split_points=2,4 keeps it so" in notes["split"]
    assert notes["micro-batches"].endswith("of 4 batches in flight")


# What the child examines, in this process


@pytest.fixture
def no_probe(monkeypatch, unbounded_memory):
    """Nor what only a probe needs."""
    for subject in (StagedRows, StagedText, TextSubject):
        monkeypatch.setattr(subject, "warm_up", lambda self: None)
    monkeypatch.setattr(stage_plan, "BUDGET_S", 0.0)
    yield
    torch.set_num_threads(1)


def examined(spec, batches=(), devices=("cpu",), context=None, **options):
    """The whole document, and its only memory."""
    asked = {"spec": spec, "devices": list(devices), "dtype": "float32", "seed": 0, "probe": False, "free": 4 << 30}
    asked |= {"options": {**OPTIONS, **options}, "batch_size": list(batches), "context": context}
    found = {"schema": memory_probe.SCHEMA, **next(examine_memory(asked))}
    jsonschema.validate(found, memory_probe.memory_schema())
    (device,) = found["devices"]
    return found, device


@pytest.mark.parametrize(
    ("spec", "changes", "cure"),
    [
        (TEXT, {"context": 1_000_000}, "the model was made for"),
        ({"name": "no/such/folder", "kind": "text"}, {}, "there is no model folder"),
        ({"name": "null", "kind": "text"}, {}, "computes nothing"),
        (TEXT, {"devices": ["cuda:77"]}, "no device 'cuda:77'"),
        (ROWS, {"stages": 9}, r"9 stages, and .* 3 layers.*Use -B stages=3"),
        (TEXT, {"stages": 9}, r"9 stages, and .* 6 layers.*Use -B stages=6"),
        (ROWS, {"split_points": [3]}, "Name points from 1 to 2"),
        (TEXT, {"split_points": [2, 6]}, "Name points from 1 to 5"),
        ({"name": "null", "kind": "text"}, {"parallel": "pipeline"}, "Leave -B parallel out"),
    ],
)
def test_what_cannot_be_had_is_refused_before_anything_is_tried(spec, changes, cure, no_probe):
    staged = {"parallel": "pipeline"} if {"stages", "split_points"} & changes.keys() else {}
    with pytest.raises(UsageError, match=cure):
        examined(spec, **staged, **changes)


def test_several_batches_are_estimated_and_the_largest_is_what_is_asked_for(no_probe):
    found, device = examined(TEXT, [2, 8, 64], context=64)
    assert found["asked"] == device["batch"]["batch"] == 64
    assert [one["batch"] for one in device["also"]] == [2, 8]
    few, more = (one["estimated_bytes"] for one in device["also"])
    assert few < more < device["batch"]["estimated_bytes"]


def test_a_draft_s_weights_and_cache_are_part_of_the_estimate(no_probe):
    (_, plain), (_, drafted) = (examined(TEXT, [2], context=64, **more) for more in ({}, {"draft": "tiny"}))
    more = {name: drafted["batch"][name] - plain["batch"][name] for name in BYTES}
    assert more["weights_bytes"] == plain["batch"]["weights_bytes"]  # the model is its own draft
    assert more["cache_bytes"] == 2 * plain["batch"]["cache_bytes"]  # of four rows, and the model has two


@pytest.mark.parametrize("spec", [ROWS, TEXT], ids=["rows", "text"])
def test_stages_add_up_to_the_memory_that_they_share(spec, no_probe):
    found, device = examined(spec, [48], parallel="pipeline", split_points=[1])
    stages, batch = device["stages"], device["batch"]
    assert [(stage["stage"], stage["layers"][0]) for stage in stages] == [(0, 0), (1, 1)]
    assert {name: sum(stage[name] for stage in stages) for name in BYTES} == {name: batch[name] for name in BYTES}
    assert all(sum(stage[name] for name in BYTES) == stage["estimated_bytes"] for stage in stages)
    assert batch["estimated_bytes"] == sum(one["estimated_bytes"] for one in stages) + batch["process_bytes"]
    assert (found["facts"]["split"], found["facts"]["stages"]) == ("given", 2)
    assert device["largest"]["batch"] > 48


@pytest.mark.parametrize("devices", [("cpu",), ("cpu", "cpu")], ids=["one", "two stand-ins"])
def test_each_stage_of_text_has_its_share_of_the_cache(devices, no_probe):
    _, device = examined(TEXT, [8], devices, 64, parallel="layers", split_points=[2])
    first, second = device["stages"]
    assert second["layers"] == [2, 5]
    assert second["cache_bytes"] == 2 * first["cache_bytes"] > 0
    _, whole = examined(TEXT, [8], context=64, parallel="data")
    assert first["cache_bytes"] + second["cache_bytes"] == whole["batch"]["cache_bytes"]
    assert whole["stages"] == []


@pytest.mark.parametrize("parallel", ["data", "layers"])
def test_pages_that_are_asked_for_are_what_every_batch_has(parallel, no_probe):
    """Ten pages hold one full row of eight, and no more than ten rows have one each."""
    found, device = examined(TEXT, [4, 64], context=256, pages=10, parallel=parallel, split_points=[2])
    batches = [*device["also"], device["batch"]]
    assert (device["pages"]["pages"], device["pages"]["slots"], device["largest"]["batch"]) == (10, 10, 10)
    assert [one["batch"] for one in batches] == [4, 10]
    assert {one["cache_bytes"] for one in batches} == {device["pages"]["cache_bytes"]}
    notes = dict(next(memory_probe.memory_pages(found)).notes)
    assert notes["largest batch"] == "10 rows at once, of which 1 may be full: -B pages allows no more"
    assert "as -B pages says" in notes[""]


class Three:
    """Stages on two devices, of which the first has two."""

    first, most, usual, timed = 1, 1000, 10, False
    warm_up = describe = facts = run = pages = None

    def __init__(self, *given):
        pass

    def stages(self, batch):
        places = (("cuda:0", (0, 1)), ("cuda:1", (2, 2)), ("cuda:0", (3, 5)))
        parts = [MemoryParts(0, 100 * number, batch, 10, 1) for number in (1, 2, 3)]
        return [StageParts(number, *place, parts[number]) for number, place in enumerate(places)]


def test_each_device_is_one_memory_whatever_the_model_does_there(monkeypatch):
    here = StagesHere(Three(), "cuda:0")
    here.process = 7
    assert here.parts(5) == MemoryParts(7, 400, 10, 20, 2)
    assert [(one.stage, one.layers) for one in here.stages(5)] == [(0, (0, 1)), (2, (3, 5))]
    devices, cpu = [torch.device("cuda", number) for number in (0, 1)], torch.device("cpu")
    setup = Setup(devices=("cuda:0", "cuda:1"))
    monkeypatch.setattr(rows_memory, "StagedRows", Three)
    monkeypatch.setattr(rows_memory, "RowsSubject", lambda spec, own, *_: own.devices)

    def subjects(parallel, devices):
        return list(probe_child._subjects(ModelSpec("net"), setup, {"options": {"parallel": parallel}}, devices))

    assert [[one.stage for one in found[2].stages(1)] for found in subjects("pipeline", devices)] == [[0, 2], [1]]
    assert subjects("data", devices) == [(devices[0], 1, ("cuda:0",)), (devices[1], 1, ("cuda:1",))]
    assert subjects("data", [cpu, cpu]) == [(cpu, 2, ("cpu",))]  # two copies in one memory


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


# Estimates and the search


def test_a_trace_of_two_small_batches_tells_what_a_large_one_takes():
    module = nn.Linear(64, 256, bias=False).requires_grad_(False)
    found = activations(lambda rows: module(torch.ones(rows, 64)), 16, 48)
    assert found.resident_bytes(1_000_000) == pytest.approx(HELD * 1_000_000 * 4 * (64 + 256), rel=0.01)
    assert weight_bytes(module) == 64 * 256 * 4
    assert weight_bytes(PackedAffine(torch.ones(32, 64), torch.ones(32))) >= 2 * 32 * 64 * 4  # what is packed counts


@given(st.integers(0, 10_000), st.integers(1, 10_000))
def test_the_largest_batch_is_the_last_that_fits(bound, most):
    assert largest_batch(lambda rows: rows <= bound, most) == min(bound, most)
    assert largest_batch(lambda rows: rows <= 100 or 1000 <= rows <= 1500, 1 << 20) == 1500  # a dip is found


@pytest.mark.skipif(not cpu_available(torch.float32), reason="no kernels of ours for this processor")
@pytest.mark.parametrize(("name", "threads"), [("tiny", 1), ("tiny-llada", 2)])
def test_the_cache_of_our_own_kernels_is_as_estimated(name, threads):
    checkpoint = open_checkpoint(ModelSpec(name, kind="text"))
    shape, weights = checkpoint.shape, checkpoint.weights(torch.float32)
    decoder = CpuDecoder(shape, weights, torch.float32, slots=3, pages=5, length=50, threads=threads)
    assert decoder.cache_bytes() == 5 * page_bytes(shape, torch.float32, own=True)
    decoder.empty()
    decoder.close()
    shape = open_checkpoint(ModelSpec("tiny", kind="text")).shape
    ours, torchs = (working(shape, 64, 64, 256, torch.float32, own) for own in (True, False))
    assert ours.activations == torchs.activations  # torch needs copies that our kernels do not
    assert ours.copies == 64 * shape.vocabulary * 4 < torchs.copies
    assert ours.total == ours.activations + ours.copies


@pytest.mark.parametrize("name", ["tiny", "tiny-llada-moe", "tiny-sdar"])
def test_weights_without_memory_are_as_large_as_those_with_it(name):
    checkpoint = open_checkpoint(ModelSpec(name, kind="text"))
    empty = empty_weights(checkpoint.layout, torch.bfloat16)
    assert list(layer_bytes(empty)) == list(layer_bytes(checkpoint.weights(torch.bfloat16)))
    least = model_weight_bytes(checkpoint.layout, torch.bfloat16)  # a head may be the embedding
    assert sum(layer_bytes(empty)) >= least


# What is asked


def asked(**options):
    return memory_model(MemoryOptions(**options), Setup())


def test_a_network_has_the_sizes_of_a_game_or_those_that_are_given():
    blob, four = asked(model="blobnet"), asked(model="blobnet-small", game="connect-four")
    assert (blob.kind, blob.arguments["seats"]) == ("rows", 4)
    assert (four.inputs, four.arguments["actions"]) != (blob.inputs, blob.arguments["actions"])
    assert asked(model="blobnet", seats=2).arguments["seats"] == 2
    spec = asked(model="nets:make", features=12, actions=3)
    assert (spec.name, spec.inputs, dict(spec.arguments)) == ("nets:make", 12, {"actions": 3})


@pytest.mark.parametrize(
    ("words", "cure"),
    [
        ("", "memory takes one model, and got none"),
        ("--model tiny --checkpoint a.pt", "got --model and --checkpoint"),
        ("--model blobnt", "Did you mean 'blobnet'"),
        ("--model tiny-lada", "Did you mean 'tiny-llada'"),
        ("--model nosuch", "module:factory, or a folder"),
        ("--model nets:make", "--features N"),
        ("--model rollout", "is no network"),
        ("--model blobnet --context 12", "--context belongs to a model of text"),
        ("--model tiny --game blob", "--game belongs to a network of rows"),
        ("--model nets:make --features 3 --game blob", "--game too"),
        ("--model blobnet --game chess", "chess"),
        ("--model blobnet -B parallel=pipeline -B split_points=2,1", "Name the layers at which stages begin in their"),
        ("--model blobnet -B split_points=2", "Add -B parallel=pipeline"),
        ("--model blobnet -B parallel=layers -B stages=3 -B split_points=2", "Leave one of them out"),
        ("--model blobnet --free 1gibibyte", "8GiB"),
    ],
)
def test_what_makes_no_sense_is_refused_with_the_flag(words, cure, gpuinfer):
    code, _, errors = gpuinfer("memory", *words.split())
    assert code == 2
    assert cure in " ".join(errors.split())


@pytest.mark.parametrize(
    ("text", "count"),
    [("8GiB", 8 << 30), ("500MB", 500_000_000), ("1.5g", 1_500_000_000), ("1024", 1024), (" 2 ki ", 2048)],
)
def test_amounts_of_memory_are_read(text, count):
    assert size(text) == count


@pytest.mark.parametrize("text", ["", "many", "-1GB", "1e9"])
def test_what_is_no_amount_is_refused(text):
    with pytest.raises(ValueError, match="8GiB"):
        size(text)


def test_amounts_of_memory_are_written():
    assert [memory(count) for count in (512, 3.4 * (1 << 20), 300 << 30)] == ["512 B", "3.4 MiB", "300 GiB"]
