"""A SLURM of one node, for tests: configuration, keys, sockets and ports of its own, so that it meets no other one.

Needs root and the Debian packages slurm-wlm and munge.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ports import free_port

SECONDS = 60

CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={daemon}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
KillWait=3
MinJobAge=60
Epilog={folder}/epilog
NodeName={host} NodeAddr=127.0.0.1 CPUs={cores} RealMemory=1000 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES OverSubscribe=FORCE:4 MaxTime=INFINITE State=UP
PartitionName=closed Nodes=ALL MaxTime=INFINITE State=DOWN
"""


@contextlib.contextmanager
def running() -> Iterator[Path]:
    """The folder of a SLURM that is up, with `SLURM_CONF` set. Ended, with all its jobs, at the end."""
    lacking = [name for name in ("slurmctld", "slurmd", "munged", "sbatch") if shutil.which(name) is None]
    if lacking or os.geteuid():
        pytest.skip(f"needs root, slurm-wlm and munge ({', '.join(lacking)})")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    before = os.environ.get("SLURM_CONF")
    started: list[subprocess.Popen[bytes]] = []
    try:
        folder.chmod(0o755)
        _configure(folder)
        os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        munge = folder / "munge"
        places = [f"--{name}-file={munge}/{name}" for name in ("pid", "log", "seed")]
        _start(started, "setpriv", "--reuid=munge", "--regid=munge", "--clear-groups", "munged", "--foreground",
               "--force", f"--key-file={munge}/key", f"--socket={munge}/socket", *places)  # fmt: skip
        _until(lambda: (munge / "socket").exists(), folder)
        _start(started, "slurmctld", "-D")
        _start(started, "slurmd", "-D")
        _until(lambda: _said("sinfo", "--noheader", "--format=%t", "--partition=main") in ("idle", "mix"), folder)
        yield folder
    finally:
        if len(started) > 1:
            subprocess.run(["scancel", "--signal=KILL", "--full", "--user=root"], capture_output=True, timeout=SECONDS)
            subprocess.run(["scancel", "--user=root"], capture_output=True, timeout=SECONDS)
        for process in reversed(started):
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
            process.kill()
            process.wait(10)
        os.environ.pop("SLURM_CONF") if before is None else os.environ.update(SLURM_CONF=before)
        shutil.rmtree(folder, ignore_errors=True)


# As on a real node, where tidying up takes a while: a job is COMPLETING for longer than tests look away.
EPILOG = "#!/bin/sh\nsleep 0.4\n"


def _configure(folder: Path) -> None:
    for name in ("state", "spool", "munge"):
        (folder / name).mkdir()
    (folder / "munge" / "key").write_bytes(os.urandom(1024))
    (folder / "munge" / "key").chmod(0o400)
    subprocess.run(["chown", "-R", "munge:munge", folder / "munge"], check=True)
    (folder / "munge").chmod(0o755)
    (folder / "epilog").write_text(EPILOG)
    (folder / "epilog").chmod(0o755)
    ports = {"controller": free_port(), "daemon": free_port()}
    host = socket.gethostname().partition(".")[0]
    text = CONFIGURATION.format(host=host, folder=folder, cores=os.cpu_count(), **ports)
    (folder / "slurm.conf").write_text(text)


def _start(started: list[subprocess.Popen[bytes]], *command: str) -> None:
    silent = subprocess.DEVNULL
    started.append(subprocess.Popen(command, stdin=silent, stdout=silent, stderr=silent, start_new_session=True))


def _said(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS).stdout.strip()


def _until(condition, folder: Path) -> None:
    until = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > until:
            logs = "\n".join(log.read_text()[-2000:] for log in folder.glob("*.log"))
            raise AssertionError(f"SLURM did not come up:\n{logs}")
        time.sleep(0.1)
