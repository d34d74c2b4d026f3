"""The launchers `slurm`, on a real SLURM of one node, and `ray`, on a fresh Ray of loopback: by themselves, where shams
stand for replicas, and in a fleet of the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import urllib.request
from asyncio.subprocess import PIPE
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import slurm_here
from serving.replica_servers import serving
from serving.replica_servers import until as until_served

SHAMS = str(Path(__file__).parents[1] / "launchers")
sys.path.insert(0, SHAMS)

from plans import COMMAND, SECONDS, plan  # noqa: E402

from gpuinfer.errors import WorkError  # noqa: E402
from gpuinfer.launchers.base import LaunchedProcess, Launcher  # noqa: E402
from gpuinfer.launchers.ray import RayLauncher  # noqa: E402
from gpuinfer.launchers.slurm import SlurmLauncher  # noqa: E402

pytestmark = [pytest.mark.system, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]  # Ray's own
LONG_S = 3 * SECONDS  # Ray takes its time where others compute
ASKED = {"prompt": "Hello", "max_tokens": 8, "seed": 1}
MARK = f"--mark-{secrets.token_hex(8)}"  # by which these shams are known from those of others on this machine


@dataclass(frozen=True)
class Place:
    """A launcher's place. `lose` ends a replica as the loss of its node or its allocation does."""

    flags: tuple[str, ...]
    make: Callable[..., Launcher]
    left: Callable[[], list[Any]]  # what runs or waits there
    lose: Callable[[LaunchedProcess], object]
    failed: str  # how one that ended first is told
    never: dict[str, Any]  # options of one that waits for a place
    waits: tuple[str, str]  # and what is said of it: as an error, and in the log
    program: str  # starts a launcher


def shams() -> list[psutil.Process]:
    found = psutil.process_iter(["cmdline"])  # srun has the same words behind its own
    return [one for one in found if MARK in (words := one.info["cmdline"] or []) and words[:2] == [*COMMAND]]


def jobs() -> list[str]:
    return subprocess.run(["squeue", "--noheader", "--format=%i"], capture_output=True, text=True).stdout.split()


def scancel(replica: Any) -> None:
    subprocess.run(["scancel", "--quiet", replica.number], check=True, timeout=SECONDS)


SLURM = Place(
    flags=("--launcher", "slurm", "-L", "time=00:10:00"),
    make=lambda **options: SlurmLauncher(SlurmLauncher.Options(**options), COMMAND, look_s=0.2),
    left=jobs,
    lose=scancel,
    failed=r"replica-0 \(job \d+, FAILED\) ended before it served",
    never={"partition": "closed", "pending": 2},
    waits=("waited 2 s in the queue", "waits in the queue of SLURM"),
    program="from gpuinfer.launchers import slurm\n"
    "slurm.PULSE_LOOK_S, slurm.LOOKS = 1, 3\n"
    "make = slurm.SlurmLauncher\n",
)
RAY = Place(
    flags=("--launcher", "ray", "-L", "cpus=0.5"),
    make=lambda **options: RayLauncher(RayLauncher.Options(**{"cpus": 0.5, **options}), COMMAND),
    left=shams,
    lose=lambda replica: shams()[0].parent().kill(),  # the actor's process
    failed="ended with code 1 before it served",
    never={"cpus": 4000, "pending": 6},
    waits=("waited 6 s for its place", "waits for its place: Ray has free"),
    program="from gpuinfer.launchers.ray import RayLauncher as make\n",
)


@pytest.fixture(scope="module", params=[SLURM, RAY], ids=["slurm", "ray"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    with contextlib.ExitStack() as stack:
        if request.param is SLURM:
            stack.enter_context(slurm_here.running())
        elif find_spec("ray") is None:
            pytest.skip("needs Ray")
        yield request.param


@contextlib.asynccontextmanager
async def launching(place: Place, **options: Any):
    made = place.make(**options)
    made.check()
    try:
        yield made
    finally:
        await made.close()
    await until(lambda: not place.left())


def planned(folder: Path, *words: str, **more: Any):
    for name in ("setup.json", "key"):
        (folder / name).write_text("{}")
    return plan(folder, MARK, *words, **more)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LONG_S):
        while not condition():  # noqa: ASYNC110  another program's doing
            await asyncio.sleep(0.1)


async def test_replicas_come_up_where_the_node_is_known_bring_their_logs_and_leave_when_asked(place, tmp_path):
    options = {"time": "00:10:00", "cpus": 1, "mem": "100M"} if place is SLURM else {}
    async with launching(place, **options) as launcher:
        first, second = [await launcher.launch(planned(tmp_path, index=index)) for index in (0, 1)]
        for replica in (first, second):
            host, port = await replica.ready(LONG_S)
            assert host == "127.0.0.1"
            socket.create_connection((host, port), SECONDS).close()
            await until(lambda replica=replica: "the sham replica is up" in replica.last_words())
        assert place is SLURM or {one.nice() for one in shams()} == {os.nice(0)}, "no background work"
        await first.terminate(SECONDS)
        assert (first.alive, second.alive) == (False, True)
    assert place is SLURM or not second.alive, "what squeue says is not read any more once the launcher is closed"


async def test_our_settings_stay_here_and_a_replica_that_does_not_leave_is_killed(place, tmp_path, monkeypatch):
    monkeypatch.setenv("GPUINFER_DEVICE", "nonsense")
    async with launching(place) as launcher:
        replica = await launcher.launch(planned(tmp_path, "--stubborn"))
        await replica.ready(LONG_S)
        await until(lambda: "settings []" in replica.log.read_text())
        await replica.terminate(0.5)
        assert not replica.alive


async def test_a_loss_is_noticed_takes_its_replica_along_and_the_next_attempt_comes_up(place, tmp_path):
    async with launching(place) as launcher:
        replica = await launcher.launch(planned(tmp_path))
        await replica.ready(LONG_S)
        (sham,) = shams()
        place.lose(replica)
        await until(lambda: not replica.alive)
        await until(lambda: not sham.is_running() or sham.status() == psutil.STATUS_ZOMBIE)
        await replica.kill()
        again = await launcher.launch(planned(tmp_path, attempt=1))
        await again.ready(LONG_S)
        assert again.alive


async def test_a_replica_that_ends_first_is_told_and_one_without_a_place_waits_for_a_bounded_time(
    place, tmp_path, caplog
):
    async with launching(place) as launcher:
        replica = await launcher.launch(planned(tmp_path, "--fail", "CUDA out of memory"))
        with pytest.raises(WorkError, match=place.failed) as told:
            await replica.ready(LONG_S)
        assert "CUDA out of memory" in str(told.value)
    async with launching(place, **place.never) as launcher:
        waiting = await launcher.launch(planned(tmp_path, index=1))
        error, line = place.waits
        with pytest.raises(WorkError, match=error):
            await waiting.ready(0.01)
        assert waiting.alive, "no failure of its own"
        await waiting.terminate(SECONDS)
        assert not waiting.alive
        assert line in caplog.text


PROGRAM = """
import asyncio, sys; sys.path.insert(0, sys.argv[2])
from pathlib import Path
from plans import COMMAND, plan
async def main():
    replica = await make(None, COMMAND).launch(plan(Path(sys.argv[1]), sys.argv[3]))
    await replica.ready(180)
    print('ready', flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""


async def test_a_fleet_that_is_killed_leaves_nothing_behind(place, tmp_path):
    planned(tmp_path)
    words = ["-c", place.program + PROGRAM, str(tmp_path), SHAMS, MARK]
    for _ in range(3):  # Ray gives a node of its own 30 s to start, which a busy machine may need
        fleet = await asyncio.create_subprocess_exec(sys.executable, *words, stdout=PIPE)
        async with asyncio.timeout(LONG_S):
            while (line := await fleet.stdout.readline()) not in (b"ready\n", b""):
                pass
        if line:
            break
        await fleet.wait()
    assert len(place.left()) == 1
    fleet.kill()
    await fleet.communicate()
    await until(lambda: not place.left())


async def test_what_the_place_refuses_is_told_in_its_own_words(place, tmp_path):
    wrong, words = {"partition": "nowhere"}, "nvalid partition"
    if place is RAY:
        wrong, words = {"address": "127.0.0.1:1"}, r"a Ray cluster at 127\.0\.0\.1:1 cannot be had"
    async with launching(place, **wrong) as launcher:
        with pytest.raises(WorkError, match=words):
            await launcher.launch(planned(tmp_path))


def test_a_fleet_serves_loses_a_replica_is_whole_again_and_ends(place, tmp_path):
    def ask(path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        url = f"http://127.0.0.1:{fleet.port}{path}"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=240) as response:
            return json.load(response)

    def completed() -> str:
        return ask("/v1/completions", ASKED)["choices"][0]["text"]

    words = ("--model", "tiny", "--replicas", 2, "-B", "slots=4", "-B", "threads=1", *place.flags)
    with serving(*words, folder=tmp_path) as fleet:
        until_served(lambda: ask("/stats")["healthy_workers"] == 2, lambda: fleet.log)
        text, port = completed(), int(ask("/stats")["workers"][0]["url"].rpartition(":")[2])
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
        (replica,) = {one.pid for one in listening if one.laddr.port == port}  # wherever it was started
        psutil.Process(replica).kill()
        assert [completed() for _ in range(5)] == [text] * 5
        until_served(lambda: ask("/stats")["workers"][0]["restarts"] > 0, lambda: fleet.log)
        until_served(lambda: ask("/stats")["healthy_workers"] == 2, lambda: fleet.log)
        assert fleet.end() == 0, fleet.log
