"""Fleets of stand-in replicas: what members in this process need, and whole fleets as programs of their own. Run as a
program, it is what `gpuinfer serve --replicas` does, without a model, and writes FOLDER/ready.json once it serves:

    python tests/fleet/fleet_programs.py FOLDER '{"replicas": 3, "standin": {"answer_s": 0.01}}'
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil

from gpuinfer.cli import serve_fleet
from gpuinfer.fleet.plan import FleetPlan, HealthChecks, Scaling
from gpuinfer.fleet.supervisor import Fleet
from gpuinfer.host import signals
from gpuinfer.host.files import write_whole
from gpuinfer.http.access import Access, Keys
from gpuinfer.http.client import HttpClient, HttpResponse
from gpuinfer.launchers.local import LocalLauncher
from gpuinfer.serving.telemetry.telemetry import open_telemetry

HERE = Path(__file__).parent
LIMIT_S = 60.0  # for anything to come about on a machine that has other things to do
START_S = 300.0  # real models compile kernels when they are first used
ADMIN_KEY = "an-admin-key-of-the-tests"
ADMIN = [("Authorization", f"Bearer {ADMIN_KEY}")]


def launcher() -> LocalLauncher:
    return LocalLauncher(command=(sys.executable, str(HERE / "standin_replica.py")))


def plan(replicas: int = 1, *, standin: dict[str, Any] | None = None, **more: Any) -> FleetPlan:
    return FleetPlan(setup=json.dumps(standin or {}).encode(), replicas=replicas, **more)


async def until(condition: Callable[[], Any], what: str, within_s: float = LIMIT_S) -> Any:
    """What the condition comes to, once it is something; it may be asynchronous."""
    end = time.monotonic() + within_s
    while True:
        found = condition()
        if isinstance(found, Awaitable):
            found = await found
        if found:
            return found
        assert time.monotonic() < end, f"{what} did not come about within {within_s:.0f} s"
        await asyncio.sleep(0.02)


class Program:
    """A running fleet."""

    def __init__(self, command: list[str], folder: Path) -> None:
        path = os.pathsep.join([str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")}
        given = {**inherited, "PYTHONPATH": path, "COLUMNS": "200"}
        with (folder / "log").open("wb") as log:
            ends = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(command, cwd=folder, env=given, **ends)
        self.folder, self.url, self.told = folder, "", {}
        self.client: HttpClient | None = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[Program]:
        """Once it is ready, with a client of the present event loop."""
        file = self.folder / "ready.json"
        await until(lambda: file.exists() or self.process.poll() is not None, "the fleet's start", START_S)
        assert file.exists(), self.log
        self.told = json.loads(file.read_text())
        self.url = f"http://{self.told['host']}:{self.told['port']}"
        self.client = HttpClient(self.url, connections=64, timeout_s=LIMIT_S)
        try:
            yield self
        finally:
            await self.client.close()

    async def ask(self, method: str, path: str, body: Any = None, headers: Any = ()) -> HttpResponse:
        assert self.client is not None
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return await self.client.request(method, path, data, headers)

    async def json(self, path: str, headers: Any = ()) -> Any:
        return json.loads((await self.ask("GET", path, None, headers)).body)

    async def workers(self) -> list[dict[str, Any]]:
        return (await self.json("/workers", ADMIN))["workers"]

    async def whole(self, replicas: int) -> list[dict[str, Any]] | None:
        workers = await self.workers()
        return workers if len(workers) == replicas and all(one["healthy"] for one in workers) else None

    def family(self) -> list[psutil.Process]:
        """The supervisor's children and theirs: replicas and router processes."""
        found = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in found if not words_of(one, "resource_tracker")]  # Python's own helper leaves by itself

    def end(self) -> None:
        """At once, with all that it has started."""
        family = self.family() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait(LIMIT_S)
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()
        if folder := self.told.get("folder"):
            shutil.rmtree(folder, ignore_errors=True)

    async def ended(self) -> int:
        await until(lambda: self.process.poll() is not None, "the fleet's end")
        return int(self.process.returncode)


def words_of(process: psutil.Process, word: str) -> bool:
    """Whether a word is on a process's command line."""
    with contextlib.suppress(psutil.Error):
        return word in " ".join(process.cmdline())
    return False


def standin(folder: Path, **given: Any) -> list[str]:
    """The command of a fleet of stand-ins; `given`: those of a plan."""
    return [sys.executable, __file__, str(folder), json.dumps(given)]


@contextlib.asynccontextmanager
async def fleet(folder: Path, *, ready: bool = True, command: Any = None, **given: Any) -> AsyncIterator[Program]:
    program = Program(command or standin(folder, **given), folder)
    try:
        if ready:
            async with program.asking():
                yield program
        else:
            yield program
    finally:
        program.end()


async def all_gone(processes: list[psutil.Process]) -> None:
    """Wait until none of them runs."""

    def runs(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    await until(lambda: not any(map(runs, processes)), "the end of all of a fleet's processes")


def main(folder: Path, given: dict[str, Any]) -> int:
    if scaling := given.pop("scaling", None):
        given["scaling"] = Scaling(**scaling)
    if health := given.pop("health", None):
        given["health"] = HealthChecks(**health)
    made = plan(access=Access(admin=Keys([ADMIN_KEY])), **given)

    def say(fleet: Fleet) -> None:
        told = {"host": made.host, "port": fleet.port, "pid": os.getpid(), "folder": fleet.logs}
        write_whole(folder / "ready.json", json.dumps(told).encode())

    signals.own()
    return serve_fleet.run(made, launcher(), say, lambda news: print(news, flush=True), open_telemetry(None, {}))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
