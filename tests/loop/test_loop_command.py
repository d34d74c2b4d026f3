"""`gpuinfer loop` at the command line: what is refused, and that nothing is lost, whatever is killed."""

from __future__ import annotations

import json
import time

import psutil
import pytest
from forking import Forked, own_environment

from gpuinfer.lab.loop.loop_runner import KINDS

TINY = ["--game", "connect-four", "--games", "12", "--simulations", "4", "--training-steps", "6", "--batch-size", "16"]
WORK = [*TINY, "--iterations", "2", "--evaluation-games", "8", "--evaluate-every", "1", "--workers", "1", "--out", "l"]
WORK += ["--gate", "0.55", "--gate-games", "6"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        pytest.param([], "Add --out DIR.", id="no folder"),
        pytest.param(["--out", "l", "--model", "uniform"], "has nothing to learn", id="no network"),
        pytest.param(["--out", "l", "--model", "blobnte"], "Did you mean 'blobnet'?", id="no such model"),
        pytest.param(["--out", "l", "--game", "blab"], "Did you mean 'blob'?", id="no such game"),
        pytest.param(
            ["--out", "l", "--game", "connect-four", "--cards", "5"], "no option 'cards'", id="another game's"
        ),
        pytest.param(["--out", "l", "--weights", "nowhere"], "no file 'nowhere'", id="weights that are not there"),
        pytest.param(["--out", "l", "--iterations", "0"], "--iterations: '0' is less than 1", id="no iterations"),
        pytest.param(["--out", "l", "--gate", "55"], "--gate: '55' is more than 1", id="a gate in per cent"),
        pytest.param(["--out", "l", "--gate-games", "50"], "Add --gate 0.55.", id="games for no gate"),
        pytest.param(["--out", "l", "--resign", "0.9"], "Leave --resign out.", id="resignation among four"),
        pytest.param(["--out", "l", "--resign-check", "0.2"], "Add --resign 0.9.", id="a check of no resignation"),
        pytest.param(["--out", "a,b"], "parted by commas", id="a folder that training would take for two"),
        pytest.param(
            ["--out", "l", "--batch-size", "99999"], "--batch-size: 99999 is more than 65536", id="training's options"
        ),
        pytest.param(["--out", "l", "--dtype", "float16"], "gradients vanish", id="training's numbers"),
        pytest.param(["--out", "l", "--itrations", "3"], "Did you mean '--iterations'?", id="flag"),
    ],
)
def test_a_loop_that_cannot_be_is_refused(gpuinfer, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    code, out, err = gpuinfer("loop", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert not (tmp_path / "l").exists()


def test_a_backend_that_cannot_train_is_refused_before_any_game(gpuinfer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GPUINFER_BACKEND", "central")
    code, _, err = gpuinfer("loop", "--out", "l")
    assert (code, "train has a model of gradients, and the backend 'central' serves" in err) == (2, True)
    assert not (tmp_path / "l").exists()


def started(folder, *words):
    return Forked(["gpuinfer", "loop", *WORK, *words], folder, own_environment(COLUMNS="160"), text=True)


def ended(folder, *words):
    with started(folder, *words) as process:
        out, err = process.communicate(timeout=280)
    return process.returncode, out, err


def reports(iteration, kinds):
    """When each was written."""
    return {kind: (iteration / f"{kind}.json").stat().st_mtime_ns for kind in kinds}


@pytest.mark.thorough
@pytest.mark.timeout(600)
def test_a_loop_that_was_killed_in_any_of_its_steps_goes_on_where_it_was(tmp_path):
    """With SIGKILL, as soon as a step's folder is there."""
    first = tmp_path / "l" / "iteration-001"
    finished = {}
    for kind in KINDS:
        with started(tmp_path, *(["--resume"] if kind != KINDS[0] else [])) as process:
            while not (first / kind / "manifest.json").exists():
                assert process.poll() is None, process.communicate()
                time.sleep(0.02)
            children = psutil.Process(process.pid).children(recursive=True)
            process.kill()
            process.communicate(timeout=60)
        assert not psutil.wait_procs(children, timeout=30)[1]  # none goes on alone
        assert reports(first, finished) == finished
        finished = reports(first, KINDS[: KINDS.index(kind)])
    code, _, err = ended(tmp_path)
    assert code == 2
    assert "--resume" in err
    code, out, err = ended(tmp_path, "--resume", "--json", "-")
    assert code == 0, err
    told = json.loads(out)
    assert [one["iteration"] for one in told["iterations"]] == [1, 2]
    assert [one["games"] for one in told["iterations"]] == [12, 12]
    assert [one["strength"]["games"] for one in told["iterations"]] == [8, 8]
    assert [one["gate"]["games"] for one in told["iterations"]] == [6, 6]
    assert all(one["loss"] > 0 for one in told["iterations"])
    assert reports(first, finished) == finished
    assert json.loads((tmp_path / "l" / "loop.json").read_text()) == told
    code, out, err = ended(tmp_path, "--resume", "--fail-under", "1")
    assert (code, "against the first generation" in out) == (4 if told["strength"]["score"] < 1 else 0, True)
    code, _, err = ended(tmp_path, "--resume", "--simulations", "5")
    assert code == 2
    assert "simulations: 4 there, 5 here" in err
