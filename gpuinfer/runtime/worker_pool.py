"""A workload's worker processes: started, listened to, and ended, whatever happens to either side.

How parent and child talk, and how a stuck worker is told from a slow one: `host/child.py`.
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
from typing import Any

from gpuinfer.api import Connector, ModelSpec, Roofline, Setup, Strategy
from gpuinfer.errors import GpuinferError, UsageError, WorkerDied
from gpuinfer.host import children, shared_memory
from gpuinfer.host.child import (
    BURIAL_S,
    HEARTBEAT_SIZE,
    LATE_S,
    AsyncChannel,
    ChannelClosed,
    Child,
    HeartbeatWatch,
    cannot_start,
    how_it_ended,
)
from gpuinfer.host.error_text import rebuilt_error
from gpuinfer.stats import Snapshot, since

log = logging.getLogger(__name__)

GRACE_S = 10.0  # for workers to end by themselves when their channel closes, before they are killed
LOOK_S = 1.0  # between two looks at the heartbeats
POLL_S = 0.005

INSIDE = "gpuinfer.runtime.worker"  # what a child runs, loaded there alone: it needs a session, which needs this file


@dataclass(frozen=True)
class WorkerJob:
    index: int
    target: str  # module:function
    arguments: Mapping[str, Any]
    connector: Connector
    strategy: type[Strategy]
    setup: Setup
    options: Mapping[str, Any]  # the strategy's
    roofline: Roofline | None
    other_models: Sequence[tuple[ModelSpec, Connector]] = ()  # of the run, whose servers are elsewhere


def _enter(end: socket.socket, heartbeat: shared_memory.Descriptor, job: WorkerJob) -> None:
    importlib.import_module(INSIDE).main(end, heartbeat, job)


class WorkerPool:
    """The workload's side of its worker processes (`api.Workers`), as an asynchronous context.

    `prepare` says on entering what each of them is to do.
    """

    def __init__(self, prepare: Callable[[], Awaitable[Sequence[WorkerJob]]]) -> None:
        self.snapshots: dict[int, Snapshot] = {}  # the latest of each worker, kept when that has ended
        self._prepare = prepare
        self._jobs: Sequence[WorkerJob] = ()
        self._processes: list[Child] = []
        self._lines: list[AsyncChannel] = []
        self._pulses: list[HeartbeatWatch] = []
        self._watch: asyncio.Task[None] | None = None
        self._listeners: list[asyncio.Task[None]] = []
        self._inbox: asyncio.Queue[tuple[int, Mapping[str, Any] | GpuinferError | None]] = asyncio.Queue()
        self._ended: dict[int, GpuinferError | None] = {}  # worker → its error, if any
        self._marks = 0
        self._stopped = False

    async def __aenter__(self) -> WorkerPool:
        self._jobs = await self._prepare()
        atexit.register(self._kill)  # runs before multiprocessing waits for its children without end
        try:
            with children.threads_per_process(len(self._jobs)):
                for job in self._jobs:
                    await self._start(job)
            self._watch = asyncio.create_task(self._watch_over())
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _start(self, job: WorkerJob) -> None:
        descriptor, memory = shared_memory.create(HEARTBEAT_SIZE)
        heartbeat = shared_memory.Descriptor(descriptor)
        try:
            process = Child(_enter, heartbeat, job, name=f"gpuinfer worker {job.index}")
        except Exception as error:
            raise cannot_start("a worker process", error) from error
        finally:
            heartbeat.close()
        self._processes.append(process)
        self._pulses.append(HeartbeatWatch(memory))
        self._lines.append(await AsyncChannel.open(process.end))
        self._listeners.append(asyncio.create_task(self._listen(job.index, self._lines[-1])))
        if self._stopped:
            await self._lines[-1].send({"stop": True})

    async def _listen(self, worker: int, line: AsyncChannel) -> None:
        error: GpuinferError | None = None
        try:
            error = await self._hear(worker, line)
        except ChannelClosed:
            if await self._exit_code(worker) != -signal.SIGKILL:  # being killed is for the workload to judge
                error = await self._death(worker)
        finally:
            self._ended[worker] = error
            self._inbox.put_nowait((worker, error))
            line.close()

    async def _watch_over(self) -> None:
        """Kill the workers that are stuck: all that follows is as if someone else had killed them."""
        while True:
            await asyncio.sleep(LOOK_S)
            for worker, process in enumerate(self._processes):
                if worker not in self._ended and self._pulses[worker].is_stuck(process.pid):
                    log.warning("worker %d has given no sign of life for %g s and is killed", worker, LATE_S)
                    process.kill()
                    await _until_gone([process], BURIAL_S)
                    if process.alive:  # not even that ends it, and its channel would never close
                        self._lines[worker].close()

    async def _hear(self, worker: int, line: AsyncChannel) -> GpuinferError | None:
        """Process a worker's messages until its last. Raises `ChannelClosed` when the worker dies before."""
        while True:
            frame = await line.receive()
            if "message" in frame:
                self._inbox.put_nowait((worker, frame["message"]))
            elif "snapshot" in frame:
                snapshot = Snapshot.from_wire(frame["snapshot"])
                self.snapshots[worker] = snapshot if frame["marks"] == self._marks else since(snapshot, snapshot)
            elif "error" in frame:
                sent = frame["error"]
                error = rebuilt_error(sent["type"], sent["message"]) or WorkerDied(
                    f"worker {worker} failed: {sent['type']}: {sent['message']}. Run again with -vv for its traceback."
                )
                error.add_note(f"In worker {worker}:\n{sent['traceback']}")
                return error
            elif "end" in frame:
                return None

    async def send(self, worker: int, message: Mapping[str, Any]) -> None:
        """Raises `WorkerDied` when that process is gone, or the error that it ended with."""
        try:
            if worker in self._ended:
                raise ChannelClosed
            await self._lines[worker].send({"message": message})
        except ChannelClosed:
            raise self._ended.get(worker) or await self._death(worker) from None

    async def __aiter__(self) -> AsyncIterator[tuple[int, Mapping[str, Any] | None]]:
        """Each message with its sender's number; None once when that process has ended. Ends when all have.

        Raises the error that a worker ended with: of the same type when the type is ours, else `WorkerDied`. A worker
        killed from outside (SIGKILL, the out-of-memory killer) gives None: the workload decides whether to go on.
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
        self._kill()

    async def mark(self) -> None:
        """Reset the counters of every worker."""
        self._marks += 1
        self.snapshots = {worker: since(latest, latest) for worker, latest in self.snapshots.items()}
        await self._broadcast({"mark": True})

    async def _broadcast(self, frame: Mapping[str, Any]) -> None:
        for line in self._lines:
            with contextlib.suppress(ChannelClosed):
                await line.send(frame)

    async def __aexit__(self, *raised: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
        try:
            for line in self._lines:
                line.finish()
            await _until_gone(self._processes, GRACE_S)
        finally:
            self._kill()
            await _until_gone(self._processes, BURIAL_S)
            if self._listeners:  # hear the last words of the dead
                _, unheard = await asyncio.wait(self._listeners, timeout=1.0)
                for listener in unheard:
                    listener.cancel()
            for pulse in self._pulses:
                pulse.close()
            for child in self._processes:
                with contextlib.suppress(ValueError):  # not even SIGKILL has ended it
                    child.process.close()
            atexit.unregister(self._kill)

    def _kill(self) -> None:
        for child in self._processes:
            child.kill()

    async def _death(self, worker: int) -> GpuinferError:
        """The error of a worker process that has ended without one of its own."""
        code = await self._exit_code(worker)
        if code == children.UNGUARDED:
            return UsageError(children.UNGUARDED_SAID.format("worker processes"))
        cure = "See its last words above, and run again with one worker to see it alone."
        if code is None:
            cure = "See to that, then run again."
        elif code == 0:
            cure = "Send nothing after the message that ends it."
        elif code == -signal.SIGKILL:
            cure = "If nobody did it by hand, use fewer workers, or less work in flight."
        elif code > 0:
            cure = (
                "See its last words above; a script that starts workers must do so under `if __name__ == '__main__':`."
            )
        return WorkerDied(f"worker {worker} {how_it_ended(code)} and did not say why. {cure}")

    async def _exit_code(self, worker: int) -> int | None:
        """The exit code of a process whose channel has closed; None when it does not end even so."""
        await _until_gone([self._processes[worker]], BURIAL_S)
        return self._processes[worker].process.exitcode


async def _until_gone(processes: Sequence[Child], seconds: float) -> None:
    for _ in range(math.ceil(seconds / POLL_S)):
        if not any(process.alive for process in processes):
            return
        await asyncio.sleep(POLL_S)
