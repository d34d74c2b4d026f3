"""A workload's worker processes: started, heard, and ended, whatever happens to either side.

The arguments of a start are pickled by `multiprocessing` on their way from parent to child; every message after that
is msgpack.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import math
import multiprocessing
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

from gpuinfer import errors, machine
from gpuinfer.api import Connector, Roofline, Setup, Strategy
from gpuinfer.errors import GpuinferError, UsageError, WorkerDied
from gpuinfer.runtime.line import Line, LineClosed
from gpuinfer.stats import Snapshot, since

GRACE_S = 10.0  # for workers to end by themselves when their line closes, before they are killed
BURIAL_S = 5.0  # for the system to take a killed process away
POLL_S = 0.005
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


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


def _enter(line: socket.socket, job: Job) -> None:
    from gpuinfer.runtime.worker import (
        main,
    )  # imported by the child alone: it needs the session, which needs this module

    main(line, job)


class Workers:
    """The workload's side of its worker processes (`api.Workers`), as an asynchronous context."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self.snapshots: dict[int, Snapshot] = {}  # the latest of each worker, kept when it has ended
        self._jobs = jobs
        self._processes: list[BaseProcess] = []
        self._lines: list[Line] = []
        self._listeners: list[asyncio.Task[None]] = []
        self._inbox: asyncio.Queue[tuple[int, Mapping[str, Any] | GpuinferError | None]] = asyncio.Queue()
        self._ended: dict[int, GpuinferError | None] = {}  # worker → why, if it said so
        self._marks = 0
        self._stopped = False

    async def __aenter__(self) -> Workers:
        atexit.register(self._kill)  # runs before multiprocessing waits for its children without end
        try:
            resource_tracker.ensure_running()  # here, since its start would unblock the signals that `_deaf` blocks
            with _threads_each(len(self._jobs)):
                for job in self._jobs:
                    await self._start(job)
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self, job: Job) -> None:
        ours, theirs = socket.socketpair()
        process = multiprocessing.get_context("spawn").Process(
            target=_enter, args=(theirs, job), name=f"gpuinfer worker {job.index}"
        )
        try:
            with _deaf():
                process.start()
        except Exception as error:
            ours.close()
            raise _cannot_start(error) from error
        finally:
            theirs.close()
        self._processes.append(process)
        self._lines.append(await Line.open(ours))
        self._listeners.append(asyncio.create_task(self._listen(job.index, self._lines[-1])))
        if self._stopped:
            await self._lines[-1].send({"stop": True})

    async def _listen(self, worker: int, line: Line) -> None:
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

    async def _hear(self, worker: int, line: Line) -> GpuinferError | None:
        """Take in what a worker sends until it says that it ends. Raises `LineClosed` when it never does."""
        while True:
            frame = await line.receive()
            if "message" in frame:
                self._inbox.put_nowait((worker, frame["message"]))
            elif "snapshot" in frame:
                told = Snapshot.from_wire(frame["snapshot"])
                self.snapshots[worker] = told if frame["marks"] == self._marks else since(told, told)
            elif "error" in frame:
                return _as_error(worker, frame["error"])
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
        try:
            for line in self._lines:
                line.finish()
            await _until_gone(self._processes, GRACE_S)
        finally:
            self._kill()
            await _until_gone(self._processes, BURIAL_S)
            await self._bury()

    async def _bury(self) -> None:
        """Hear the last words of the dead, and let go of all that belonged to them."""
        if self._listeners:
            _, deaf = await asyncio.wait(self._listeners, timeout=1.0)
            for listener in deaf:
                listener.cancel()
        for process in self._processes:
            with contextlib.suppress(ValueError):  # not even SIGKILL has ended it
                process.close()
        atexit.unregister(self._kill)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    async def _obituary(self, worker: int) -> str:
        return obituary(worker, await self._exitcode(worker))

    async def _exitcode(self, worker: int) -> int | None:
        """The exit code of a process whose line has closed; None when it lingers for over a second."""
        await _until_gone([self._processes[worker]], 1.0)
        return self._processes[worker].exitcode


async def _until_gone(processes: Sequence[BaseProcess], seconds: float) -> None:
    for _ in range(math.ceil(seconds / POLL_S)):
        if not any(process.is_alive() for process in processes):
            return
        await asyncio.sleep(POLL_S)


def obituary(worker: int, exitcode: int | None) -> str:
    """What to say of a worker process that is gone without having said why."""
    if exitcode == 0:
        return f"worker {worker} has ended and takes no more messages. Send nothing after the message that ends it."
    if exitcode == -signal.SIGKILL:
        return (
            f"worker {worker} was killed (SIGKILL). If nobody did it by hand, the machine ran out of memory: "
            "use fewer workers, or less work in flight."
        )
    if exitcode is not None and exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"worker {worker} crashed ({name}). Its last words are above; run again with one worker to see it alone."
    return (
        f"worker {worker} ended with exit code {exitcode} and did not say why. See its last words above; a script that "
        "starts workers must do so under `if __name__ == '__main__':`."
    )


def _as_error(worker: int, told: Mapping[str, str]) -> GpuinferError:
    """The worker's error, with its own traceback as a note."""
    kind = getattr(errors, told["type"], None)
    if isinstance(kind, type) and issubclass(kind, GpuinferError):
        error = kind.__new__(kind)
        GpuinferError.__init__(error, told["message"])  # some of ours build their message from other arguments
    else:
        text = f"worker {worker} failed: {told['type']}: {told['message']}. Run again with -vv for its traceback."
        error = WorkerDied(text)
    error.add_note(f"In worker {worker}:\n{told['traceback']}")
    return error


def _cannot_start(error: Exception) -> UsageError:
    return UsageError(
        f"a worker process could not be started: {error}. What a backend's connect() returns, its options, the "
        "strategy's class and the arguments must be picklable: define classes at the top of a module."
    )


@contextlib.contextmanager
def _deaf() -> Iterator[None]:
    """Let a child start with SIGINT and SIGTERM blocked: a terminal signals it too, and the parent decides.

    It inherits that, and ignores them for good as soon as it can (`worker.main`). A signal to the parent in that
    instant is kept and delivered afterwards.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    signals = (signal.SIGINT, signal.SIGTERM)
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)


@contextlib.contextmanager
def _threads_each(processes: int) -> Iterator[None]:
    """Give the children their share of the cores: numeric libraries read these variables once, when imported."""
    share = str(max(1, machine.cores() // max(1, processes)))
    added = {name: share for name in THREAD_COUNTS if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
