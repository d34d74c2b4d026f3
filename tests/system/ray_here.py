"""A Ray of several nodes on this host, for tests and benchmarks: a head and raylets with ports and folders of its own,
each in a control group, by which it can be held to a share of the cores and lost with all that runs there.

Needs Ray, root, and control groups that can be written.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from ports import free_port
from system.control_group import ControlGroup

SECONDS = 120
STARTS = 3
STORE = 80 << 20  # bytes of each node's object store
SETTINGS = {
    "RAY_AUTH_MODE": "disabled",  # else with a token in the home folder of who runs this, if one lies there
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "1",  # else no node joins one at loopback
    "RAY_worker_niceness": "0",  # else any other program of this host slows the nodes down
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_num_prestart_python_workers": "0",
    "RAY_enable_worker_prestart": "0",
}


@dataclass
class RayCluster:
    """A Ray that is up. `address` is what `-L address=` takes; the first of `nodes` is the head, which has no cores
    for actors, so that those run on the others alone.
    """

    folder: Path
    port: int
    cores: float | None
    cpus: int
    autoscaled: int = 0  # machines that Ray's autoscaler may add; they belong to the head's control group
    groups: dict[str, ControlGroup] = field(default_factory=dict)
    _started: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_nodes(self, *names: str) -> None:
        """More nodes, also such as were lost. One that a busy host does not start in time is started again."""
        for name in names:
            if not any(self._joins(name) for _ in range(STARTS)):
                raise AssertionError(f"{name} did not join: {(self.folder / f'{name}.log').read_text()[-4000:]}")

    def _joins(self, name: str) -> bool:
        before = self._joined(name)
        self._start(name)
        self.wait(lambda: self._joined(name) > before or self._started[name].poll() is not None)
        if self._joined(name) == before:
            self.groups[name].kill()
            return False
        return True

    def _start(self, name: str) -> None:
        head = name == "head"
        where = ["--head", f"--port={self.port}", "--include-dashboard=false", f"--temp-dir={self.folder}"]
        where += [f"--ray-client-server-port={free_port()}"]
        ports = [f"--dashboard-agent-listen-port={free_port()}", "--min-worker-port=0", "--max-worker-port=0"]
        words = ["start", "--block", "--disable-usage-stats", "--node-ip-address=127.0.0.1", *ports]
        words += [f"--object-store-memory={STORE}", f"--num-cpus={0 if head else self.cpus}", "--num-gpus=0"]
        words += where if head else [f"--address={self.address}"]
        settings = {**os.environ, **SETTINGS}
        if head and self.autoscaled:
            words += [f"--autoscaling-config={self._autoscaling()}"]
            settings |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
        if name not in self.groups:
            self.groups[name] = ControlGroup(f"ray-{name}", None if head else self.cores)
        with (self.folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, "-c", "from ray.scripts.scripts import main; main()", *words]
            self._started[name] = self.groups[name].start(
                *command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=settings
            )

    def _autoscaling(self) -> Path:
        """The settings of an autoscaler whose machines are raylets of this host (Ray's own provider for tests)."""
        from ray._private.services import get_node_ip_address

        machine = {"resources": {"CPU": self.cpus, "object_store_memory": STORE}, "max_workers": self.autoscaled}
        nothing: dict[str, object] = {"resources": {"CPU": 0}, "max_workers": 0}
        kinds = {name: {"node_config": {}, **kind} for name, kind in (("head", nothing), ("machine", machine))}
        provider: dict[str, object] = {"type": "fake_multinode", "launch_multiple": True}
        provider["gcs_address"] = f"{get_node_ip_address()}:{self.port}"
        lists = [f"{which}_commands" for which in ("initialization", "setup", "head_setup", "worker_setup")]
        lists += ["head_start_ray_commands", "worker_start_ray_commands", "cluster_synced_files"]
        config = {"cluster_name": "tests", "max_workers": self.autoscaled, "upscaling_speed": 1.0}
        config |= {"idle_timeout_minutes": 5, "file_mounts_sync_continuously": False, "head_node_type": "head"}
        config |= {"provider": provider, "auth": {}, "file_mounts": {}, "available_node_types": kinds}
        (file := self.folder / "autoscaling.json").write_text(json.dumps({**config, **{name: [] for name in lists}}))
        return file

    def kill_raylet(self, name: str) -> None:
        """`kill -9` of the raylet alone: Ray's own processes on its node end when they notice it."""
        for pid in self.groups[name].pids():
            with contextlib.suppress(psutil.Error):
                if psutil.Process(pid).name() == "raylet":
                    psutil.Process(pid).kill()

    def kill_node(self, name: str) -> None:
        """As when a machine loses its power."""
        self.groups[name].kill()
        self._started[name].wait(SECONDS)

    def processes(self, name: str, word: str = "gpuinfer") -> list[psutil.Process]:
        """What runs there and has this word in its command line."""
        found = []
        for pid in self.groups[name].pids():
            with contextlib.suppress(psutil.Error):
                process = psutil.Process(pid)
                if any(word in part for part in process.cmdline()) and "ray" not in process.name():
                    found.append(process)
        return found

    def wait(self, condition: Callable[[], object], why: str = "Ray did not come so far") -> None:
        until = time.monotonic() + SECONDS
        while not condition():
            if time.monotonic() > until:
                logs = "\n".join(f"{log.name}: {log.read_text()[-2000:]}" for log in self.folder.glob("*.log"))
                raise AssertionError(f"{why}:\n{logs}")
            time.sleep(0.1)

    def _joined(self, name: str) -> int:
        """How often a node of this name has joined."""
        log = self.folder / f"{name}.log"
        return log.read_text().count("Ray runtime started") if log.exists() else 0

    def end(self) -> None:
        for group in self.groups.values():
            group.close()
        for process in self._started.values():
            process.wait(SECONDS)


@contextlib.contextmanager
def running(nodes: int = 3, cores: float | None = None, cpus: int = 1, autoscaled: int = 0) -> Iterator[RayCluster]:
    """A Ray of a head and so many nodes, `node1`, `node2` …, each with `cpus` as Ray counts them, and `autoscaled`
    more that come when they are wanted. Ended at the end.
    """
    if find_spec("ray") is None:
        pytest.skip("needs Ray")
    folder, before = Path(tempfile.mkdtemp(prefix="ray-")), os.environ.get("RAY_AUTH_MODE")
    cluster = RayCluster(folder, free_port(), cores, cpus, autoscaled)
    try:
        try:
            cluster.groups["head"] = ControlGroup("ray-head")
        except OSError as error:
            pytest.skip(f"needs control groups: {error}")
        os.environ["RAY_AUTH_MODE"] = SETTINGS["RAY_AUTH_MODE"]
        cluster.start_nodes("head")
        cluster.start_nodes(*(f"node{number}" for number in range(1, nodes + 1)))
        yield cluster
    finally:
        cluster.end()
        os.environ.pop("RAY_AUTH_MODE", None) if before is None else os.environ.update(RAY_AUTH_MODE=before)
        shutil.rmtree(folder, ignore_errors=True)
