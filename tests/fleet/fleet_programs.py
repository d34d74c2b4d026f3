"""Fleets as programs of their own, asked over real sockets."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import standins
from standin_fleet import ADMIN_KEY

from gpuinfer.http.client import HttpClient, HttpResponse

HERE = Path(__file__).parent
START_S = 300.0  # real models compile kernels when they are first used
ADMIN = [("Authorization", f"Bearer {ADMIN_KEY}")]


class Program:
    """A running fleet."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.process, self.folder = process, folder
        self.url, self.told = "", {}
        self.client: HttpClient | None = None

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    async def wait_until_ready(self) -> None:
        file = self.folder / "ready.json"
        up = lambda: file.exists() or self.process.poll() is not None  # noqa: E731
        await standins.until(up, "the fleet's start", START_S)
        assert file.exists(), self.log
        self.told = json.loads(file.read_text())
        self.url = f"http://{self.told['host']}:{self.told['port']}"

    @contextlib.asynccontextmanager
    async def asking(self) -> AsyncIterator[Program]:
        """With a client of the present event loop."""
        await self.wait_until_ready()
        self.client = HttpClient(self.url, connections=64, timeout_s=standins.LIMIT_S)
        try:
            yield self
        finally:
            await self.client.close()

    async def ask(self, method: str, path: str, body: Any = None, headers: Any = ()) -> HttpResponse:
        assert self.client is not None
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        return await self.client.request(method, path, data, headers)

    async def json(self, method: str, path: str, body: Any = None, headers: Any = ADMIN) -> Any:
        return json.loads((await self.ask(method, path, body, headers)).body)

    async def workers(self) -> list[dict[str, Any]]:
        return (await self.json("GET", "/workers"))["workers"]

    async def whole(self, replicas: int) -> list[dict[str, Any]] | None:
        workers = await self.workers()
        return workers if len(workers) == replicas and all(one["healthy"] for one in workers) else None

    def family(self) -> list[psutil.Process]:
        """The supervisor's children and theirs: replicas and router processes."""
        return [one for one in psutil.Process(self.process.pid).children(recursive=True) if not _tracker(one)]

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """At once, with all that it has started."""
        family = self.family() if self.process.poll() is None else []
        self.process.kill()
        self.process.wait(standins.LIMIT_S)
        for one in family:
            with contextlib.suppress(psutil.Error):
                one.kill()
        if folder := self.told.get("folder"):
            shutil.rmtree(folder, ignore_errors=True)

    async def ended(self) -> int:
        await standins.until(lambda: self.process.poll() is not None, "the fleet's end")
        return int(self.process.returncode)


def _tracker(process: psutil.Process) -> bool:
    """Python's own helper, which leaves by itself."""
    with contextlib.suppress(psutil.Error):
        return "resource_tracker" in " ".join(process.cmdline())
    return False


@contextlib.asynccontextmanager
async def fleet(folder: Path, *, ready: bool = True, **given: Any) -> AsyncIterator[Program]:
    """`given`: as `standin_fleet` takes it."""
    async with running(standin(folder, **given), folder, ready=ready) as program:
        yield program


def standin(folder: Path, **given: Any) -> list[str]:
    """The command of a fleet of stand-ins."""
    return [sys.executable, str(HERE / "standin_fleet.py"), str(folder), json.dumps(given)]


@contextlib.asynccontextmanager
async def running(command: list[str], folder: Path, *, ready: bool = True) -> AsyncIterator[Program]:
    process = started(command, folder)
    program = Program(process, folder)
    try:
        if ready:
            async with program.asking():
                yield program
        else:
            yield program
    finally:
        program.end()


def started(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=folder, env=_environment()
        )


def _environment() -> dict[str, str]:
    path = os.pathsep.join([str(HERE), str(HERE.parent.parent), os.environ.get("PYTHONPATH", "")])
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GPUINFER_")}
    return {**inherited, "PYTHONPATH": path, "COLUMNS": "200"}


async def all_gone(processes: list[psutil.Process]) -> None:
    """Wait until none of them runs."""
    await standins.until(lambda: not any(_runs(one) for one in processes), "the end of all of a fleet's processes")


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def at_work(pid: int) -> bool:
    """Whether it is there, and not suspended."""
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def kill(pid: int, number: int) -> bool:
    """Whether there was such a process."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return False
    return True
