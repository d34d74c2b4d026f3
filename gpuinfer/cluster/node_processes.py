"""The processes of nodes: started through a launcher, watched, ended, and started again when they die."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.fleet.folder import PrivateFolder
from gpuinfer.fleet.plan import gpus_here
from gpuinfer.host import error_text, machine
from gpuinfer.http.access import read_keys
from gpuinfer.launchers.base import LaunchedProcess, Launcher, ProcessPlan

ATTEMPTS = 4  # starts of a node that has done nothing in between
LOOK_S = 0.5  # between two polls of a process
PAUSE_S = 2.0  # before a process is started again, and so much longer each time
LEAVE_S = 10.0  # for a process to end, once it was signalled

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class NodesPlan:
    """How many nodes there are to be, and where. `address`: HOST[:PORT] by which they reach the coordinator."""

    launcher: Launcher
    nodes: int
    least: int = 1
    deadline_s: float | None = None
    address: str | None = None
    quiet: bool = False
    verbose: int = 0
    devices: Sequence[str] = ("auto",)  # of each node's `Setup`


class NodeProcesses:
    """One process for each number from 0, until `close`; none where others start them (`Launcher.starts`). `failed` is
    called with what to say once none can be had.
    """

    def __init__(self, plan: NodesPlan, failed: Callable[[Exception], None]) -> None:
        self._plan, self._failed = plan, failed
        self._folder: PrivateFolder | None = None
        file = plan.launcher.key_file
        self.key = secrets.token_urlsafe(32) if file is None else read_keys(file)[0]
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: dict[int, LaunchedProcess] = {}
        self._worked: set[int] = set()  # those that have done something since they were started
        self._lost: set[int] = set()  # those that are to be ended and started again
        self._refused: dict[int, UsageError] = {}  # by the coordinator, or by what it is to do
        self._abandoned: dict[int, Exception] = {}
        self._closing = False

    def open(self) -> Path:
        """Make the folder with the key, which nodes have to show. Returns the key's file. Raises `UsageError`."""
        shared = self._plan.launcher.shared
        try:
            if shared is not None:
                shared.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder = PrivateFolder(shared or tempfile.gettempdir())
        except OSError as error:
            raise UsageError(f"{error.filename} cannot be written: {error.strerror}. Free some space there.") from None
        file = self._plan.launcher.key_file
        self._key_file = file or self._folder.write("cluster.key", f"{self.key}\n".encode())
        return self._key_file

    def start(self, address: str) -> None:
        """Start all of them, as many at a time as the launcher takes, or say how others start one."""
        if not self._plan.launcher.starts:
            if not self._plan.quiet:
                log.warning("start each node with: gpuinfer node %s --key-file %s", address, self._key_file)
            return
        turns = asyncio.Semaphore(self._plan.launcher.at_once)
        self._tasks = [asyncio.create_task(self._hold(index, address, turns)) for index in range(self._plan.nodes)]

    def worked(self, index: int | None) -> None:
        """This one has done something: a start that fails is its first again."""
        if index is not None:
            self._worked.add(index)

    def lost(self, index: int | None) -> None:
        """The coordinator has removed the node that runs there."""
        if index is not None:
            self._lost.add(index)

    def refused(self, index: int | None, why: UsageError) -> None:
        """This one cannot take part, and would not be able to if it was started again."""
        if index is not None:
            self._refused[index] = why

    def end(self) -> None:
        """None that ends from now on is started again: the run is over, or is to stop."""
        self._closing = True

    def alive(self) -> int:
        """How many run, or may come up yet."""
        if not self._plan.launcher.starts:
            return self._plan.nodes
        return len(self._tasks) - len(self._abandoned)

    @property
    def first_failure(self) -> Exception | None:
        """Of those that were abandoned."""
        return self._abandoned[min(self._abandoned)] if self._abandoned else None

    async def _hold(self, index: int, address: str, turns: asyncio.Semaphore) -> None:
        """One node, started again as long as that may help."""
        attempt = failures = 0
        while True:
            self._worked.discard(index)
            self._lost.discard(index)
            try:
                async with turns:
                    process = await self._plan.launcher.launch(self._process_plan(index, attempt, address))
                self._processes[index] = process
                while process.alive and index not in self._lost:  # noqa: ASYNC110 (launchers have no event for it)
                    await asyncio.sleep(LOOK_S)
                why: Exception = process.failure("ended" if not process.alive else "gave no sign of life")
                await process.kill()
                why = self._refused.get(index, why)
            except (WorkError, UsageError) as error:
                why = error
            except Exception as error:  # noqa: BLE001  (a launcher's own, which may be a plugin: it must not be lost)
                said = error_text.full_message(error)
                why = WorkError(f"node {index}: --launcher {self._plan.launcher.name} failed: {said}. Mend it.")
            failures = 1 if index in self._worked else failures + 1
            attempt += 1
            if self._closing:
                return
            if failures >= ATTEMPTS or isinstance(why, UsageError):
                self._give_up(index, why)
                return
            log.warning("node %d is started again: %s", index, why)
            await asyncio.sleep(PAUSE_S * failures)

    def _give_up(self, index: int, why: Exception) -> None:
        self._abandoned[index] = why
        if len(self._abandoned) == len(self._tasks):
            self._failed(self.first_failure or why)
        else:
            log.warning("node %d is given up, and the others go on: %s", index, why)

    def _process_plan(self, index: int, attempt: int, address: str) -> ProcessPlan:
        folder, plan = self._folder, self._plan
        if folder is None:
            raise UsageError("the nodes' folder is not open. Call open() first.")
        words = ["node", address, "--key-file", str(self._key_file), "--index", str(index), "--attempt", str(attempt)]
        words += ["-v"] * plan.verbose
        threads, devices = None, None
        if plan.launcher.here:
            cores = sorted(os.sched_getaffinity(0))
            own = cores[index % len(cores) :: plan.nodes] or [cores[index % len(cores)]]
            words += ["--cpus", ",".join(map(str, own))]
            threads = len(own)
            if machine.wants_cuda(plan.devices) and (gpus := gpus_here()):
                devices = ",".join(gpus[index % len(gpus) :: plan.nodes])
        return ProcessPlan(
            name=f"node-{index}",
            index=index,
            folder=folder.path,
            files=(self._key_file,),
            devices=devices,
            threads=threads,
            arguments=tuple(words),
            attempt=attempt,
            serves=False,
            dials=address,
        )

    async def close(self, at_once: bool = False) -> None:
        """End all of them: they have some seconds to end by themselves, unless `at_once`."""
        self._closing = True
        until = time.monotonic() + (0.0 if at_once else LEAVE_S)
        while any(map(_may_leave, self._processes.values())) and time.monotonic() < until:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_S / 10)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=LEAVE_S)
        within_s = LEAVE_S / 5 if at_once else LEAVE_S
        ending = [one.terminate(within_s) if _may_leave(one) else one.kill() for one in self._processes.values()]
        await asyncio.gather(*ending, return_exceptions=True)
        await self._plan.launcher.close()
        if self._folder is not None:
            self._folder.remove(keep_logs=bool(self._abandoned))


def _may_leave(process: LaunchedProcess) -> bool:
    """Whether it may end by itself: one that is suspended does not."""
    return process.alive and not process.suspended
