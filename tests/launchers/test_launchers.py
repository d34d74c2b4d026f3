"""Launchers as far as they can be seen without a cluster: refusals, last words, an actor's work, a batch script."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
import sys
import time

import msgspec
import pytest
from plans import COMMAND, SECONDS, plan

from gpuinfer.config.options import GivenValue
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import machine
from gpuinfer.launchers import base, carried_process, slurm
from gpuinfer.launchers.local import LocalLauncher
from gpuinfer.launchers.ray import RayActor
from gpuinfer.launchers.slurm import SlurmLauncher

PROGRAMS = ("sbatch", "srun", "squeue", "scancel", "scontrol")


def make(launcher: str, **options: str):
    return base.make_launcher(launcher, {name: GivenValue(value, f"-L {name}") for name, value in options.items()})


@pytest.mark.parametrize(
    ("launcher", "option", "value"),
    [
        ("ray", "address", "somewhere"),
        ("ray", "address", "http://a:1"),
        ("ray", "gpus", "-1"),
        ("ray", "cpus", "many"),
        ("slurm", "partition", "main --wrap=reboot"),
        ("slurm", "partition", "-p"),
        ("slurm", "account", "a;reboot"),
        ("slurm", "account", "a\nb"),
        ("slurm", "time", "$(reboot)"),
        ("slurm", "mem", "64G; reboot"),
        ("slurm", "gpus", "`id`"),
        ("slurm", "container", "--export=ALL"),
        ("slurm", "container", "image\n#SBATCH --wrap=reboot"),
        ("slurm", "cpus", "none of them"),
        ("slurm", "colour", "red"),
    ],
)
def test_values_that_are_none_or_more_than_values_are_refused(launcher, option, value):
    with pytest.raises(UsageError, match=option):
        make(launcher, **{option: value})


def test_where_a_cluster_is_not_to_be_had_the_cure_is_named(monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        patch.setattr(importlib.util, "find_spec", lambda name: None)
        with pytest.raises(UsageError, match=r"pip install 'gpuinfer\[ray\]'"):
            make("ray")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UsageError, match=r"there is no SLURM here: no sbatch[\s\S]*login node"):
        SlurmLauncher().check()
    for program in PROGRAMS:
        (tmp_path / program).write_text("#!/bin/sh\necho 'squeue: error: Unable to contact controller' >&2; exit 1")
        (tmp_path / program).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with pytest.raises(UsageError, match="Unable to contact controller"):
        SlurmLauncher().check()
    for program in PROGRAMS:
        (tmp_path / program).write_text("#!/bin/sh\n")
    with pytest.raises(UsageError, match="-L container=IMAGE"):
        make("slurm", mounts="/data:/data")


def test_the_script_takes_every_word_for_itself(tmp_path):
    folder = tmp_path / "a folder; with $(signs) and 'quotes'"
    folder.mkdir()
    words = ["--model", "a b; touch harm", "$(touch harm)", "`touch harm`", "'", '"', "\\", "*"]
    srun = ["--container-image=/images/my image$(touch harm).sqsh"]
    made = slurm.write_batch_script(plan(folder, *words), folder / "launcher.pulse", ["python", "-m", "gpuinfer"], srun)
    subprocess.run(["bash", "-n", made], check=True)
    (line,) = [line for line in made.read_text().splitlines() if line.startswith("srun ")]
    told = shlex.split(line.removesuffix(' --host "$address"'))
    assert told[: len(srun) + 4] == ["srun", *srun, "python", "-m", "gpuinfer"]
    assert told[len(srun) + 4 :][: len(words)] == words


async def test_last_words_are_an_attempts_own_though_attempts_share_a_log(tmp_path):
    says = "import os, sys; sys.argv[1].endswith('one') and print('out of memory', flush=True); os.kill(os.getpid(), 9)"
    local = LocalLauncher(command=(sys.executable, "-c", says))
    for attempt, (word, said) in enumerate([("one", 'Its last words: "out of memory"'), ("two", "It said nothing.")]):
        replica = await local.launch(plan(tmp_path, word, attempt=attempt))
        with pytest.raises(WorkError, match=r"ended before it served \(SIGKILL\)") as told:
            await replica.ready(SECONDS)
        assert said in str(told.value)
        await replica.kill()
    assert replica.last_words() == ""
    replica.log.write_text("later\n")  # somebody has cut it shorter: all of it is this replica's own
    assert replica.last_words() == "later"


@pytest.fixture
def actor():
    made = RayActor()
    yield made
    made.end()


def polled(actor: RayActor, condition) -> dict:
    until = time.monotonic() + SECONDS
    while not condition(told := actor.poll(0)):
        assert time.monotonic() < until, told
        time.sleep(0.02)
    return told


def started(actor: RayActor, folder, *words: str) -> int:
    setup, key = str(folder / "setup.json"), str(folder / "key")
    order = carried_process.process_order(plan(folder, *words), files={setup: b"{}", key: b"secret\n"}, command=COMMAND)
    order = msgspec.structs.replace(order, arguments=("--setup-file", setup, *order.arguments))
    return actor.start(order, host="127.0.0.1")


def test_an_actor_brings_its_replicas_files_runs_it_and_tells_of_it(actor, tmp_path):
    pid = started(actor, tmp_path)
    told = polled(actor, lambda told: told["address"] and b"is up" in told["log"])
    assert (told["alive"], told["address"][0]) == (True, "127.0.0.1")
    with open(f"/proc/{pid}/cmdline") as line:
        words = line.read().split("\0")
    setup = words[words.index("--setup-file") + 1]
    assert str(tmp_path) not in setup  # nothing of the supervisor's folder is needed here
    with open(setup) as file:
        assert file.read() == "{}"
    assert os.stat(setup).st_mode & 0o777 == 0o600
    assert actor.poll(len(told["log"]))["log"] == b""
    actor.terminate()
    assert polled(actor, lambda told: not told["alive"])["code"] == 0
    actor.end()
    assert not os.path.exists(setup)


def test_a_replica_that_ends_first_is_told_with_its_code_and_words(actor, tmp_path):
    started(actor, tmp_path, "--fail", "no memory")
    told = polled(actor, lambda told: not told["alive"])
    assert (told["code"], told["address"]) == (1, None)
    assert b"no memory" in told["log"]


@pytest.mark.parametrize(
    ("limit", "seconds"),
    [("90", 5400), ("90:30", 5430), ("01:30:00", 5400), ("1-12", 129_600), ("1-12:30", 131_400), ("UNLIMITED", None)],
)
def test_time_limits_are_read_as_sbatch_reads_them(limit, seconds):
    assert slurm.time_limit_seconds(limit) == (float("inf") if seconds is None else seconds)


async def test_a_quota_that_refuses_a_job_is_named_with_its_cure(monkeypatch, tmp_path):
    said = "sbatch: error: QOSMaxSubmitJobPerUserLimit\nsbatch: error: Batch job submission failed: Job violates"
    (tmp_path / "sbatch").write_text(f"#!/bin/sh\necho '{said} accounting/QOS policy' >&2; exit 1")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    launcher = SlurmLauncher(SlurmLauncher.Options(folder=str(tmp_path)))
    try:
        with pytest.raises(WorkError, match=r"QOSMaxSubmitJobPerUserLimit[\s\S]*limit of your account[\s\S]*-L qos="):
            await launcher.launch(plan(tmp_path))
    finally:
        await launcher.close()


def test_cores_that_slurm_gives_count_where_it_does_not_enforce_them(monkeypatch):
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "1")
    assert machine.cores() == 1
    monkeypatch.delenv("SLURM_CPUS_ON_NODE")
    assert machine.cores() >= 1
