"""What users of a loop on many machines expect: matches and training with any backend, and how long it will take."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from train.train_models import positions

from gpuinfer.api import Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.fleet import FleetBackend
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.errors import BackendDied, BackendError, UsageError
from gpuinfer.gradients import TrainingBatch
from gpuinfer.lab.loop import loop_summary
from gpuinfer.lab.loop.loop_runner import LoopPlan, run_loop
from gpuinfer.lab.loop.loop_times import LoopTimes, times_line
from gpuinfer.models.data_parallel import divided
from gpuinfer.models.load import write_weights
from gpuinfer.models.positions import PositionsFolder, positions_of
from gpuinfer.report import plotting
from gpuinfer.runtime.run import execute
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.workloads.optimizer import TrainingFolder
from gpuinfer.workloads.selfplay.workload import SelfPlayWorkload
from gpuinfer.workloads.train import Train

pytestmark = pytest.mark.usefixtures("children_forked")

WAIT_S = 120
COMMAND = str(Path(__file__).parent.parent / "loop" / "loop_command.py")


def played(folder, kind, weights, games=4, **options):
    """A match of two networks of one name, each with its own weights, by worker processes: its report."""
    play = SelfPlayWorkload(
        Setup(seed=3),
        game="connect-four",
        model="blobnet-small",
        weights=weights[0],
        opponent_model="blobnet-small",
        opponent_weights=weights[1],
        games=games,
        simulations=4,
        workers=2,
        out=folder,
        deterministic=True,
    )
    setup = Setup(model=play.model(), processes=play.processes, deterministic=True)
    done = execute(play, kind(setup, **options), Dynamic(setup), roofline=False)
    return asyncio.run(asyncio.wait_for(done, WAIT_S))


@pytest.fixture
def two_weights(tmp_path):
    model = SelfPlayWorkload(game="connect-four", model="blobnet-small").model()
    files = [tmp_path / "one.safetensors", tmp_path / "other.safetensors"]
    for seed, file in enumerate(files):
        write_weights(model, seed, file)
    return files


@pytest.mark.parametrize(
    "kind", [Central, pytest.param(FleetBackend, marks=pytest.mark.thorough)], ids=["central", "fleet"]
)
def test_two_networks_play_on_servers_the_games_that_they_play_in_process(tmp_path, two_weights, kind):
    report = played(tmp_path / "served", kind, two_weights)
    assert (report["status"], report["strength"]["games"]) == ("done", 4)
    names = {"blobnet-small (one.safetensors)", "blobnet-small (other.safetensors)"}
    assert {line["name"] for line in report["models"] if line["rows"]} == names, "a line for each, and both were asked"
    right = played(tmp_path / "right", InProcess, two_weights)
    found, expected = (positions_of([tmp_path / name]) for name in ("served", "right"))
    for name in ("observation", "policy", "value"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))
    assert report["strength"] == right["strength"]


@pytest.fixture(scope="module")
def records(tmp_path_factory):
    folder = tmp_path_factory.mktemp("records")
    written = PositionsFolder(folder)
    written.open({"game": "made up", "game_options": {}}, resume=False)
    written.write(positions(300))
    written.close(300)
    return folder


def trained(records, out, kind=InProcess, devices=("cpu",), steps=12, until=None, **options):
    """The weights that come of a training, and its report. `until` is called with each update."""
    work = Train(
        Setup(seed=5, devices=devices),
        records=[records],
        out=out,
        model="blobnet-small",
        steps=steps,
        batch_size=33,
        learning_rate=0.003,
        warmup_steps=2,
        checkpoint_every=1000,
        picture=False,
        resume=out.exists(),
    )
    setup = Setup(model=work.model(), seed=5, devices=devices)
    backend = kind(setup, threads=1, **options)
    more = {} if until is None else {"on_update": until, "update_s": 0.01}
    done = execute(work, backend, Dynamic(setup), roofline=False, **more)
    report = asyncio.run(asyncio.wait_for(done, WAIT_S))
    return load_file(out / "weights.safetensors"), report


def losses(out):
    return [row["loss"] for row in plotting.read_losses(out / plotting.LOSS_FILE) if "loss" in row]


def training_processes():
    return [one for one in multiprocessing.active_children() if "training" in one.name]


def test_training_on_two_devices_has_the_losses_of_one(records, tmp_path):
    """Torch's DistributedDataParallel over gloo: 33 rows a batch, which are 16 and 17."""
    one, _ = trained(records, tmp_path / "one")
    two, report = trained(records, tmp_path / "two", devices=("cpu", "cpu"))
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    for name, weight in one.items():
        assert np.allclose(two[name], weight, atol=1e-4), name
    rows = {name: device["rows"] for name, device in report["device"]["devices"].items()}
    assert rows == {"cpu:0": 12 * 16, "cpu:1": 12 * 17}
    assert training_processes() == [], "nothing is left running"
    assert not torch.distributed.is_initialized()


def test_training_whose_second_process_is_killed_says_so_and_goes_on_from_its_last_step(records, tmp_path):
    def kill(update):
        if update.progress.done >= 3:
            for one in training_processes():
                one.kill()

    with pytest.raises(BackendDied, match=r"trains on cpu \(rank 1\) was killed .* --resume"):
        trained(records, tmp_path / "out", devices=("cpu", "cpu"), steps=20_000, until=kill)
    assert training_processes() == [], "nothing is left running"
    step, _, _ = TrainingFolder(tmp_path / "out").last()
    assert step >= 3, "what was trained is kept, though no checkpoint was due"


def test_training_on_a_central_server_is_that_of_this_process_bit_for_bit(records, tmp_path):
    one, _ = trained(records, tmp_path / "one")
    served, report = trained(records, tmp_path / "served", Central)
    assert (report["status"], report["errors"]["failed"]) == ("done", 0)
    assert report["batches"]["count"] > 12, "the server's passes are counted"
    for name, weight in one.items():
        assert np.array_equal(served[name], weight), name


def test_training_whose_server_is_killed_says_so_and_keeps_its_last_step(records, tmp_path):
    def kill(update):
        if update.progress.done >= 3:
            for one in training_processes():
                one.kill()

    with pytest.raises(BackendDied, match="server process that trains was killed"):
        trained(records, tmp_path / "out", Central, steps=20_000, until=kill)
    step, _, _ = TrainingFolder(tmp_path / "out").last()
    assert step >= 3


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        pytest.param(Central, {"restart": True}, "goes on with --resume", id="a server that is brought back"),
        pytest.param(InProcess, {"in_flight": 2}, "one batch at a time", id="two batches at once"),
    ],
)
def test_what_training_cannot_have_is_refused(records, tmp_path, kind, options, message):
    with pytest.raises(UsageError, match=message):
        trained(records, tmp_path / "out", kind, **options)


def test_a_batch_of_fewer_rows_than_devices_is_refused():
    rows = np.zeros((1, 4), np.float32)
    with pytest.raises(BackendError, match="at least --batch-size 2"):
        divided(TrainingBatch(rows, {}), 2)


@pytest.fixture
def plan(tmp_path):
    return LoopPlan(
        folder=tmp_path / "loop",
        model="blobnet-small",
        iterations=500,
        games=30,
        temperature_moves=16,
        window=2,
        training_steps=20,
        batch_size=32,
        learning_rate=1e-3,
        evaluation_games=60,
        evaluate_every=50,
        seed=7,
    )


def test_a_loop_projects_its_time_from_the_first_iteration_on(plan):
    times = LoopTimes(plan)
    steps = plan.steps()
    assert times.document() is None, "nothing is known yet"
    times.ended(next(steps), 520.0)
    assert times.document() is None, "how long training takes is not known"
    times.ended(next(steps), 100.0)
    found = times.document()
    assert found["projection"] == "500 iterations: 3.7 days, of which self-play 81 %"
    assert found["kinds"]["match"]["seconds"] == 10 * 2 * 520.0, "ten matches of twice the games, each as long"
    assert sum(one["share"] for one in found["kinds"].values()) == pytest.approx(1)
    assert found["done_s"] == 620.0
    assert found["seconds"] == pytest.approx(sum(one["seconds"] for one in found["kinds"].values()))
    assert times_line(found) == "self-play 8 min 40 s (81 %), training 1 min 40 s (16 %), match 21 s (3 %)"


def test_a_loop_that_goes_on_knows_how_long_it_took_before_it_was_stopped(plan, tmp_path):
    program = [sys.executable, COMMAND, str(tmp_path / "journal"), "done"]
    steps = list(plan.steps())[:4]
    run_loop(steps, False, lambda step: None, lambda step, report, seconds: None, program)
    document = loop_summary.loop_document(plan, {}, "gpuinfer loop --out loop", "partial")
    time = document["time"]
    assert (time["iterations"], time["done_s"], time["kinds"]["games"]["step_s"]) == (500, 12.0, 3.0)
    page = loop_summary.loop_page(document, {})
    assert time["projection"] in page.markdown()
    assert [row[0] for row in page.more[0].rows] == ["self-play", "training", "match", "all"]
    assert json.loads(json.dumps(document)) == document
