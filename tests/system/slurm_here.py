"""A SLURM of one node or several on this host, for tests and benchmarks: configuration, keys, sockets and ports of its
own, so that it meets no other one. Several nodes are several `slurmd` (Debian builds them with MULTIPLE_SLURMD), each
in a control group, by which it can be held to a share of the cores and lost with all that runs there.

Needs root and the Debian packages slurm-wlm and munge; several nodes need control groups that can be written.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest
from ports import free_port
from system.control_group import ControlGroup

SECONDS = 60
NODE_LOST_S = 5  # without a word of a slurmd, after which SLURM calls its node down and its jobs lost

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
SlurmdTimeout={lost}
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
KillWait=3
MinJobAge=60
MaxArraySize=2001
SchedulerParameters=batch_sched_delay=0,sched_interval=1,requeue_delay=1
Epilog={folder}/epilog
GresTypes=gpu
{nodes}
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=10 PreemptMode=OFF
PartitionName=spot Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=1
PartitionName=short Nodes=ALL MaxTime=00:01:00 DefaultTime=00:01:00 State=UP PriorityTier=1
PartitionName=closed Nodes=ALL MaxTime=INFINITE State=DOWN
"""


@dataclass
class Slurm:
    """A SLURM that is up. `folder` holds its configuration, logs and state."""

    folder: Path
    nodes: tuple[str, ...]
    groups: dict[str, ControlGroup] = field(default_factory=dict)
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *command: str, group: ControlGroup | None = None) -> None:
        ends = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        begin = group.start if group else _start
        self._started[name] = begin(*command, **ends)

    def start_node(self, node: str) -> None:
        self.start(node, "slurmd", "-D", "-N", node, group=self.groups.get(node))

    def kill_daemon(self, node: str) -> None:
        """`kill -9` of the slurmd alone: what runs on its node runs on."""
        self._started[node].kill()
        self._started[node].wait(SECONDS)

    def kill_node(self, node: str) -> None:
        """As when a machine loses its power: the slurmd, and all jobs that run on it."""
        self.groups[node].kill()
        self._started[node].wait(SECONDS)

    def state(self, node: str) -> str:
        """SLURM's word for it, such as `idle`, `mix`, `down`; a star behind it: the node does not answer."""
        return run("sinfo", "--noheader", "--format=%t", f"--nodes={node}", "--partition=main")

    def jobs(self) -> list[str]:
        return run("squeue", "--noheader", "--format=%i").split()

    def processes(self, node: str) -> list[psutil.Process]:
        """What runs there for a job: not the daemon and SLURM's own steps."""
        found = []
        for pid in self.groups[node].pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if "SLURM_PROCID" in process.environ() and not process.name().startswith(("slurmstepd", "srun")):
                    found.append(process)
        return found

    def release(self) -> None:
        """Let requeued jobs start at once: SLURM holds them back for two minutes."""
        for job in run("squeue", "--noheader", "--states=PENDING", "--format=%i").split():
            run("scontrol", "update", f"JobId={job}", "StartTime=now")

    def wait(self, condition: Callable[[], object], why: str = "SLURM did not come so far") -> None:
        until = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > until:
                logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))
                raise AssertionError(f"{why}:\n{logs}")
            time.sleep(0.1)

    def end(self) -> None:
        """All jobs, then all daemons."""
        if "slurmctld" in self._started:
            for words in (["--signal=KILL", "--full"], []):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    subprocess.run(["scancel", *words, "--user=root"], capture_output=True, timeout=SECONDS)
        for process in reversed(self._started.values()):
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait(10)
        for group in self.groups.values():
            group.close()


@contextlib.contextmanager
def running(nodes: int = 1, cores: float | None = None, cpus: int | None = None, gpus: int = 0) -> Iterator[Slurm]:
    """A SLURM of so many nodes, `node1`, `node2` …, with `SLURM_CONF` set. Ended, with all its jobs, at the end.

    `cores`: what each node may use, such as 0.5; None: no bound. `cpus`: as how many cores SLURM counts a node,
    whatever the host has; by default 8 for a single node, one for each of several. `gpus`: devices of each node, which
    SLURM gives to jobs as it does where there are any.
    """
    lacking = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    if lacking or os.geteuid():
        pytest.skip(f"needs root, slurm-wlm and munge ({', '.join(lacking)})")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    before = os.environ.get("SLURM_CONF")
    slurm = Slurm(folder, tuple(f"node{number}" for number in range(1, nodes + 1)))
    try:
        folder.chmod(0o755)
        _configure(slurm, cpus or (8 if nodes == 1 else 1), gpus)
        try:  # of a single node too, where it can be: no step of SLURM's outlives it then
            for node in slurm.nodes:
                slurm.groups[node] = ControlGroup(node, cores)
        except OSError as error:
            if nodes > 1 or cores is not None:
                pytest.skip(f"needs control groups: {error}")
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        munge = folder / "munge"
        places = [f"--{name}-file={munge}/{name}" for name in ("pid", "log", "seed")]
        slurm.start("munged", "setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--foreground",
                    "--force", f"--key-file={munge}/key", f"--socket={munge}/socket", *places)  # fmt: skip
        slurm.wait(lambda: (munge / "socket").exists())
        slurm.start("slurmctld", "slurmctld", "-D")
        for node in slurm.nodes:
            slurm.start_node(node)
        for node in slurm.nodes:
            slurm.wait(lambda node=node: slurm.state(node) in ("idle", "mix"))
        yield slurm
    finally:
        slurm.end()
        os.environ.pop("SLURM_CONF", None) if before is None else os.environ.update(SLURM_CONF=before)
        shutil.rmtree(folder, ignore_errors=True)


# As on a real node, where tidying up takes a while: a job is COMPLETING for longer than tests look away.
EPILOG = "#!/bin/sh\nsleep 0.4\n"


def _configure(slurm: Slurm, cpus: int, gpus: int) -> None:
    folder = slurm.folder
    for name in ("state", "munge", *(f"spool-{node}" for node in slurm.nodes)):
        (folder / name).mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o400)
    subprocess.run(["chown", "-R", "munge:munge", folder / "munge"], check=True)
    (folder / "munge").chmod(0o755)
    (folder / "epilog").write_text(EPILOG)
    (folder / "epilog").chmod(0o755)
    host = socket.gethostname().partition(".")[0]
    about = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory=4000 State=UNKNOWN"
    if gpus:
        about += f" Gres=gpu:{gpus}"
        devices = [folder / f"device{number}" for number in range(gpus)]
        for device in devices:
            os.mknod(device, 0o666 | stat.S_IFCHR, os.makedev(1, 3))  # /dev/null, by another name
        files = ",".join(map(str, devices))
        (folder / "gres.conf").write_text(f"Name=gpu File={files}\n")
    lines = [f"NodeName={node} Port={free_port()} {about}" for node in slurm.nodes]
    text = CONFIGURATION.format(
        host=host, folder=folder, controller=free_port(), lost=NODE_LOST_S, nodes="\n".join(lines)
    )
    (folder / "slurm.conf").write_text(text)


def _start(*command: str, **more: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, start_new_session=True, **more)  # type: ignore[call-overload, no-any-return]


def run(*command: str) -> str:
    """What a program of SLURM's prints."""
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout.strip()
