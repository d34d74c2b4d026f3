"""A workload's worker processes: started, heard, and ended, whatever happens to either side.

The arguments of a start are pickled by `multiprocessing` on their way from parent to child; every message after that is
msgpack on a socket pair. A heartbeat on a pipe of its own, from a thread that never runs a workload's code, tells a
slow worker from a stuck one; the parent counts its own looks instead of seconds, so that a parent that was suspended
has missed a single one.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import logging
import math
import multiprocessing
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import msgpack
import psutil

from gpuinfer.api import Connector, Roofline, Setup, Strategy
from gpuinfer.errors import GpuinferError, UsageError, WorkerDied, WorkError
from gpuinfer.host import children, error_text
from gpuinfer.host.error_text import rebuilt_error
from gpuinfer.stats import Snapshot, since

HEADER = struct.Struct(">I")
LARGEST = 256 * 2**20  # bytes of one message: the receiver checks it before it takes the memory


class LineClosed(EOFError):
    """The other end is gone."""


class WorkerLine:
    """One end of the line."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def open(cls, end: socket.socket) -> WorkerLine:
        return cls(*await asyncio.open_connection(sock=end))

    async def send(self, message: Any) -> None:
        """Send plain values. Raises `LineClosed` when the other end is gone, `WorkError` for a message over 256 MiB."""
        packed = msgpack.packb(message)
        if len(packed) > LARGEST:
            raise WorkError(f"a message of {len(packed):,} bytes is over the limit of {LARGEST:,}. Send it in parts.")
        try:
            self._writer.write(HEADER.pack(len(packed)) + packed)  # `writelines` of a closed line fails in Python 3.12
            await self._writer.drain()
        except (OSError, RuntimeError) as error:  # RuntimeError: after `finish`
            raise LineClosed("the line is closed") from error

    async def receive(self) -> Any:
        """The next message. Raises `LineClosed` when the other end is gone, also in the middle of a message."""
        try:
            (size,) = HEADER.unpack(await self._reader.readexactly(HEADER.size))
            if size > LARGEST:
                raise LineClosed(f"the other end announced a message of {size:,} bytes")
            return msgpack.unpackb(await self._reader.readexactly(size), strict_map_key=False)
        except (OSError, asyncio.IncompleteReadError) as error:
            raise LineClosed("the other end is gone") from error

    def last_words(self, message: Any) -> None:
        """Send a short message from another thread while the event loop is blocked, as well as that goes."""
        packed = msgpack.packb(message)
        with contextlib.suppress(OSError):
            os.write(self._writer.get_extra_info("socket").fileno(), HEADER.pack(len(packed)) + packed)

    def finish(self) -> None:
        """Say that nothing more will be sent; what the other end still sends can be received."""
        if not self._writer.is_closing():
            self._writer.write_eof()

    async def hang_up(self) -> None:
        """Finish, and wait until the other end closes: closing on unread bytes would take the last sent ones away."""
        self.finish()
        with contextlib.suppress(OSError):
            while await self._reader.read(2**16):
                pass

    def close(self) -> None:
        """Hang up. What was sent before still arrives."""
        self._writer.close()


def obituary(worker: int, exitcode: int | None) -> str:
    """What to say of a worker process that is gone without having said why."""
    if exitcode is None:
        return (
            f"worker {worker} hears nothing and cannot be killed: it hangs in a call of the system, such as to a disk "
            "or a device that does not answer. See to that, then run again."
        )
    if exitcode == 0:
        return f"worker {worker} has ended and takes no more messages. Send nothing after the message that ends it."
    if exitcode == -signal.SIGKILL:
        return (
            f"worker {worker} was killed (SIGKILL). If nobody did it by hand, the machine ran out of memory: "
            "use fewer workers, or less work in flight."
        )
    if exitcode < 0:
        name = signal.Signals(-exitcode).name
        return f"worker {worker} crashed ({name}). Its last words are above; run again with one worker to see it alone."
    return (
        f"worker {worker} ended with exit code {exitcode} and did not say why. See its last words above; a script that "
        "starts workers must do so under `if __name__ == '__main__':`."
    )


def as_error(worker: int, told: Mapping[str, str]) -> GpuinferError:
    """The worker's error, with its own traceback as a note."""
    error = rebuilt_error(told["type"], told["message"]) or WorkerDied(
        f"worker {worker} failed: {told['type']}: {told['message']}. Run again with -vv for its traceback."
    )
    error.add_note(f"In worker {worker}:\n{told['traceback']}")
    return error


def cannot_start(error: Exception) -> UsageError:
    return UsageError(
        f"a worker process could not be started: {error_text.full_message(error)}. "
        "What a backend's connect() returns, its "
        "options, the strategy's class and the arguments must be picklable: define classes at the top of a module."
    )


BEAT_S = 0.5
LOOK_S = 1.0
LATE_LOOKS = 5  # looks in a row without a beat; one more, and the worker is stuck
START_LOOKS = 60  # the same while it starts: importing a large library may hold the interpreter for long
STARTING, WORKING = b"s", b"w"


class WorkerHeartbeat:
    """The worker's side: beats from now until the process ends."""

    def __init__(self, end: Connection) -> None:
        self._end = end
        self._phase = STARTING
        threading.Thread(target=self._beat, name="gpuinfer heart", daemon=True).start()

    def work(self) -> None:
        """The start is over."""
        self._phase = WORKING

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            while True:
                with contextlib.suppress(BlockingIOError):  # full of beats that nobody has looked at yet
                    os.write(self._end.fileno(), self._phase)
                time.sleep(BEAT_S)


class WorkerPulse:
    """The parent's side. `theirs` is the worker's end, to be closed here once the worker has it."""

    def __init__(self) -> None:
        self._ours, self.theirs = multiprocessing.Pipe(duplex=False)
        for end in (self._ours, self.theirs):
            os.set_blocking(end.fileno(), False)
        self._missed, self._working = 0, False

    def is_stuck(self, pid: int) -> bool:
        """Look once, `LOOK_S` after the last time: whether there has been no beat for too many looks."""
        try:
            beats = os.read(self._ours.fileno(), 2**16)  # all that a pipe holds
        except BlockingIOError:
            beats = b""
        self._missed = 0 if beats else self._missed + 1
        self._working |= WORKING in beats
        if self._missed <= LATE_LOOKS:
            return False
        return self._working or self._missed > START_LOOKS or _is_stopped(pid)

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # gone: its line says so
        return False


log = logging.getLogger(__name__)

GRACE_S = 10.0  # for workers to end by themselves when their line closes, before they are killed
BURIAL_S = 5.0  # for the system to take a killed process away
POLL_S = 0.005


INSIDE = "gpuinfer.runtime.worker"  # what a child runs, loaded there alone: it needs a session, which needs this file


@dataclass(frozen=True)
class WorkerJob:
    """All that one worker process is told at its start."""

    index: int
    target: str  # module:function
    arguments: Mapping[str, Any]
    connector: Connector
    strategy: type[Strategy]
    setup: Setup
    options: Mapping[str, Any]  # the strategy's
    roofline: Roofline | None


def _enter(line: socket.socket, pulse: Connection, job: WorkerJob) -> None:
    importlib.import_module(INSIDE).main(line, pulse, job)


class WorkerPool:
    """The workload's side of its worker processes (`api.Workers`), as an asynchronous context.

    `prepare` says on entering what each of them is to do.
    """

    def __init__(self, prepare: Callable[[], Awaitable[Sequence[WorkerJob]]]) -> None:
        self.snapshots: dict[int, Snapshot] = {}  # the latest of each worker, kept when it has ended
        self._prepare = prepare
        self._jobs: Sequence[WorkerJob] = ()
        self._processes: list[BaseProcess] = []
        self._lines: list[WorkerLine] = []
        self._pulses: list[WorkerPulse] = []
        self._watch: asyncio.Task[None] | None = None
        self._listeners: list[asyncio.Task[None]] = []
        self._inbox: asyncio.Queue[tuple[int, Mapping[str, Any] | GpuinferError | None]] = asyncio.Queue()
        self._ended: dict[int, GpuinferError | None] = {}  # worker → why, if it said so
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
        ours, theirs = socket.socketpair()
        pulse = WorkerPulse()
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
