"""`--track` and `on_figures`: what is told, that trackers have it whatever ends the run, and that none harms a run."""

from __future__ import annotations

import json
import logging
import math
import os
import re
import signal
import statistics
import threading
import time
from pathlib import Path

import pytest
from forking import Forked, own_environment
from helpers import AtOnce, Counting, Doubler
from rollouts_play.rollouts_run import rollouts
from tracked_runs import TensorBoardRun, values_of, wandb_records
from train.train_models import positions

from gpuinfer.api import Progress
from gpuinfer.host import extras
from gpuinfer.lab.loop import loop_figures
from gpuinfer.lab.loop.loop_figures import LossFollower, step_figures
from gpuinfer.lab.loop.loop_runner import LoopPlan
from gpuinfer.models.positions import PositionsFolder
from gpuinfer.rollouts.files import read
from gpuinfer.rollouts.steps import read_steps
from gpuinfer.runtime import run_figures, tracking
from gpuinfer.runtime.run import run
from gpuinfer.runtime.tracking import Tracking

WAIT_S = 60  # for what is written by another process


@pytest.fixture
def training(tmp_path):
    """The words of a training on made-up records, into the folder `out`."""
    folder = PositionsFolder(tmp_path / "games")
    folder.open({"game": "made up", "game_options": {}}, resume=False)
    folder.write(positions(200))
    folder.close(1)
    words = ["train", "--records", folder.path, "--out", tmp_path / "out", "--model", "blobnet-small"]
    return [*map(str, words), "--batch-size=32", "--device=cpu", "--no-roofline", "--quiet", "-B", "threads=1"]


def curve(folder):
    """Each figure of the loss curve: name → [(step, value)]."""
    found = {}
    for line in (folder / "loss.jsonl").read_text().splitlines():
        row = json.loads(line)
        for name, value in row.items():
            if name != "step":
                found.setdefault(f"train/{name}", []).append((row["step"], pytest.approx(value, rel=1e-6)))
    return found


def test_tensorboard_has_the_loss_of_each_step_the_settings_and_the_verdict(gpuinfer, training, tmp_path):
    code, _, said = gpuinfer(
        *training, "--steps=20", "--checkpoint-every=7", f"--track=tensorboard={tmp_path / 'runs'}"
    )
    assert code == 0, said
    found, wanted = TensorBoardRun(tmp_path / "runs"), curve(tmp_path / "out")
    assert re.fullmatch(r"train-\d{8}-\d{6}-\d+", found.folder.name)
    assert {name: found.scalars.get(name) for name in wanted} == wanted
    assert {"train/loss", "train/loss_policy", "train/validation", "train/gradient_norm"} <= wanted.keys()
    assert "| train.steps | 20 |" in found.texts["settings"]
    assert "| status | done |" in found.texts["result"]
    assert "| bottleneck |" in found.texts["result"]


def test_what_a_killed_run_has_logged_is_there(training, tmp_path):
    """With `kill -9`: each step until then, the last ones before the disk had them, and that it was killed."""
    runs, track = tmp_path / "runs", f"--track=tensorboard={tmp_path / 'runs'}"
    with Forked(["gpuinfer", *training, "--steps=9000", track], tmp_path, own_environment(), text=True) as process:
        until(lambda: runs.exists() and len(TensorBoardRun(runs).scalars.get("train/loss", ())) > 20)
        process.send_signal(signal.SIGKILL)
        process.wait()
    until(lambda: "result" in TensorBoardRun(runs).texts)
    found = TensorBoardRun(runs)
    assert "| status | killed |" in found.texts["result"]
    steps = [step for step, _ in found.scalars["train/loss"]]
    assert steps == list(range(1, len(steps) + 1))
    if (tmp_path / "out" / "loss.jsonl").exists():
        wanted = curve(tmp_path / "out")["train/loss"]
        assert found.scalars["train/loss"][: len(wanted)] == wanted[: len(steps)]


def until(holds):
    end = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_rollouts_are_tracked_by_group_and_by_training_step(tmp_path):
    file, words = tmp_path / "steps.jsonl", ["--model", "null", "--plain", "--max-new-tokens", 4, "--groups", 6]
    words += ["--batch-groups", 2, "--trainer-seconds", 0.01, "--steps", file, "--out", tmp_path / "record"]
    code, _, said = rollouts("--env", "arithmetic", *words, f"--track=tensorboard={tmp_path / 'runs'}")
    assert code == 0, said
    found, steps = TensorBoardRun(tmp_path / "runs").scalars, list(read_steps(file))
    assert len(steps) == 3
    for name in ("wait_s", "staleness_mean", "output_tokens", "kl_coefficient"):
        wanted = [(one.step, pytest.approx(getattr(one, name), rel=1e-6)) for one in steps]
        assert found[f"trainer/{name}"] == wanted
    rewards = [
        statistics.fmean(one.reward for game in group.games for one in game.trajectories)
        for group in read(tmp_path / "record")
    ]
    assert found["rollouts/reward"][-1][0] == 6
    assert found.keys() >= {"rollouts/reward_std", "rollouts/metric_correct"}
    assert min(rewards) <= min(value for _, value in found["rollouts/reward"]) <= max(rewards)


@pytest.mark.thorough
def test_wandb_has_it_too(gpuinfer, training, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    code, _, said = gpuinfer(*training, "--steps=20", "--track=wandb=somebody/blob")
    assert code == 0, said
    [file] = tmp_path.glob("wandb/offline-run-*/*.wandb")
    records = list(wandb_records(file))
    kinds = {
        kind: [getattr(one, kind) for one in records if one.WhichOneof("record_type") == kind]
        for kind in ("run", "history", "summary", "exit")
    }
    assert (kinds["run"][0].entity, kinds["run"][0].project) == ("somebody", "blob")
    config = {one.key: json.loads(one.value_json) for one in kinds["run"][0].config.update}
    assert config["train"]["steps"] == 20
    rows = [values_of(one.item) for one in kinds["history"]]
    told = [(row["step"], row["train/loss"]) for row in rows if "train/loss" in row]
    assert told == curve(tmp_path / "out")["train/loss"]
    summary = {name: value for one in kinds["summary"] for name, value in values_of(one.update).items()}
    assert summary["status"] == "done"
    assert [one.exit_code for one in kinds["exit"]] == [0]


@pytest.mark.thorough
@pytest.mark.filterwarnings("ignore")  # of its libraries
def test_mlflow_has_it_too(gpuinfer, training, tmp_path, monkeypatch):
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    code, _, said = gpuinfer(*training, "--steps=20", "--track=mlflow=blob")
    assert code == 0, said
    client = MlflowClient()
    [made] = client.search_runs([client.get_experiment_by_name("blob").experiment_id])
    assert (made.info.status, made.data.tags["status"], made.data.params["train.steps"]) == ("FINISHED", "done", "20")
    history = client.get_metric_history(made.info.run_id, "train/loss")
    assert [(one.step, one.value) for one in history] == curve(tmp_path / "out")["train/loss"]


REFUSED = {
    "tensorbord=runs": "Did you mean 'tensorboard'?",
    "tensorboard": "Give --track tensorboard=runs",
    "tensorboard=": "Give --track tensorboard=runs",
    "tensorboard=file/runs": "file is a file. Name a folder",
    "wandb=": "Give --track wandb=PROJECT",
    "mlflow=x": "pip install 'gpuinfer[mlflow]'",
}


@pytest.mark.parametrize(("word", "message"), REFUSED.items())
@pytest.mark.parametrize("command", ["train", "loop"])
def test_a_tracker_that_cannot_be_had_is_refused_before_the_run(
    gpuinfer, training, empty_folder, monkeypatch, command, word, message
):
    Path("file").touch()
    Path("mlflow").mkdir()  # such as the folder that wandb leaves: no package
    monkeypatch.setitem(extras.EXTRAS, "mlflow", extras.OptionalExtra(("mlflow_that_nobody_has",), ""))
    words = training if command == "train" else ["loop", "--out", "l", "--game", "connect-four"]
    code, out, err = gpuinfer(*words, "--track", word)
    assert (code, out, message in " ".join(err.split())) == (2, "", True), err
    assert not Path("l").exists()


def test_nothing_is_tracked_where_that_is_said_last(gpuinfer, training, monkeypatch, tmp_path):
    monkeypatch.setenv("GPUINFER_TRACK", f"tensorboard={tmp_path / 'runs'}")
    code, _, said = gpuinfer(*training, "--steps=2", "--track=none")
    assert code == 0, said
    assert not (tmp_path / "runs").exists()


def test_a_run_that_is_refused_leaves_no_trace(gpuinfer, training, tmp_path):
    code, _, _ = gpuinfer(
        *training, "--steps=2", "--batch-size=999", "-B", "max_rows=8", f"--track=tensorboard={tmp_path / 'runs'}"
    )
    assert code == 2
    assert not (tmp_path / "runs").exists()


# A library in the place of wandb, each of whose calls does what a broken one may do

BROKEN = {
    "raises as it is imported": ("raise ImportError('no compiler')", "no compiler"),
    "raises at the start": ("def init(**k): raise OSError(28, 'No space left on device')", "No space left on device"),
    "leaves at the start": ("import os\ndef init(**k): os._exit(3)", "ended with exit code 3"),
    "hangs at the start": ("import time\ndef init(**k): time.sleep(60)", "gave no answer within 1 s"),
    "raises later": ("{good}\n    def log(self, row): raise ConnectionError('the network is gone')", "network is gone"),
    "hangs later": ("{good}\n    def log(self, row): time.sleep(60)", "gave no answer within 1 s"),
    "dies later": ("{good}\n    def log(self, row): os.kill(os.getpid(), 9)", "was killed (SIGKILL"),
    "asks its user": ("{good}\n    def log(self, row): input('key? ')", "EOF"),
    "raises at the end": ("{good}\n    def finish(self, **k): raise RuntimeError('half an upload')", "half an upload"),
    "hangs at the end": ("{good}\n    def finish(self, **k): time.sleep(60)", "not all has been taken within 0.5 s"),
    "prints": ("print('hello')\n{good}\n    def log(self, row): print(row)", ""),
}
GOOD = """
import os, sys, time
class Settings:
    def __init__(self, **k): pass
def init(**k): return Run()
class Run:
    url = dir = "nowhere"
    summary = {}
    def define_metric(self, *a, **k): pass
    def log(self, row): pass
    def finish(self, **k): pass
"""


@pytest.mark.parametrize(("how", "said"), BROKEN.values(), ids=BROKEN)
def test_a_tracker_that_fails_is_warned_of_once_and_left_out(how, said, tmp_path, monkeypatch, caplog):
    (tmp_path / "wandb").mkdir()
    broken = how if "{good}" in how else how + "\nclass Settings:\n    def __init__(self, **k): pass\n"
    (tmp_path / "wandb" / "__init__.py").write_text(broken.replace("{good}", GOOD))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tracking, "FINISH_S", 0.5 if "at the end" in said or "taken" in said else 20.0)
    hangs = "within 1 s" in said
    monkeypatch.setattr(tracking, "START_S", 1.0 if hangs and "init" in how else 60.0)
    monkeypatch.setattr(tracking, "ANSWER_S", 1.0 if hangs else 60.0)
    places = []
    with Tracking(["wandb"], "selfplay", {"out": Path("games")}, places.append) as tracked:
        for step in range(3):
            tracked.log(step, {"loss": 0.5})
        if "taken" in said:  # it hangs only at the end: let it come that far
            until(lambda: places)
        tracked.finish("done", {})
    warned = [one.getMessage() for one in caplog.records]
    assert len(warned) == (said != ""), warned
    assert all(said in one and one.startswith("--track wandb") for one in warned), warned


def test_ctrl_c_ends_the_wait_for_a_tracker_and_says_so(tmp_path, monkeypatch, caplog):
    (tmp_path / "wandb").mkdir()
    hanging = GOOD + "    def finish(self, **k): time.sleep(60)\n"
    (tmp_path / "wandb" / "__init__.py").write_text(hanging)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tracking, "PATIENCE_S", 0.01)
    said = []

    def announce(text):
        said.append(text)
        if "Ctrl-C ends it" in text:
            threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGINT]).start()

    with Tracking(["wandb"], "selfplay", {}, announce) as tracked:
        tracked.log(1, {"loss": 0.5})
        until(lambda: said)
        tracked.finish("done", {})
    assert said[-1].startswith("wandb: waiting 30 s at most")
    assert [one.getMessage() for one in caplog.records] == ["Ctrl-C: what the trackers have not taken is left out."]


def test_a_slow_tracker_keeps_nobody_waiting_and_loses_what_is_too_much(tmp_path, monkeypatch, caplog):
    (tmp_path / "wandb").mkdir()
    slow = GOOD + "    def log(self, row): time.sleep(0.05)\n"
    (tmp_path / "wandb" / "__init__.py").write_text(slow)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(tracking, "MOST_QUEUED", 4)
    with Tracking(["wandb"], "selfplay", {}) as tracked:
        for step in range(1000):
            tracked.log(step, {"loss": 0.5})
        tracked.finish("done", {})
    [warned] = [one.getMessage() for one in caplog.records]
    assert re.search(r"slower than the run: 9\d\d steps are left out", warned)


# Figures


class Stepping(Counting):
    """Tells a figure of each question, and facts."""

    async def run(self, infer):
        async for progress in super().run(infer):
            figures = [(progress.done, {"loss": 1 / (1 + progress.done), "trainer/kl": 0.1})]
            facts = {"workers": 1, "still": 5, "so far": progress.done, "loss": 9.0}
            yield Progress(progress.done, progress.total, progress.unit, progress.counts, facts, figures=figures)


def test_figures_are_told_by_the_workloads_steps(monkeypatch):
    monkeypatch.setattr(run_figures, "EVERY_S", 0.0)
    told = []
    report = run(
        Stepping(total=400), Doubler(), AtOnce(), update_s=0.005, settings={"workload": "quiz"},
        on_figures=lambda step, figures: told.append((step, dict(figures))),
    )  # fmt: skip
    assert report["status"] == "done"
    own = [(step, figures) for step, figures in told if "quiz/loss" in figures]
    assert own == [(step, {"quiz/loss": 1 / (1 + step), "trainer/kl": 0.1}) for step in range(401)]
    others = [(step, figures) for step, figures in told if "quiz/loss" not in figures]
    assert [step for step, _ in others] == sorted({step for step, _ in others})
    assert others[-1][0] == 400
    for _, figures in others:
        assert {"throughput/questions_per_s", "throughput/games_per_min"} <= figures.keys()
        assert {"quiz/workers", "quiz/still"}.isdisjoint(figures)
        assert figures.get("batch/rows", 1) == 1  # none where a batch ended before a look, and is told of after it
        assert math.isclose(sum(value for name, value in figures.items() if name.startswith("time/")), 1)
        assert figures["throughput/games_per_min"] == pytest.approx(30 * figures["throughput/questions_per_s"])
    assert others[-1][1]["quiz/so far"] == 400
    assert any({"batch/rows", "queue/wait_mean_s"} <= figures.keys() for _, figures in others)


def test_a_function_that_raises_is_called_no_more(caplog):
    told = []

    def on_figures(step, figures):
        told.append(step)
        raise KeyError("loss")

    with caplog.at_level(logging.WARNING):
        report = run(Stepping(total=20), Doubler(), AtOnce(), on_figures=on_figures)
    assert (report["status"], told) == ("done", [0])
    assert ["on_figures raised KeyError: 'loss'" in one.getMessage() for one in caplog.records] == [True]


# Loops


@pytest.fixture
def plan(tmp_path):
    sizes = {"games": 30, "temperature_moves": 8, "window": 2, "training_steps": 100, "batch_size": 16}
    return LoopPlan(tmp_path, "blobnet", 3, **sizes, learning_rate=1e-3, evaluation_games=4, evaluate_every=1, seed=0)


STRENGTH = {"score": 0.75, "elo": 190.8, "elo_ci95": [147.2, None]}


@pytest.mark.parametrize(
    ("kind", "told", "figures"),
    [
        ("games", {"progress": {"done": 30}, "throughput": {"games_per_min": 900.0}},
         {"loop/games": 30, "loop/games_per_min": 900}),
        ("training", {"training": {"loss": {"total": 2.5}, "validation": None}}, {"loop/loss": 2.5}),
        ("gate", {"strength": STRENGTH},
         {"loop/gate_score": 0.75, "loop/gate_elo": 190.8, "loop/gate_elo_low": 147.2, "loop/gate_won": 1}),
        ("match", {"strength": STRENGTH}, {"loop/score": 0.75, "loop/elo": 190.8, "loop/elo_low": 147.2}),
    ],
)  # fmt: skip
def test_each_step_of_a_loop_has_its_figures(plan, kind, told, figures):
    found = step_figures(plan.step(kind, 2), {"setup_s": 1.0, "wall_s": 2.0, **told}, has_won=True)
    assert found == {f"loop/{kind}_s": 3.0, **figures}


def test_the_loss_is_followed_while_the_network_is_trained(plan, monkeypatch):
    monkeypatch.setattr(loop_figures, "LOOK_S", 0.01)
    told = []
    step, file = plan.step("training", 2), plan.curve(2)
    file.parent.mkdir(parents=True)
    with LossFollower(plan, lambda step, figures: told.append((step, figures))) as follower:
        follower.began(plan.step("games", 2))
        follower.began(step)
        with file.open("a") as lines:
            for number in (1, 2):
                lines.write(f'{{"step": {number}, "loss": {number / 4}}}\n')
                lines.flush()
                until(lambda number=number: len(told) == number)
            lines.write('{"step": 3, "loss": 0.75}\n{"step": 4, "lo')
        follower.ended(step)
    assert told == [(101, {"train/loss": 0.25}), (102, {"train/loss": 0.5}), (103, {"train/loss": 0.75})]
