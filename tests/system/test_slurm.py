"""The launcher `slurm` on a real SLURM of one node."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

import pytest
import slurm_here

sys.path.insert(0, str(Path(__file__).parents[1] / "launchers"))

from plans import COMMAND, SECONDS, plan

from gpuinfer.errors import WorkError
from gpuinfer.fleet.launchers.slurm import SlurmLauncher

pytestmark = pytest.mark.system


@pytest.fixture(scope="module", autouse=True)
def cluster():
    with slurm_here.running() as folder:
        yield folder


@contextlib.asynccontextmanager
async def launching(**options):
    made = SlurmLauncher(SlurmLauncher.Options(**options), COMMAND, look_s=0.2)
    made.check()
    try:
        yield made
    finally:
        await made.close()


def jobs() -> list[str]:
    """Those that run or wait."""
    return subprocess.run(["squeue", "--noheader", "--format=%i"], capture_output=True, text=True).stdout.split()


def scancel(*words: str) -> None:
    subprocess.run(["scancel", *words], check=True, timeout=SECONDS)


async def until(condition) -> None:
    async with asyncio.timeout(SECONDS):
        while not condition():  # noqa: ASYNC110  a file, or another program's word
            await asyncio.sleep(0.05)


async def test_a_job_comes_up_where_slurm_knows_the_node_and_leaves_when_asked(tmp_path):
    async with launching(time="00:10:00", cpus=1, mem="100M") as slurm:
        replica = await slurm.launch(plan(tmp_path))
        host, port = await replica.ready(SECONDS)
        assert host == "127.0.0.1"  # as the configuration has it
        socket.create_connection((host, port), SECONDS).close()
        assert replica.alive
        await until(lambda: "the sham replica is up" in replica.last_words())
        await replica.terminate(SECONDS)
        assert not replica.alive
    await until(lambda: not jobs())


async def test_our_settings_stay_here_and_a_replica_that_does_not_leave_is_killed(tmp_path, monkeypatch):
    monkeypatch.setenv("GPUINFER_DEVICE", "nonsense")
    async with launching() as slurm:
        replica = await slurm.launch(plan(tmp_path, "--stubborn"))
        await replica.ready(SECONDS)
        await until(lambda: "settings []" in replica.log.read_text())
        await replica.terminate(0.5)
        assert not replica.alive


async def test_a_replica_that_ends_first_and_what_sbatch_refuses_are_told_in_their_own_words(tmp_path):
    async with launching() as slurm:
        replica = await slurm.launch(plan(tmp_path, "--fail", "CUDA out of memory"))
        with pytest.raises(WorkError, match=r"replica-0 \(job \d+, FAILED\) ended before it served") as told:
            await replica.ready(SECONDS)
        assert "CUDA out of memory" in str(told.value)
    async with launching(partition="nowhere") as slurm:
        with pytest.raises(WorkError, match="nvalid partition"):
            await slurm.launch(plan(tmp_path))


async def test_the_end_of_an_allocation_is_noticed_and_the_next_attempt_comes_up(tmp_path):
    async with launching() as slurm:
        replica = await slurm.launch(plan(tmp_path))
        await replica.ready(SECONDS)
        scancel("--quiet", replica.number)  # as a time limit or a preemption does
        await until(lambda: not replica.alive)
        again = await slurm.launch(plan(tmp_path, attempt=1))
        await again.ready(SECONDS)
        assert again.alive
    await until(lambda: not jobs())


async def test_waiting_in_the_queue_is_told_bounded_and_no_failure_of_the_replica(tmp_path, caplog):
    async with launching(partition="closed", pending=2) as slurm:
        replica = await slurm.launch(plan(tmp_path))
        with pytest.raises(WorkError, match="waited 2 s in the queue"):
            await replica.ready(0.01)
        assert replica.alive
        await replica.terminate(SECONDS)
        assert not replica.alive
    assert "waits in the queue of SLURM" in caplog.text
    await until(lambda: not jobs())


async def test_a_job_whose_fleet_was_killed_ends_itself(tmp_path):
    code = (
        "import asyncio, sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\n"
        "from plans import COMMAND, plan\n"
        "from gpuinfer.fleet.launchers import slurm\n"
        "slurm.PULSE_LOOK_S, slurm.LOOKS = 1, 3\n"
        "async def main():\n"
        "    replica = await slurm.SlurmLauncher(None, COMMAND).launch(plan(Path(sys.argv[1])))\n"
        "    await replica.ready(60)\n"
        "    print('ready', flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    shams = str(Path(__file__).parents[1] / "launchers")
    fleet = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(tmp_path), shams, stdout=PIPE)
    assert await fleet.stdout.readline() == b"ready\n"
    assert len(jobs()) == 1
    fleet.kill()
    await fleet.communicate()
    await until(lambda: not jobs())
