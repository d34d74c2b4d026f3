"""The connections to one replica: those that wait for a request, and requests that wait for one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from gpuinfer.fleet.router.link import Link, Traveller

CONNECTING = 32  # at once: a burst of requests takes links that come free instead of opening one each
FREELY = 256  # links that are made whenever one is wanted; more only if those in use do not come free soon
SOON = 4  # times the span between two ticks
IDLE_S = 30.0  # then a link that nobody needs is closed
AT_ONCE = 2**16  # bytes of a body that are cheaper to copy than to send by themselves


class Passenger(Traveller, Protocol):
    """A traveller that may still have to wait for its link."""

    waits: bool  # it is not gone, and has no link yet

    def board(self, link: Link) -> bytes:
        """It has got this link; returns what to send."""


class Pool:
    """Links are made as they are needed, some at a time. One that cannot be made is told to all who wait for one."""

    def __init__(
        self,
        open_connection: Callable[[Callable[[], asyncio.Protocol]], Awaitable[object]],
        connect_s: float,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        self._open_connection, self._connect_s, self._loop = open_connection, connect_s, loop
        self._idle: list[Link] = []
        self._wanted: deque[Passenger] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._open = 0  # links
        self._returned = self._returns = 0  # links that came free since the last tick, and between the two before it

    def take(self, passenger: Passenger) -> None:
        """Give it a link, now or when there is one. `lost` tells it that there is none."""
        if self._idle:
            link = self._idle.pop()
            link.carry(passenger, passenger.board(link))
            return
        self._wanted.append(passenger)
        self._connect()

    def take_back(self, link: Link) -> None:
        self._returned += 1
        while self._wanted:
            passenger = self._wanted.popleft()
            if passenger.waits:
                link.carry(passenger, passenger.board(link))
                return
        if self._closed:
            link.drop()
        else:
            link.idle_since = time.monotonic()
            self._idle.append(link)

    def gone(self, link: Link) -> None:
        self._open -= 1
        if link.traveller is None and link in self._idle:
            self._idle.remove(link)

    def _connect(self) -> None:
        if self._open >= FREELY and self._returns * SOON >= len(self._wanted):
            return  # a replica that answers faster than we can ask gains nothing by more links
        if len(self._tasks) < min(CONNECTING, len(self._wanted)):
            task = self._loop.create_task(self._connect_one())
            self._tasks.add(task)
            task.add_done_callback(self._connected)

    def _connected(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            self._connect()

    async def _connect_one(self) -> None:
        link = Link(self)
        try:
            async with asyncio.timeout(self._connect_s):
                await self._open_connection(lambda: link)
        except TimeoutError:
            self._fail("timeout")
        except OSError:
            self._fail("refused")
        else:
            self._open += 1  # before what `gone` may have taken off already
            if link.is_open:
                self.take_back(link)

    def _fail(self, kind: str) -> None:
        waiting, self._wanted = self._wanted, deque()
        for passenger in waiting:
            if passenger.waits:
                passenger.lost(kind)

    def tick(self) -> None:
        self._returns, self._returned = self._returned, 0
        if self._wanted:
            self._connect()

    def tidy(self, now: float) -> None:
        """Close what has been idle for long; the longest idle stand first."""
        while self._idle and now - self._idle[0].idle_since > IDLE_S:
            self._idle.pop(0).drop()

    def close(self) -> None:
        """Close what is idle, and what is in use once it is free."""
        self._closed = True
        while self._idle:
            self._idle.pop().drop()
        for task in list(self._tasks):
            task.cancel()
        self._fail("refused")
