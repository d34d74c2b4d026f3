"""`gpuinfer rollouts` with a trainer: simulated, or the example in a process of its own, which is killed."""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ports import free_port
from rollouts_play.rollouts_run import ended, groups_in, rollouts, started, until

from gpuinfer.rollouts.steps import read_steps

EXAMPLE = Path(__file__).parents[2] / "examples" / "rollouts_trainer.py"
ARITHMETIC = "gpuinfer.rollouts.builtin_environments:Arithmetic"
SMALL = ("--env", ARITHMETIC, "--model", "null", "--plain", "--samples-per-group", 2, "--max-new-tokens", 4)
WAIT_S = 120


def steps_in(path):
    return list(read_steps(path)) if path.exists() else []


def numbers(steps):
    return [number for one in steps for number in one.numbers]


def test_a_simulated_trainer_is_told_step_by_step(tmp_path):
    file, report = tmp_path / "steps.jsonl", tmp_path / "report.json"
    code, _, said = rollouts(
        *SMALL, "--groups", 6, "--batch-groups", 2, "--trainer-seconds", 0.01, "--steps", file, "--json", report
    )
    assert code == 0, said
    found = steps_in(file)
    assert sorted(numbers(found)) == list(range(6))
    assert [(one.step, one.version, one.version_after) for one in found] == [(0, 0, 1), (1, 1, 2), (2, 2, 3)]
    assert all(one.train_s >= 0.01 for one in found)
    assert found[-1].slots > 0
    assert sum(one.output_tokens for one in found) > 0
    assert all(one.verdict["kind"] for one in found)
    assert json.loads(report.read_text())["status"] == "done"


def test_the_record_says_which_version_drew_each_token(tmp_path):
    code, _, said = rollouts(
        *SMALL, "--groups", 8, "--trainer-seconds", 0, "--max-staleness", 0, "--out", tmp_path / "record"
    )
    assert code == 0, said
    versions = [one.versions for one in groups_in(tmp_path / "record")]
    assert versions == [("",), *((f"v{number}",) for number in range(1, 8))]  # each begun with the newest weights


def listening(tmp_path, *words):
    return started(*SMALL, "--listen", "127.0.0.1:0", "--steps", tmp_path / "steps.jsonl", *words)


def url_of(run):
    line = b""
    while b"take groups at" not in line:
        line = run.stderr.readline()
        assert line, "it ended before it listened"
    return re.search(rb"http://[\d.]+:\d+", line)[0].decode()


def test_the_example_trains_on_every_group_once(tmp_path):
    with listening(tmp_path, "--groups", 9, "--batch-groups", 2) as run:
        trainer = subprocess.run(
            [sys.executable, str(EXAMPLE), url_of(run)], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        code, _, said = ended(run)
    assert (code, trainer.returncode) == (0, 0), said + trainer.stderr
    assert len(trainer.stdout.splitlines()) == 5
    found = steps_in(tmp_path / "steps.jsonl")
    assert sorted(numbers(found)) == list(range(9))
    assert [one.version_after for one in found] == [1, 2, 3, 4, 5]
    assert all(one.metrics["tokens"] > 0 for one in found)


def test_a_trainer_that_is_killed_in_the_midst_of_a_batch_and_started_again_loses_nothing(tmp_path):
    stuck = tmp_path / "stuck.py"
    source = EXAMPLE.read_text()
    marked = 'metrics = train(batch["groups"])'
    assert marked in source
    in_the_midst = ['if batch["batch"] == 3:', '    print("stuck", flush=True)', "    time.sleep(600)"]
    stuck.write_text(source.replace(marked, "\n            ".join([marked, *in_the_midst])))
    with listening(tmp_path, "--groups", 8, "--batch-groups", 2) as run:
        url = url_of(run)
        with subprocess.Popen([sys.executable, str(stuck), url], stdout=subprocess.PIPE, text=True) as first:
            assert any("stuck" in line for line in first.stdout)
            first.send_signal(signal.SIGKILL)
        second = subprocess.run(
            [sys.executable, str(EXAMPLE), url], capture_output=True, text=True, timeout=WAIT_S, check=False
        )
        code, _, said = ended(run)
    assert (code, second.returncode) == (0, 0), said + second.stderr
    assert second.stdout.splitlines()[0].startswith("batch 3 again: ")
    found = steps_in(tmp_path / "steps.jsonl")
    assert sorted(numbers(found)) == list(range(8))
    assert len(found) == 4


@pytest.mark.thorough
def test_a_run_that_is_killed_and_resumed_trains_on_every_group_once(tmp_path):
    """What was written and not trained on goes to the trainer first; what was trained on does not come again."""
    words = ["--groups", 40, "--batch-groups", 2, "--buffer-depth", 8, "--trainer-seconds", 0.1, "--resume"]
    files = ["--out", tmp_path / "record", "--steps", tmp_path / "steps.jsonl"]
    with started(*SMALL, *words, *files) as run:
        until(lambda: len(steps_in(tmp_path / "steps.jsonl")) >= 4, run)
        run.send_signal(signal.SIGKILL)
        ended(run)
    before = steps_in(tmp_path / "steps.jsonl")
    code, _, said = rollouts(*SMALL, *words, *files)
    assert code == 0, said
    found = steps_in(tmp_path / "steps.jsonl")
    assert found[: len(before)] == before
    assert [one.step for one in found] == list(range(len(found)))
    assert [one.version_after for one in found] == [one.version + 1 for one in found]
    trained = numbers(found)
    assert len(set(trained)) == len(trained)
    assert 40 - len(trained) <= sum(one.dropped for one in found)
    assert [one.number for one in groups_in(tmp_path / "record")] == list(range(40))


@pytest.mark.thorough
def test_a_trainer_outlives_the_run_which_is_killed_and_gone_on_with(tmp_path):
    """It asks until somebody listens there again; batches, steps and versions are counted on."""
    slow = tmp_path / "slow.py"
    slow.write_text(EXAMPLE.read_text().replace("PATIENCE_S = 30.0", f"PATIENCE_S = {WAIT_S}"))
    port = free_port()
    files = ["--out", tmp_path / "record", "--steps", tmp_path / "steps.jsonl", "--resume"]
    words = [*SMALL, "--groups", 400, "--batch-groups", 2, "--listen", f"127.0.0.1:{port}", *files]
    with started(*words) as run:
        url = url_of(run)
        trainer = subprocess.Popen([sys.executable, str(slow), url], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        until(lambda: len(steps_in(tmp_path / "steps.jsonl")) >= 4, run)
        run.send_signal(signal.SIGKILL)
        ended(run)
    before = len(steps_in(tmp_path / "steps.jsonl"))
    code, _, said = rollouts(*words)
    with trainer:
        told = trainer.communicate(timeout=WAIT_S)[0].decode()
    assert (code, trainer.returncode) == (0, 0), said + told
    found = steps_in(tmp_path / "steps.jsonl")
    assert 4 <= before < len(found)
    assert [one.step for one in found] == list(range(len(found)))
    trained = numbers(found)
    assert len(set(trained)) == len(trained)
    assert [one.number for one in groups_in(tmp_path / "record")] == list(range(400))


def test_ctrl_c_ends_a_run_that_waits_for_its_trainer(tmp_path):
    with listening(tmp_path, "--groups", 9, "--out", tmp_path / "record") as run:
        url_of(run)
        until(lambda: len(groups_in(tmp_path / "record")) >= 3, run)
        run.send_signal(signal.SIGINT)
        code, _, said = ended(run)
    assert code == 3, said
    assert len(groups_in(tmp_path / "record")) == 3  # no more were begun: nobody trained on them
