"""The backend `inprocess` with a model in stages."""

import asyncio
import os
import re
import sys
import threading
from dataclasses import replace
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import staged_models
import torch
from one_batch import answered

from gpuinfer import api
from gpuinfer.api import BackendContext, ModelSpec, Request, Setup
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.cli.screen.final_panel import panel_rows
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.watchdog import Patience
from gpuinfer.errors import BackendDied, BackendError, UsageError
from gpuinfer.host.machine import cores
from gpuinfer.report.report import Run, build, schema
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import assert_ok, check_backend

FEATURES, ACTIONS, SEATS = 32, 9, 4
SMALL = ModelSpec("blobnet-small", None, FEATURES, "uint8", {"actions": ACTIONS, "seats": SEATS})


@pytest.fixture(autouse=True)
def here(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(Path(__file__).parent), *sys.path])
    yield
    torch.set_num_threads(1)


def setup(**changes):
    return Setup(**{"model": SMALL, "devices": ("cpu",), "processes": cores(), **changes})


def a_model(name, features=2):
    return ModelSpec(f"staged_models:{name}", None, features)


def request(rows, seed=0, model=SMALL):
    return Request(np.random.default_rng(seed).integers(0, 2, (rows, model.inputs)).astype(model.input_dtype), rows)


async def answers(batch, a_setup=None, **options):
    return await answered(InProcess(a_setup or setup(), **options), batch)


def stages():
    return [thread for thread in threading.enumerate() if thread.name.startswith("gpuinfer-stage")]


@pytest.mark.parametrize(
    "options",
    [
        {"parallel": "layers"},
        {"parallel": "pipeline", "stages": 3},
        {"parallel": "pipeline", "split_points": (2,), "micro_batch_rows": 7},
    ],
    ids=["layers", "pipeline", "small micro-batches"],
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_answers_are_those_of_one_device_and_when_deterministic_the_same_bits(options, dtype):
    batch = [request(300, 1), request(1, 2), request(40, 3)]
    expected = await answers(batch, setup(dtype=dtype))
    for ours, theirs in zip(await answers(batch, setup(dtype=dtype), **options), expected, strict=True):
        np.testing.assert_allclose(ours[0], theirs[0], atol=1e-5)
        np.testing.assert_allclose(ours[1], theirs[1], atol=1e-5)
    if dtype == "bfloat16" or "micro_batch_rows" in options:
        return
    for model in (SMALL, a_model("line", 6)):
        batch, one = [request(200, model=model), request(100, model=model)], setup(model=model, deterministic=True)
        for pair in zip(await answers(batch, one, **options), await answers(batch, one), strict=True):
            ours, theirs = (answer if isinstance(answer, tuple) else [answer] for answer in pair)
            for mine, other in zip(ours, theirs, strict=True):
                np.testing.assert_array_equal(mine, other)


@pytest.mark.thorough
@pytest.mark.parametrize("parallel", ["layers", "pipeline"])
def test_it_keeps_a_backends_promises(parallel):
    assert_ok(check_backend(lambda: InProcess(setup(), parallel=parallel, max_rows=64)))


async def test_a_request_at_which_a_stage_raises_fails_alone():
    blocks = [np.full((3, 2), value, np.float32) for value in (1, 6, 2)]  # the first stage makes seven of six
    first, bad, last = await answers(
        [Request(block, 3) for block in blocks], setup(model=a_model("raising")), parallel="pipeline", stages=3
    )
    assert isinstance(bad, BackendError)
    assert isinstance(bad.__cause__, ValueError)
    assert re.match(r"model 'staged_models:\w+' \(.*staged_models\.py\) raised ValueError", str(bad))
    np.testing.assert_array_equal(first, blocks[0] + 3)
    np.testing.assert_array_equal(last, blocks[2] + 3)


async def test_micro_batches_become_smaller_when_memory_runs_out(caplog):
    block = np.arange(40, dtype=np.float32).reshape(20, 2)
    (found,) = await answers([Request(block, 20)], setup(model=a_model("full")), parallel="pipeline")
    np.testing.assert_array_equal(found, block + 2)
    assert caplog.text.count("out of memory") == 1


async def test_a_stage_that_hangs_is_given_up_and_left_behind():
    staged_models.Hangs.let_go.clear()
    staged_models.Hangs.there.clear()
    backend = InProcess(setup(model=a_model("hanging"), patience=0.2, give_up=0.5), parallel="pipeline", stages=2)
    engine = Engine(backend, Dynamic(), patience_s=0.5)
    await engine.start()
    assert (await engine.submit(np.ones((2, 2), np.float32), rows=2))[0, 0] == 4
    asking = asyncio.create_task(engine.submit(np.full((2, 2), 8, np.float32), rows=2))
    await asyncio.to_thread(staged_models.Hangs.there.wait, 30)
    (held,) = engine.held(Patience(0.2, 0.5))
    assert re.search(r"has had batch .*, and waits for stage [01], layers? .*1.* on cpu$", held.doing)
    assert held.limit_s < float("inf")
    engine.give_up(BackendDied("it hangs. Mend it."))
    with pytest.raises(BackendDied, match="it hangs"):
        await asking
    await asyncio.wait_for(engine.close(), 30)
    staged_models.Hangs.let_go.set()
    for thread in threading.enumerate():
        if thread.name.startswith(("gpuinfer-stage", "gpuinfer-forward")):
            thread.join(30)
            assert not thread.is_alive()


async def test_the_ledger_has_a_lane_for_each_stage_and_the_report_tells_of_them():
    engine = Engine(InProcess(setup(), parallel="pipeline"), Dynamic())
    await engine.start()
    await asyncio.gather(*(engine.submit(request(30).payload, rows=30) for _ in range(4)))
    snapshot = replace(engine.snapshot(), device=dict(engine.backend.device()))
    await engine.close()
    assert [lane["name"] for lane in snapshot.lanes][-2:] == ["stage 0", "stage 1"]
    wall_s = max(sum(lane["stations"].values()) for lane in snapshot.lanes)
    run = Run("load", "inprocess", "dynamic", "", 0.0, wall_s, "done", setup(), snapshot, api.Progress(1))
    report = build(run)
    jsonschema.validate(report, schema())
    assert sum(report["time_s"].values()) == pytest.approx(wall_s * report["lanes"])
    told = report["stages"]
    assert [stage["layers"] for stage in told["stages"]] in ([[0, 0], [1, 2]], [[0, 1], [2, 2]])
    assert told["micro_batches"] >= told["batches"] > 0
    assert 0 <= told["bubble_share"] < 1
    (row,) = [row for row in panel_rows(report) if row.name == "stages"]
    assert row.text.startswith("pipeline, busy: layer")


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity") or cores() < 2, reason="two cores of which one can choose")
async def test_stages_have_cores_of_their_own():
    backend = InProcess(setup(processes=1), parallel="pipeline", stages=2)
    await backend.start(BackendContext())
    allowed = [os.sched_getaffinity(thread.native_id) for thread in sorted(stages(), key=lambda one: one.name)]
    told = backend.device()["parallel"]["stages"]
    await backend.close()
    assert not set.intersection(*allowed)
    assert [len(mine) for mine in allowed] == [stage["threads"] for stage in told]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"stages": 2}, "stages=2 says .* Add -B parallel=pipeline"),
        ({"layers": "blocks"}, "layers=blocks says"),
        ({"parallel": "pipeline", "split_points": (4, 2)}, "split_points=4,2 do not ascend"),
        ({"parallel": "layers", "split_points": (2, 2)}, "do not ascend"),
        ({"parallel": "layers", "split_points": (0,)}, "greater than or equal to 1"),
        ({"parallel": "layers", "split_points": (2,), "stages": 3}, "make 2 stages"),
        ({"parallel": "layers", "stages": 1}, "1 stage, and there are 2 to 1024"),
        ({"parallel": "pipeline", "compile": True}, "Leave one of them out"),
        ({"parallel": "layers", "in_flight": 2}, "Use parallel=pipeline"),
        ({"parallel": "rows"}, "parallel"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, said):
    with pytest.raises(ValueError, match=said):
        InProcess(setup(), **options)


@pytest.mark.parametrize(
    ("model", "options", "said"),
    [
        (SMALL, {"stages": 4}, "4 stages, and model 'blobnet-small' has 3 layers.*stages=3"),
        (SMALL, {"split_points": (3,)}, "has 3 layers, 0 to 2"),
        (a_model("alone"), {}, "has 1 layer.*parallel=data"),
        (a_model("Skipping", 6), {}, "Name the attribute.*-B layers=blocks"),
        (a_model("Wrong", 6), {}, "answers otherwise"),
        (SMALL, {"backward": True}, "for gradients a model is whole"),
    ],
)
async def test_models_that_cannot_be_cut_so_say_why(model, options, said):
    told = re.compile(said, re.DOTALL)
    with pytest.raises(UsageError, match=told):
        await answers([], setup(model=model), parallel="pipeline", **options)
    assert not stages()
    backend = InProcess(setup(model=model), parallel="pipeline", **options)
    if model.name.endswith(":Wrong"):  # which takes trying it out
        await backend.check()
        return
    with pytest.raises(UsageError, match=told):  # and before there is any stage
        await backend.check()


async def test_what_can_be_cut_passes_the_check_and_can_be_closed_at_any_time():
    await InProcess(setup(model=a_model("OneRow", 6)), parallel="layers", layers="blocks", split_points=(1, 3)).check()
    await InProcess(setup(model=replace(SMALL, weights="no-such-file")), parallel="pipeline").check()  # read at start
    assert not stages()
    backend = InProcess(setup(), parallel="pipeline")
    await backend.close()
    await backend.start(BackendContext())
    await backend.close()
    assert not stages()
    with pytest.raises((BackendDied, BackendError)):
        await backend.infer([request(1)])
