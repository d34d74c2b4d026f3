"""What users of a cluster expect of the launchers `slurm`, `srun` and `ray`, on a real SLURM of three nodes and a real
Ray of three: steps of a job that runs, requeue, preemption, time limits; nodes that are lost and that join later.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from system import ray_here, slurm_here
from system.ray_here import RayCluster
from system.slurm_here import Slurm

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.launchers.base import LaunchedProcess, ProcessPlan
from gpuinfer.launchers.ray import RayLauncher
from gpuinfer.launchers.slurm import SlurmLauncher
from gpuinfer.launchers.srun import Allocation, SrunLauncher

SHAMS = Path(__file__).parents[1] / "launchers"
NODE = (sys.executable, str(SHAMS / "sham_node.py"))
REPLICA = (sys.executable, str(SHAMS / "sham.py"))
WAIT_S = 180.0
UP = re.compile(r"the sham node (\d+) is up on (\S*) with devices (\S+) and cores (\S*)")


def node_plan(folder: Path, index: int = 0, attempt: int = 0, *words: str) -> ProcessPlan:
    return ProcessPlan(f"node-{index}", index, folder, words, threads=1, attempt=attempt, serves=False)


def replica_plan(folder: Path, index: int = 0, *words: str) -> ProcessPlan:
    made = ProcessPlan(f"replica-{index}", index, folder, (), threads=1)
    return replace(made, arguments=(*words, "--ready-file", str(made.ready_file)))


def starts(process: LaunchedProcess) -> list[tuple[int, str, str, str]]:
    """Process id, node, devices and cores each time that it has come up."""
    text = process.log.read_text() if process.log.exists() else ""
    return [(int(pid), *more) for pid, *more in UP.findall(text)]  # type: ignore[misc]


async def until(condition: Callable[[], object], why: Callable[[], object] = lambda: "") -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"that did not come about: {why()}"
        await asyncio.sleep(0.1)


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


# Allocations, as SLURM describes them


@pytest.mark.parametrize(
    ("lines", "variables", "gpus", "cores", "places"),
    [
        pytest.param("Nodes=a7 CPU_IDs=0-63 Mem=9 GRES=gpu:8(IDX:0-7)", {}, 1, 8, 8, id="a share by devices"),
        pytest.param(
            "Nodes=a[1-2] CPU_IDs=0-15,32-47 Mem=9 GRES=gpu:a100:4(IDX:0-3)", {}, 2, 16, 4, id="two devices each"
        ),
        pytest.param("Nodes=a7 CPU_IDs=0-7 Mem=0 GRES=", {"SLURM_CPUS_PER_TASK": "2"}, 0, 2, 4, id="a task's cores"),
        pytest.param("Nodes=a[1,3],b CPU_IDs=0-3 Mem=0 GRES=", {"SLURM_NTASKS": "6"}, 0, 2, 6, id="a task's share"),
        pytest.param(
            "Nodes=a[1-2] CPU_IDs=0-3 Mem=0 GRES=\n Nodes=b CPU_IDs=0-1 Mem=0 GRES=",
            {},
            0,
            2,
            5,
            id="the least node",
        ),
    ],
)
def test_a_process_gets_its_share_of_the_allocation(lines, variables, gpus, cores, places):
    allocation = Allocation.of({"SLURM_JOB_ID": "7", **variables}, lambda job: f"JobId={job}\n {lines}\n")
    assert allocation.cores_for(gpus) == cores
    assert allocation.places(cores, gpus) == places


def test_outside_an_allocation_and_inside_a_step_the_cure_is_named():
    def of(**variables: str) -> Allocation:
        return Allocation.of(variables, lambda job: "Nodes=a CPU_IDs=0 Mem=0 GRES=" if job == "7" else "")

    with pytest.raises(UsageError, match=r"sbatch --wrap[\s\S]*--launcher slurm"):
        of()
    with pytest.raises(UsageError, match="Leave out the srun"):
        of(SLURM_JOB_ID="7", SLURM_STEP_ID="0")
    with pytest.raises(UsageError, match="Has it ended"):
        of(SLURM_JOB_ID="8")
    assert of(SLURM_JOB_ID="7", SLURM_STEP_ID="4294967290").job == "7", "salloc's interactive step"


# A real SLURM


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with slurm_here.running(3, cpus=2, gpus=2) as made:
        yield made


@pytest.fixture
def allocation(slurm, tmp_path, monkeypatch) -> Iterator[Callable[..., None]]:
    """Makes this process one that runs in an allocation, as a command does in `salloc WORDS`."""
    started: list[subprocess.Popen[bytes]] = []

    def allocate(*words: str) -> None:
        file = tmp_path / "variables"
        shell = f"env -0 > {file}.draft && mv {file}.draft {file}; exec sleep 1000"
        quiet = dict.fromkeys(("stdin", "stderr"), subprocess.DEVNULL)
        started.append(subprocess.Popen(["salloc", *words, "sh", "-c", shell], start_new_session=True, **quiet))
        slurm.wait(file.exists)
        for name, _, value in (one.partition("=") for one in file.read_text().split("\0") if one):
            if name.startswith("SLURM_"):
                monkeypatch.setenv(name, value)

    yield allocate
    for process in started:
        for command in psutil.Process(process.pid).children():
            command.terminate()  # salloc gives its allocation back
        process.wait(60)
    slurm.wait(lambda: not slurm.jobs())


@contextlib.asynccontextmanager
async def launching(launcher):
    launcher.check()
    try:
        yield launcher
    finally:
        await launcher.close()


@pytest.mark.system
@pytest.mark.timeout(900)
async def test_a_job_with_four_gpus_runs_four_replicas_as_steps_and_submits_nothing(slurm, allocation, tmp_path):
    allocation("-N2", "--ntasks-per-node=1", "--cpus-per-task=2", "--gpus-per-node=2", "--mem=1000M")
    jobs = slurm.jobs()
    async with launching(SrunLauncher(command=NODE)) as launcher:
        assert launcher.capacity == 4
        nodes = [await launcher.launch(node_plan(tmp_path, index)) for index in range(5)]
        await until(lambda: sum(len(starts(node)) for node in nodes) == 4)
        assert slurm.jobs() == jobs
        up = [node for node in nodes if starts(node)]
        places = sorted(starts(node)[0][1:] for node in up)
        assert places == [(host, gpu, "1") for host in ("node1", "node2") for gpu in ("0", "1")]
        (waiting,) = set(nodes) - set(up)
        assert waiting.alive
        await up[0].terminate(WAIT_S)
        assert "leaves in order" in up[0].log.read_text()
        await until(lambda: starts(waiting), waiting.last_words)
        assert starts(waiting)[0][1:] == starts(up[0])[0][1:], "the place that became free"
        for node in nodes:
            await node.kill()


@pytest.mark.system
@pytest.mark.timeout(900)
async def test_a_step_that_serves_is_reached_at_its_node_and_ends_when_it_must(slurm, allocation, tmp_path):
    allocation("-N2", "-n4", "--mem=1000M")
    async with launching(SrunLauncher(command=REPLICA)) as launcher:
        replicas = [await launcher.launch(replica_plan(tmp_path, index, "--stubborn")) for index in (0, 1)]
        for replica in replicas:
            host, port = await replica.ready(WAIT_S)
            (await asyncio.open_connection(host, port))[1].close()
        assert re.search(r"replica-0 \(step \d+\.\d+\)", replicas[0].called)
        for replica in replicas:
            await replica.terminate(0.5)
            assert not replica.alive
        await until(lambda: not slurm_here.run("squeue", "--steps", "--noheader", "--format=%j"))
        failing = await launcher.launch(replica_plan(tmp_path, 2, "--fail", "CUDA out of memory"))
        with pytest.raises(WorkError, match=r"ended before it served \(exit code 1\)[\s\S]*CUDA out of memory"):
            await failing.ready(WAIT_S)
        await failing.kill()


PROGRAM = """
import asyncio, sys
from pathlib import Path
from gpuinfer.launchers.base import ProcessPlan
from gpuinfer.launchers.srun import SrunLauncher
async def main():
    await SrunLauncher(command=sys.argv[2:]).launch(ProcessPlan("node-0", 0, Path(sys.argv[1]), (), serves=False))
    await asyncio.sleep(600)
asyncio.run(main())
"""


@pytest.mark.system
@pytest.mark.timeout(900)
async def test_steps_leave_when_what_started_them_is_killed(slurm, allocation, tmp_path):
    allocation("-N1", "-n1")
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PROGRAM, str(tmp_path), *NODE)
    log = tmp_path / "node-0.log"
    await until(lambda: log.exists() and UP.search(log.read_text()))
    pid = int(UP.findall(log.read_text())[0][0])
    parent.kill()
    await parent.wait()
    await until(lambda: gone(pid))
    await until(lambda: not slurm_here.run("squeue", "--steps", "--noheader", "--format=%j"))


def job_of(process: LaunchedProcess) -> str:
    return process.number  # type: ignore[attr-defined, no-any-return]


@pytest.mark.system
@pytest.mark.timeout(900)
async def test_a_node_that_is_preempted_or_whose_machine_is_lost_is_started_again_by_slurm(slurm, tmp_path):
    options = SlurmLauncher.Options(partition="spot", cpus=2, folder=str(tmp_path))
    async with launching(SlurmLauncher(options, NODE, look_s=0.2)) as launcher:
        node = await launcher.launch(node_plan(tmp_path))
        await until(lambda: starts(node), node.last_words)
        first = starts(node)[0]
        urgent = ["srun", "--partition=urgent", f"--nodelist={first[1]}", "--exclusive", "sleep", "1"]
        preempts = await asyncio.create_subprocess_exec(*urgent, stderr=asyncio.subprocess.DEVNULL)
        seen: set[bool] = set()
        await until(lambda: seen.add(node.alive) or gone(first[0]))
        await until(lambda: seen.add(node.alive) or slurm.release() or len(starts(node)) == 2, node.last_words)
        assert await preempts.wait() == 0
        assert seen == {True}, "the same job: nothing for its supervisor to replace"
        assert "leaves in order" in node.log.read_text(), "SLURM sends SIGTERM first"
        _, host, _, _ = starts(node)[1]
        slurm.kill_node(host)
        try:
            await until(lambda: seen.add(node.alive) or slurm.release() or len(starts(node)) == 3, node.last_words)
        finally:
            slurm.start_node(host)
        assert seen == {True}
        assert starts(node)[2][1] != host
        number = job_of(node)
        await node.terminate(WAIT_S)
        assert not node.alive
    slurm.wait(lambda: number not in slurm.jobs())
    slurm.wait(lambda: slurm.state(host) == "idle")


@pytest.mark.system
@pytest.mark.timeout(900)
async def test_a_node_leaves_in_order_before_its_time_ends(slurm, tmp_path):
    options = SlurmLauncher.Options(time="00:10:00", folder=str(tmp_path))
    async with launching(SlurmLauncher(options, NODE, look_s=0.2)) as launcher:
        node = await launcher.launch(node_plan(tmp_path))
        await until(lambda: starts(node), node.last_words)
        slurm_here.run("scontrol", "update", f"JobId={job_of(node)}", "TimeLimit=2")  # minutes
        await until(lambda: not node.alive, node.last_words)
        assert "leaves in order" in node.log.read_text()
        assert node.job.state == "COMPLETED", "not TIMEOUT"  # type: ignore[attr-defined]


@pytest.mark.system
@pytest.mark.timeout(900)
async def test_a_submission_that_is_refused_later_leaves_those_that_came(slurm, tmp_path):
    options = SlurmLauncher.Options(partition="short", folder=str(tmp_path))
    async with launching(SlurmLauncher(options, NODE, look_s=0.2)) as launcher:
        node = await launcher.launch(node_plan(tmp_path))
        slurm_here.run("scontrol", "update", "PartitionName=short", "State=DRAIN")
        try:
            with pytest.raises(WorkError, match=r"sbatch refused[\s\S]*(?i:partition)[\s\S]*-L account="):
                await launcher.launch(node_plan(tmp_path, 1))
        finally:
            slurm_here.run("scontrol", "update", "PartitionName=short", "State=UP")
        await until(lambda: starts(node), node.last_words)
        assert node.alive
    slurm.wait(lambda: not slurm.jobs())


# A real Ray


@pytest.fixture(scope="module")
def ray() -> Iterator[RayCluster]:
    with ray_here.running(3, cpus=2) as made:
        yield made


def hosts(cluster: RayCluster) -> dict[str, list[psutil.Process]]:
    """The shams on each node."""
    found = {name: cluster.processes(name, NODE[1]) for name in cluster.groups}
    return {name: shams for name, shams in found.items() if shams}


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
async def test_nodes_are_spread_over_the_machines(ray, tmp_path):
    async with launching(RayLauncher(RayLauncher.Options(address=ray.address), NODE)) as launcher:
        nodes = [await launcher.launch(node_plan(tmp_path, index)) for index in range(3)]
        await until(lambda: all(starts(node) for node in nodes))
        assert {name: len(shams) for name, shams in hosts(ray).items()} == {"node1": 1, "node2": 1, "node3": 1}
    await until(lambda: not hosts(ray))


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
async def test_a_node_without_room_waits_for_a_machine_that_joins_later(ray, tmp_path):
    async with launching(RayLauncher(RayLauncher.Options(address=ray.address, cpus=2), NODE)) as launcher:
        nodes = [await launcher.launch(node_plan(tmp_path, index)) for index in range(4)]
        await until(lambda: sum(len(starts(node)) for node in nodes) == 3)
        assert all(node.alive for node in nodes)
        ray.start_nodes("node4")
        await until(lambda: all(starts(node) for node in nodes))
        assert set(hosts(ray)) == {"node1", "node2", "node3", "node4"}
        for node in nodes:
            await node.terminate(WAIT_S)
            assert "leaves in order" in node.log.read_text()
    await until(lambda: not hosts(ray))
    ray.kill_node("node4")


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
async def test_a_raylet_that_is_killed_ends_its_node_and_the_next_attempt_runs_elsewhere(ray, tmp_path):
    async with launching(RayLauncher(RayLauncher.Options(address=ray.address), NODE)) as launcher:
        nodes = [await launcher.launch(node_plan(tmp_path, index)) for index in range(2)]
        await until(lambda: all(starts(node) for node in nodes))
        lost = nodes[0]
        (pid, *_), others = starts(lost)[0], [starts(node)[0][0] for node in nodes[1:]]
        (host,) = [name for name, shams in hosts(ray).items() if any(sham.pid == pid for sham in shams)]
        ray.kill_raylet(host)
        await until(lambda: not lost.alive)
        await until(lambda: gone(pid))
        await lost.kill()
        again = await launcher.launch(node_plan(tmp_path, 0, 1))
        await until(lambda: len(starts(again)) == 2, again.last_words)
        assert host not in hosts(ray)
        assert [starts(node)[0][0] for node in nodes[1:] if node.alive] == others
    await until(lambda: not hosts(ray))
    ray.kill_node(host)
    ray.start_nodes(host)


@pytest.mark.system
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
async def test_nodes_that_wait_make_rays_autoscaler_bring_machines(tmp_path):
    with ray_here.running(0, autoscaled=2) as cluster:
        async with launching(RayLauncher(RayLauncher.Options(address=cluster.address), NODE)) as launcher:
            nodes = [await launcher.launch(node_plan(tmp_path, index)) for index in range(2)]
            await until(lambda: all(starts(node) for node in nodes), lambda: [node.last_words() for node in nodes])
            for node in nodes:
                await node.terminate(WAIT_S)
                assert "leaves in order" in node.log.read_text()
