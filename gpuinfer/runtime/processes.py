"""A workload's worker processes: started, heard, and ended, whatever happens to either side.

The arguments of a start are pickled by `multiprocessing` on their way from parent to child; every message after that
is msgpack.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import math
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from gpuinfer.api import Connector, Roofline, Setup, Strategy
from gpuinfer.errors import GpuinferError, WorkerDied
from gpuinfer.host import children
from gpuinfer.runtime.line import LineClosed, WorkerLine, as_error, cannot_start, obituary
from gpuinfer.runtime.pulse import LATE_LOOKS, LOOK_S, Pulse
from gpuinfer.stats import Snapshot, since

log = logging.getLogger(__name__)

GRACE_S = 10.0  # for workers to end by themselves when their line closes, before they are killed
BURIAL_S = 5.0  # for the system to take a killed process away
POLL_S = 0.005


INSIDE = "gpuinfer.runtime.worker"  # what a child runs, loaded there alone: it needs a session, which needs this file


@dataclass(frozen=True)
class Job:
    """All that one worker process is told at its start."""

    index: int
    target: str  # module:function
    arguments: Mapping[str, Any]
    connector: Connector
    strategy: type[Strategy]
    setup: Setup
    options: Mapping[str, Any]  # the strategy's
    roofline: Roofline | None


def _enter(line: socket.socket, pulse: Connection, job: Job) -> None:
    importlib.import_module(INSIDE).main(line, pulse, job)


class Workers:
    """The workload's side of its worker processes (`api.Workers`), as an asynchronous context.

    `prepare` says on entering what each of them is to do.
    """

    def __init__(self, prepare: Callable[[], Awaitable[Sequence[Job]]]) -> None:
        self.snapshots: dict[int, Snapshot] = {}  # the latest of each worker, kept when it has ended
        self._prepare = prepare
        self._jobs: Sequence[Job] = ()
        self._processes: list[BaseProcess] = []
        self._lines: list[WorkerLine] = []
        self._pulses: list[Pulse] = []
        self._watch: asyncio.Task[None] | None = None
        self._listeners: list[asyncio.Task[None]] = []
        self._inbox: asyncio.Queue[tuple[int, Mapping[str, Any] | GpuinferError | None]] = asyncio.Queue()
        self._ended: dict[int, GpuinferError | None] = {}  # worker → why, if it said so
        self._marks = 0
        self._stopped = False

    async def __aenter__(self) -> Workers:
        self._jobs = await self._prepare()
        atexit.register(self._kill)  # runs before multiprocessing waits for its children without end
        try:
            with children.threads_each(len(self._jobs)):
                for job in self._jobs:
                    await self._start(job)
            self._watch = asyncio.create_task(self._watch_over())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self, job: Job) -> None:
        ours, theirs = socket.socketpair()
        pulse = Pulse()
        try:
            process = children.spawn(_enter, theirs, pulse.theirs, job, name=f"gpuinfer worker {job.index}")
        except Exception as error:
            ours.close()
            pulse.close()
            raise cannot_start(error) from error
        finally:
            theirs.close()
            pulse.theirs.close()
        self._processes.append(process)
        self._pulses.append(pulse)
        self._lines.append(await WorkerLine.open(ours))
        self._listeners.append(asyncio.create_task(self._listen(job.index, self._lines[-1])))
        if self._stopped:
            await self._lines[-1].send({"stop": True})

    async def _listen(self, worker: int, line: WorkerLine) -> None:
        error: GpuinferError | None = None
        try:
            error = await self._hear(worker, line)
        except LineClosed:
            if await self._exitcode(worker) != -signal.SIGKILL:  # being killed is for the workload to judge
                error = WorkerDied(await self._obituary(worker))
        finally:
            self._ended[worker] = error
            self._inbox.put_nowait((worker, error))
            line.close()

    async def _watch_over(self) -> None:
        """Kill the workers that are stuck: what follows is the same as when someone else kills them."""
        while True:
            await asyncio.sleep(LOOK_S)
            for worker, process in enumerate(self._processes):
                if worker not in self._ended and self._pulses[worker].is_stuck(process.pid or 0):
                    log.warning(
                        "worker %d has given no sign of life for %g s and is killed", worker, LATE_LOOKS * LOOK_S
                    )
                    await self._put_down(worker)

    async def _put_down(self, worker: int) -> None:
        self._processes[worker].kill()
        await _until_gone([self._processes[worker]], BURIAL_S)
        if self._processes[worker].is_alive():  # not even that ends it, and its line would never close
            self._lines[worker].close()

    async def _hear(self, worker: int, line: WorkerLine) -> GpuinferError | None:
        """Take in what a worker sends until it says that it ends. Raises `LineClosed` when it never does."""
        while True:
            frame = await line.receive()
            if "message" in frame:
                self._inbox.put_nowait((worker, frame["message"]))
            elif "snapshot" in frame:
                told = Snapshot.from_wire(frame["snapshot"])
                self.snapshots[worker] = told if frame["marks"] == self._marks else since(told, told)
            elif "error" in frame:
                return as_error(worker, frame["error"])
            elif "end" in frame:
                return None

    async def send(self, worker: int, message: Mapping[str, Any]) -> None:
        """Raises `WorkerDied` when that process is gone, or the error that it ended with."""
        try:
            if worker in self._ended:
                raise LineClosed
            await self._lines[worker].send({"message": message})
        except LineClosed:
            raise self._ended.get(worker) or WorkerDied(await self._obituary(worker)) from None

    async def __aiter__(self) -> AsyncIterator[tuple[int, Mapping[str, Any] | None]]:
        """Each message with its sender's number; None once when that process has ended. Ends when all have.

        Raises the error that a worker ended with: the same type when it is one of ours, else `WorkerDied`. One that was
        killed from outside (SIGKILL, the out-of-memory killer) gives None: whether its work can go on without it is for
        the workload to say.
        """
        open_lines = len(self._jobs)
        while open_lines:
            worker, message = await self._inbox.get()
            if isinstance(message, GpuinferError):
                raise message
            yield worker, message
            open_lines -= message is None

    async def stop(self) -> None:
        """Set `stopping` in every worker, in those too that are yet to start."""
        self._stopped = True
        await self._broadcast({"stop": True})

    def hurry(self) -> None:
        """Nobody waits for their end any more."""
        self._kill()

    async def mark(self) -> None:
        """Let every worker's counters begin anew; what it counted until now is forgotten."""
        self._marks += 1
        self.snapshots = {worker: since(told, told) for worker, told in self.snapshots.items()}
        await self._broadcast({"mark": True})

    async def _broadcast(self, frame: Mapping[str, Any]) -> None:
        for line in self._lines:
            with contextlib.suppress(LineClosed):
                await line.send(frame)

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
        try:
            for line in self._lines:
                line.finish()
            await _until_gone(self._processes, GRACE_S)
        finally:
            self._kill()
            await _until_gone(self._processes, BURIAL_S)
            await self._cleanup()

    async def _cleanup(self) -> None:
        """Hear the last words of the dead, and let go of all that belonged to them."""
        if self._listeners:
            _, stuck = await asyncio.wait(self._listeners, timeout=1.0)
            for listener in stuck:
                listener.cancel()
        for pulse in self._pulses:
            pulse.close()
        for process in self._processes:
            with contextlib.suppress(ValueError):  # not even SIGKILL has ended it
                process.close()
        atexit.unregister(self._kill)

    def _kill(self) -> None:
        for process in self._processes:
            with contextlib.suppress(ValueError):  # it was closed, since it had ended
                process.kill()

    async def _obituary(self, worker: int) -> str:
        return obituary(worker, await self._exitcode(worker))

    async def _exitcode(self, worker: int) -> int | None:
        """The exit code of a process whose line has closed; None when it does not end even so."""
        await _until_gone([self._processes[worker]], BURIAL_S)
        return self._processes[worker].exitcode


async def _until_gone(processes: Sequence[BaseProcess], seconds: float) -> None:
    for _ in range(math.ceil(seconds / POLL_S)):
        if not any(process.is_alive() for process in processes):
            return
        await asyncio.sleep(POLL_S)
