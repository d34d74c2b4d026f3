"""Open and closed loads as they go: requests at their times whatever happens, or clients that wait for their answers.

What makes a measured latency a lie is a generator that waits with its next request until the last is answered, or that
counts from when it got round to sending: coordinated omission (Tene, "How not to measure latency", 2013). An open load
draws all times beforehand, sends at once what is due, and counts how late it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from abc import ABC, abstractmethod
from collections.abc import Iterator

from gpuinfer.api import Infer
from gpuinfer.load.arrivals import Closed, Offer
from gpuinfer.workloads.load.asking import Requester

AT_ONCE = 32  # requests that are sent before anything else may run, when the generator is behind
LAST_S = 1.0  # for what is under way when the load is stopped
AGAIN_S = 0.01  # until a client asks a full queue again that does not say when


class LoadDriver(ABC):
    """Sends a load. `over` ends it early; `lasted_s` is how long it has been sent for."""

    def __init__(self, asker: Requester) -> None:
        self._asker = asker
        self._loop = asyncio.get_running_loop()
        self._began = self._ended = self._loop.time()
        self._sending = True

    @property
    def lasted_s(self) -> float:
        return (self._loop.time() if self._sending else self._ended) - self._began

    async def run(self) -> None:
        """Until the load is over and everything is settled. Cancelled, it leaves what is under way a second to end."""
        try:
            await self.send()
            self._stamp()
            await self.settle()
        except asyncio.CancelledError:
            self._stamp()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.settle(), LAST_S)
        finally:
            self.abandon()

    def _stamp(self) -> None:
        if self._sending:
            self._sending, self._ended = False, self._loop.time()

    @abstractmethod
    async def send(self) -> None:
        """Send all of the load."""

    @abstractmethod
    async def settle(self) -> None:
        """Wait until nothing is under way. Raises what a request met that is not for the request alone."""

    @abstractmethod
    def abandon(self) -> None:
        """Want no more answers."""


class Open(LoadDriver):
    """Each request is sent when it is due, on the loop's clock; a task for each costs less than what else it takes."""

    def __init__(self, asker: Requester, asks: Iterator[Offer]) -> None:
        super().__init__(asker)
        self._asks = asks
        self._tasks: set[asyncio.Task[object]] = set()
        self._fault: BaseException | None = None
        self._idle = asyncio.Event()
        self._pausing: asyncio.Future[None] | None = None

    async def send(self) -> None:
        time, sent = self._loop.time, 0
        for ask in self._asks:
            due = self._began + ask.at
            if due > time():
                await self._pause(due)
                sent = 0
            elif (sent := sent + 1) >= AT_ONCE:
                await asyncio.sleep(0)
                sent = 0
            if self._fault is not None:
                raise self._fault
            task = self._loop.create_task(self._asker.ask(ask, due))
            self._tasks.add(task)
            task.add_done_callback(self._done)

    async def _pause(self, until: float) -> None:
        """Until this time of the loop's clock, or until all is lost."""
        self._pausing = self._loop.create_future()
        timer = self._loop.call_at(until, _end, self._pausing)
        try:
            await self._pausing
        finally:
            timer.cancel()
            self._pausing = None

    def _done(self, task: asyncio.Task[object]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._fault = self._fault or error
            if self._pausing is not None:
                _end(self._pausing)
        if not self._tasks or self._fault is not None:
            self._idle.set()

    async def settle(self) -> None:
        while self._tasks and self._fault is None:
            self._idle.clear()
            await self._idle.wait()
        if self._fault is not None:
            raise self._fault

    def abandon(self) -> None:
        for task in self._tasks:
            task.cancel()


class ThinkingClients(LoadDriver):
    """Clients that ask, wait for the answer, think and ask again, for `seconds` or until `count` have been asked."""

    def __init__(
        self, asker: Requester, infer: Infer, load: Closed, seconds: float, count: float, dice: random.Random
    ) -> None:
        super().__init__(asker)
        self._infer, self._load = infer, load
        self._until, self._left = self._began + seconds, count
        seeds = [dice.random() for _ in range(load.clients)]  # so that none draws what another would have
        self._tasks = [self._loop.create_task(self._client(random.Random(seed))) for seed in seeds]

    async def _client(self, dice: random.Random) -> None:
        draw, time = self._load.mix.draw(dice), self._loop.time
        with self._infer.client() as me:
            while await self._thinks(dice) and self._sending and self._left > 0:
                self._left -= 1
                full = await self._asker.ask(draw(0.0)._replace(client=me), time())
                if full is not None:
                    await self._rest(full.retry_after_s or AGAIN_S)

    async def _thinks(self, dice: random.Random) -> bool:
        """Whether the load still goes on after that."""
        if self._load.think:
            await self._rest(self._load.think_s(dice))
        return self._loop.time() < self._until

    async def _rest(self, seconds: float) -> None:
        """For so long, or until the load is over."""
        await asyncio.sleep(min(seconds, max(0.0, self._until - self._loop.time())))

    async def send(self) -> None:
        await self.settle()

    async def settle(self) -> None:
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()

    def abandon(self) -> None:
        for task in self._tasks:
            task.cancel()
            task.add_done_callback(_look_at)


def _end(pause: asyncio.Future[None]) -> None:
    if not pause.done():
        pause.set_result(None)


def _look_at(task: asyncio.Task[None]) -> None:
    """So that nobody complains that a failure was not seen: the first one was raised."""
    if not task.cancelled():
        task.exception()
