"""Processes as children of this one: each in a session of its own, with its own device, threads and log.

A Ctrl-C in the terminal does not reach them, since the supervisor decides; `kill -9` of the supervisor does, by the end
of their standard input.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence

import psutil
from pydantic import BaseModel

from gpuinfer.errors import WorkError
from gpuinfer.host import children, installation, machine
from gpuinfer.launchers import base
from gpuinfer.launchers.base import LaunchedProcess, Launcher, ProcessPlan

COMMAND = (sys.executable, "-m", "gpuinfer")
LEAVING = "--leave-with-parent"
LOOK_S = 0.02
OURS = "GPUINFER_"  # settings of the supervisor's, which has put what counts into files and flags
KEPT = ("GPUINFER_DISABLED_PLUGINS", installation.ONE_FILE_VARIABLE, installation.PLUGIN_FOLDER_VARIABLE)


class LocalLauncher(Launcher):
    """Processes on this machine, as children of the one that starts them."""

    name = "local"
    here = True

    def __init__(self, options: BaseModel | None = None, command: Sequence[str] = COMMAND) -> None:
        """`command` is what a plan's arguments follow: tests put their own there."""
        super().__init__(options)
        self.at_once = machine.cores()  # more would take as long, compile kernels in vain, and may take too long
        self._command = tuple(command)

    async def launch(self, plan: ProcessPlan) -> LocalProcess:
        environment = process_environment(children.with_our_path(), plan.threads)
        if plan.devices is not None:
            environment["CUDA_VISIBLE_DEVICES"] = plan.devices
        host = ("--host", self.bind) if plan.serves else ()
        return LocalProcess(plan, *start_logged(plan, (*self._command, *plan.arguments, *host), environment))


def start_logged(
    plan: ProcessPlan, command: Sequence[str], environment: Mapping[str, str]
) -> tuple[subprocess.Popen[bytes], int]:
    """The process, which writes into its plan's log, and where its words begin there. Raises `WorkError`."""
    try:
        log = os.open(plan.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        cure = "Mend that, and start anew."
        raise WorkError(f"{plan.name} cannot be started: its log {plan.log}: {error.strerror}. {cure}") from None
    try:
        begins = os.lseek(log, 0, os.SEEK_END)
        return start_process(command, log, environment), begins
    except OSError as error:
        raise WorkError(f"{plan.name} cannot be started: {error.strerror}. Look at {command[0]}.") from None
    finally:
        os.close(log)


def start_process(command: Sequence[str], log: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """gpuinfer in a session of its own. It leaves when its standard input ends, and with it this process."""
    words, ends = (*command, LEAVING), subprocess.PIPE
    return subprocess.Popen(words, env=environment, start_new_session=True, stdin=ends, stdout=log, stderr=log)


class LocalProcess(LaunchedProcess):
    """A process that is a child of this one."""

    def __init__(self, plan: ProcessPlan, process: subprocess.Popen[bytes], begins: int) -> None:
        super().__init__(plan, begins)
        self.pid, self._process = process.pid, process

    async def ready(self, within_s: float) -> tuple[str, int]:
        address = await base.wait_until_ready(self.plan.ready_file, within_s, lambda: self.alive, self.failure)
        return address.host, address.port

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def suspended(self) -> bool:
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.Error:  # gone
            return False

    @property
    def ending(self) -> str:
        code = self._process.poll()
        return "" if code is None else base.ending_of(code)

    async def terminate(self, within_s: float) -> None:
        if self.alive:
            self._process.terminate()
            await wait_until(lambda: not self.alive, within_s)
        await self.kill()

    async def kill(self) -> None:
        """Its whole session, even when it has ended itself: what it started may live on."""
        children.kill_group(self._process)
        await wait_until(lambda: not self.alive, children.REAPED_S)
        if self._process.stdin is not None:
            self._process.stdin.close()


def process_environment(inherited: Mapping[str, str], threads: int | None) -> dict[str, str]:
    """Of a process: what it inherits, with its share of the cores, and no settings but by its flags."""
    environment = {key: value for key, value in inherited.items() if key in KEPT or not key.startswith(OURS)}
    return environment if threads is None else {**dict.fromkeys(children.THREAD_COUNTS, str(threads)), **environment}


async def wait_until(done: Callable[[], bool], within_s: float) -> bool:
    """Whether it is so within that time."""
    end = time.monotonic() + within_s
    while not done():
        if time.monotonic() > end:
            return False
        await asyncio.sleep(LOOK_S)
    return True
