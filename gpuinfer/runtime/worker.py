"""The inside of a worker process: its session, its channel to the workload, and its end when the parent's comes."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import os
import socket
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from gpuinfer import errors
from gpuinfer.api import Infer
from gpuinfer.engine.profiler import ProfileWindow, profiled
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host import children, error_text, event_loop
from gpuinfer.host.child import AsyncChannel, ChannelClosed, Heartbeat
from gpuinfer.host.error_text import nearest_error_type
from gpuinfer.host.shared_memory import Descriptor
from gpuinfer.runtime.session import Session
from gpuinfer.runtime.worker_pool import WorkerJob

REPORT_S = 0.5  # between two snapshots
WIND_UP_S = 5.0  # to wind up after the line has closed; a kernel in a thread cannot be interrupted

Target = Callable[[Infer, "ParentChannel", Mapping[str, Any]], Awaitable[None]]


class ParentChannel:
    """The worker's end of the channel (`api.Channel`)."""

    def __init__(self, line: AsyncChannel) -> None:
        self.inbox: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self._line = line

    async def send(self, message: Mapping[str, Any]) -> None:
        await self._line.send({"message": message})

    async def receive(self) -> Mapping[str, Any]:
        return await self.inbox.get()


def main(end: socket.socket, heartbeat: Descriptor, job: WorkerJob) -> None:
    """Run one job, and end no later than the parent."""
    children.set_up_child()
    logging.getLogger("gpuinfer").addHandler(_ShowLog())
    event_loop.run(_serve(end, Heartbeat(heartbeat), job))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # all is closed and sent: unloading torch would cost up to a second


class _ShowLog(logging.Handler):
    """Shows log records as the parent's command line does."""

    def emit(self, record: logging.LogRecord) -> None:
        print(f"gpuinfer: {record.getMessage()}", file=sys.stderr, flush=True)


async def _serve(end: socket.socket, heart: Heartbeat, job: WorkerJob) -> None:
    line = await AsyncChannel.open(end)
    last: dict[str, Any] = {"end": True}
    try:
        await _work(line, heart, job)
    except (asyncio.CancelledError, ChannelClosed):
        pass  # the parent has hung up
    except BaseException as error:  # noqa: BLE001  whatever it is, the parent must hear of it
        last = {"error": describe(error)}
    _exit_in(WIND_UP_S)
    with contextlib.suppress(ChannelClosed):
        await line.send(last)
        await line.hang_up()
    line.close()


async def _work(line: AsyncChannel, heart: Heartbeat, job: WorkerJob) -> None:
    module, _, name = job.target.partition(":")
    try:
        target: Target = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(
            f"no worker function '{job.target}': {error_text.safe_str(error)}. Name it as module:function."
        ) from error
    strategy = job.strategy(job.setup, **job.options)
    work, faults = asyncio.current_task(), list[WorkError]()

    def end(fault: WorkError) -> None:
        faults.append(fault)
        if work is not None:
            work.cancel()

    def die(fault: WorkError) -> None:
        line.send_from_thread({"error": describe(fault)})
        os._exit(1)

    session = Session(
        job.connector.open(),
        strategy,
        roofline=job.roofline,
        on_fault=end,
        on_stuck=die,
        name=f"worker {job.index}",
        connectors=job.other_models,
    )
    try:
        async with session:
            channel, marks = ParentChannel(line), 0

            async def send_counters() -> None:
                """Stamped with how many marks this process has seen."""
                await line.send({"snapshot": session.snapshot().to_wire(), "marks": marks})

            async def report() -> None:
                with contextlib.suppress(ChannelClosed):
                    while True:
                        await asyncio.sleep(REPORT_S)
                        await send_counters()

            async def listen() -> None:
                nonlocal marks
                with contextlib.suppress(ChannelClosed):
                    while True:
                        frame = await line.receive()
                        if "message" in frame:
                            channel.inbox.put_nowait(frame["message"])
                        elif "mark" in frame:
                            await session.count_anew()
                            marks += 1
                        elif "stop" in frame:
                            await session.stop()
                _exit_in(WIND_UP_S)
                if work is not None:
                    work.cancel()

            tasks = [asyncio.create_task(listen()), asyncio.create_task(report())]
            try:
                if session.has_model:
                    await session.ready()
                heart.started()
                async with profiled(ProfileWindow.of(job.setup, f"worker-{job.index}")):
                    await target(session, channel, job.arguments)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)
                with contextlib.suppress(ChannelClosed):
                    await send_counters()
    except asyncio.CancelledError:
        if faults:
            raise faults[0] from None
        raise


def _exit_in(seconds: float) -> None:
    timer = threading.Timer(seconds, os._exit, (1,))
    timer.daemon = True
    timer.start()


def describe(error: BaseException) -> dict[str, str]:
    """An error as plain values: the nearest of our own types when it is one of them, its message, its traceback."""
    first = errors.unwrap(error)
    return {
        "type": nearest_error_type(first) or error_text.type_name(first),
        "message": error_text.safe_str(first),
        "traceback": "".join(traceback.format_exception(error)),
    }
