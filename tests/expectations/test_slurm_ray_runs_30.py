"""What users of a cluster expect of runs that are divided over it: the bytes of one machine, on a real SLURM and a real
Ray of three machines, also while these, their daemons, nodes and the coordinator are killed at random times.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import urllib.request
from collections.abc import Iterator

import pytest
from system import cluster_chaos, ray_here, slurm_here
from system.cluster_chaos import Player, RayPlace, SlurmPlace
from system.slurm_here import Slurm

pytestmark = [pytest.mark.system, pytest.mark.timeout(1200)]
GAMES, SIMULATIONS = 300, 200
SELFPLAY = [str(word) for word in (*cluster_chaos.COMMAND, "selfplay", *cluster_chaos.GAME, SIMULATIONS)]


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_here.running(3, cpus=2, gpus=2) as made:
        yield made


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> dict[str, str]:
    """The files of self-play on one machine, by their digests."""
    return cluster_chaos.play_alone(GAMES, SIMULATIONS, tmp_path_factory.mktemp("alone") / "games")


def test_self_play_over_jobs_has_the_bytes_of_one_machine(slurm, alone, tmp_path):
    place = SlurmPlace(slurm, tmp_path)
    command = cluster_chaos.command(GAMES, SIMULATIONS, tmp_path / "games")
    ended = subprocess.run([*command, *place.flags], capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr
    assert cluster_chaos.digests(tmp_path / "games") == alone
    slurm.wait(lambda: not slurm.jobs() and not place.left())


def test_self_play_over_the_steps_of_a_job_takes_all_its_nodes_and_has_the_same_bytes(slurm, alone, tmp_path):
    report = tmp_path / "report.json"
    words = ["--games", GAMES, "--out", tmp_path / "games", "--json", report, "--no-live", "--launcher", "srun"]
    command = shlex.join(map(str, [*SELFPLAY, *words, "-L", f"folder={tmp_path / 'shared'}"]))
    where = ["--nodes=3", "--ntasks-per-node=1", f"--output={tmp_path / 'log'}", f"--chdir={tmp_path}", "--mem=1000M"]
    ended = subprocess.run(["sbatch", "--wait", *where, "--wrap", command], capture_output=True, timeout=600)
    assert ended.returncode == 0, (tmp_path / "log").read_text()
    assert cluster_chaos.digests(tmp_path / "games") == alone
    assert len(json.loads(report.read_text())["cluster"]["nodes"]) == 3


def test_a_fleet_of_steps_serves_from_inside_a_job(slurm, tmp_path):
    ready = tmp_path / "ready.json"
    serve = [*cluster_chaos.COMMAND, "serve", "--model", "tiny", "--replicas", "2", "--launcher", "srun", "--port", "0"]
    command = shlex.join([*serve, "--ready-file", str(ready), "-B", "slots=4", "-L", f"folder={tmp_path / 'shared'}"])
    where = ["--nodes=1", "--ntasks=2", "--gpus=2", f"--output={tmp_path / 'log'}", f"--chdir={tmp_path}"]
    number = slurm_here.run("sbatch", "--parsable", *where, "--wrap", command)
    try:
        slurm.wait(lambda: ready.exists() or number not in slurm.jobs())
        assert ready.exists(), (tmp_path / "log").read_text()
        url = f"http://127.0.0.1:{json.loads(ready.read_text())['port']}"
        with urllib.request.urlopen(f"{url}/stats", timeout=60) as answer:
            assert json.load(answer)["healthy_workers"] >= 1
        body = json.dumps({"prompt": "Hello", "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            assert json.load(answer)["choices"]
        assert slurm.jobs() == [number], "one job holds them all"
    finally:
        slurm_here.run("scancel", number)
    slurm.wait(lambda: not slurm.jobs())


@pytest.mark.parametrize("seed", [3, 102])
def test_kills_at_random_times_lose_and_repeat_nothing_on_slurm(slurm, tmp_path, seed):
    expected = cluster_chaos.play_alone(400, 1000, tmp_path / "alone")
    outcome = Player(SlurmPlace(slurm, tmp_path), tmp_path, 400, 1000, seed).play(expected)
    assert not outcome.failure, outcome.told()


@pytest.mark.filterwarnings("ignore")
def test_kills_at_random_times_lose_and_repeat_nothing_on_ray(tmp_path):
    expected = cluster_chaos.play_alone(400, 1000, tmp_path / "alone")
    with ray_here.running(3, cpus=2) as ray:
        outcome = Player(RayPlace(ray), tmp_path, 400, 1000, 201).play(expected)
    assert not outcome.failure, outcome.told()
