"""A process on another machine, at whose far end `remote_end.py` runs: what its launcher knows of it, and says to it.

A launcher that has two streams to the other machine derives from `RemoteProcess`, and says how they are read, written
and ended. The process's log is what the far end writes to its standard error, which the launcher brings to `plan.log`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import abstractmethod
from collections import deque

import msgspec

from gpuinfer.config import registry
from gpuinfer.errors import WorkError
from gpuinfer.launchers import base
from gpuinfer.launchers.base import LaunchedProcess, ProcessPlan
from gpuinfer.launchers.remote_end import BEAT_S, BEGIN, FrameReader, RemoteOrder, RemoteState, encode_frame

GREETING = 64 << 10  # bytes that may come before the far end begins: what login shells print
GONE_S = 10.0  # for the far end to leave, once the connection is ended


class ConnectionEnded(WorkError):
    """The other end has closed its stream."""


class RemoteProcess(LaunchedProcess):
    """Its order is: `greet`, then `begin`. `remote_pid` is the process id over there, once it has begun."""

    def __init__(self, plan: ProcessPlan) -> None:
        super().__init__(plan)
        self.remote_pid = 0
        self._frames, self._reports = FrameReader(), deque[RemoteState]()
        self._tasks: list[asyncio.Task[None]] = []
        self._news = asyncio.Event()
        self._address: tuple[str, int] | None = None
        self._over = ""  # how it ended

    @abstractmethod
    async def _read(self) -> bytes:
        """What has come from the far end's standard output; empty at its end."""

    @abstractmethod
    async def _write(self, data: bytes) -> None:
        """To its standard input. One that has ended is none of its business."""

    @abstractmethod
    async def _end(self, within_s: float) -> None:
        """End its standard input, wait until it has left, and end the connection at last when the time is over."""

    async def _reached(self, there: tuple[str, int]) -> tuple[str, int]:
        """Where this process reaches what listens at that address over there. Raises `WorkError`."""
        return there

    async def greet(self, within_s: float) -> str:
        """The version of gpuinfer over there; empty where it did not come up."""
        before = b""
        with contextlib.suppress(TimeoutError, ConnectionEnded):
            async with asyncio.timeout(within_s):
                while BEGIN not in before:
                    before += await self._next_bytes()
                    if len(before) > GREETING:
                        return ""
                self._take(before.partition(BEGIN)[2])
                return (await self._next_report()).version
        return ""

    def refuse_other_version(self, version: str, python: str) -> None:
        """Raises `WorkError` where it is not this one."""
        if version != (ours := registry.own_version()):
            raise WorkError(
                f"{self.called} cannot be started: {python} there has gpuinfer {version}, and this is {ours}. "
                f"Install the same on both sides: pip install gpuinfer=={ours}"
            )

    async def begin(self, order: RemoteOrder) -> None:
        """Have it run."""
        await self._write(encode_frame(order))
        self._tasks = [asyncio.create_task(self._follow()), asyncio.create_task(self._beat())]

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_S)
            await self._write(encode_frame("alive"))

    async def _next_bytes(self) -> bytes:
        if not (more := await self._read()):
            raise ConnectionEnded("the connection ended")
        return more

    def _take(self, more: bytes) -> None:
        self._reports.extend(msgspec.json.decode(one, type=RemoteState) for one in self._frames.feed(more))

    async def _next_report(self) -> RemoteState:
        while not self._reports:
            self._take(await self._next_bytes())
        return self._reports.popleft()

    async def _follow(self) -> None:
        """Until it has ended: learn how it is."""
        try:
            while not self._over:
                report = await self._next_report()
                self.remote_pid = report.pid or self.remote_pid
                if report.address is not None:
                    self._address = await self._reached(report.address)
                if report.refused:
                    self._over = f"cannot run there: {report.refused}"
                if report.code is not None:
                    self._over = base.ending_of(report.code)
                self._news.set()
        except (WorkError, msgspec.MsgspecError, OSError) as error:
            self._over = self._over or str(error)
        finally:
            self._over = self._over or "given up"
            self._ended()
            self._news.set()

    def _ended(self) -> None:
        """It has: what was its own is another's from here on. Called at least once."""

    async def ready(self, within_s: float) -> tuple[str, int]:
        until = time.monotonic() + within_s
        while self._address is None or self._over:
            if self._over:
                raise self.failure("ended before it served")
            if time.monotonic() > until:
                raise self.failure(f"did not come up within {within_s:g} s (--start-timeout)")
            await self._await_news(until)
        return self._address

    async def _await_news(self, until: float) -> None:
        self._news.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._news.wait(), max(0.01, until - time.monotonic()))

    @property
    def alive(self) -> bool:
        return not self._over

    @property
    def ending(self) -> str:
        return self._over

    async def terminate(self, within_s: float) -> None:
        until = time.monotonic() + within_s
        if self.alive and self._tasks:
            await self._write(encode_frame("terminate"))
        while self.alive and self._tasks and time.monotonic() < until:
            await self._await_news(until)
        await self.kill()

    async def kill(self) -> None:
        """The end of its input has the far end kill it, with all that it has started."""
        await self._end(GONE_S)
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=GONE_S)
        self._over = self._over or "was ended"
        self._ended()
