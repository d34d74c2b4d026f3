"""Sends a load, and notes when each request was due, was sent, and was answered.

In an open loop a request is due at a time that was drawn beforehand, and all its latencies count from then; in a closed
loop a client sends its next request when the last is answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from gpuinfer.engine.arrivals import Arrivals
from gpuinfer.errors import GpuinferError
from gpuinfer.host.event_loop import LEAST_S, KernelTimer
from gpuinfer.http.client import ConnectionBroken, HttpClient, RequestTimedOut, Unreachable
from gpuinfer.lab.serve_bench.load_summary import LoadRun
from gpuinfer.lab.serve_bench.requests import (
    JSON,
    EventCounter,
    PlannedRequest,
    RequestRecord,
    RequestSource,
    clock,
    read_whole,
)

SleepUntil = Callable[[float], Awaitable[None]]


@contextlib.asynccontextmanager
async def waking() -> AsyncIterator[SleepUntil]:
    """A function that sleeps until a time of `clock`, for one task at a time. By the loop's timers where there is no
    timer of the kernel's to be had.
    """
    rung: asyncio.Future[None] | None = None

    def ring() -> None:
        if rung is not None and not rung.done():
            rung.set_result(None)

    loop = asyncio.get_running_loop()
    try:
        timer = KernelTimer(loop, ring)
    except OSError:
        yield lambda until: asyncio.sleep(max(0.0, until - clock()))
        return

    async def sleep_until(until: float) -> None:
        nonlocal rung
        if until - clock() < LEAST_S:
            await asyncio.sleep(0)
            return
        rung = loop.create_future()
        timer.set(until)
        await rung

    try:
        yield sleep_until
    finally:
        timer.close()


MOST_AT_ONCE = 10_000  # requests under way: more are not sent, and say so
ROUTE = "x-gpuinfer-route"
LOOK_S = 0.02  # between two looks at the event loop's lag
TOGETHER = 32  # sent without a look at what came back, at most
REFUSED = ("unreachable", "HTTP 429", "HTTP 503")
GRACE_S = 0.05  # before a client that was turned away at once asks again


@dataclass(frozen=True)
class OfferedLoad:
    """`concurrency` clients that each wait for an answer, or else `arrivals`, which wait for none.

    It ends after `seconds`, or with so many `requests`; `warmup_s` of the same load come before. What was due in time
    is waited for, `timeout_s` at most.
    """

    concurrency: int = 1
    arrivals: Arrivals | None = None
    seconds: float | None = 10.0
    requests: int | None = None
    warmup_s: float = 1.0
    timeout_s: float = 300.0


class LoadGenerator:
    """One load at one server. `seed` draws the arrivals; the same one brings the same requests at the same times."""

    def __init__(self, client: HttpClient, calls: RequestSource, load: OfferedLoad, seed: str) -> None:
        self._client, self._calls, self._load, self._seed = client, calls, load, seed
        self._headers = [("Content-Type", calls.content_type)]
        if calls.content_type != JSON:
            self._headers.append(("Accept", calls.content_type))
        self._records: list[RequestRecord] = []
        self._numbers = itertools.count()
        self.under_way = 0
        self._began = self._until = 0.0
        self._left: float = 0.0
        self.counted = 0  # answered or failed, for those who watch
        self.stopping = False

    async def run(self) -> LoadRun:
        """The whole load. Cancelled, it ends at once; `stop` lets what is under way end."""
        load, now = self._load, clock()
        self._began = now + load.warmup_s
        self._until = self._began + load.seconds if load.seconds is not None else float("inf")
        self._left = float("inf") if load.requests is None else load.requests
        lags: list[float] = []

        async def note_lags() -> None:
            """How late the event loop comes to a timer, from which its waits of whole milliseconds are taken off."""
            while True:
                before = clock()
                await asyncio.sleep(LOOK_S)
                lags.append(max(0.0, clock() - before - LOOK_S))

        looking = asyncio.ensure_future(note_lags())
        try:
            used, since = time.process_time(), clock()
            await (self._closed() if load.arrivals is None else self._open(load.arrivals))
            spent = clock() - since
            share = (time.process_time() - used) / spent if spent else 0.0
        finally:
            looking.cancel()
        ended = self._until  # where the load ended by the clock, and not by its number
        if load.seconds is None or self._left < 1 or self.stopping:
            ended = max((one.ended for one in self._records if one.due >= self._began), default=self._began)
        offered = None
        if load.arrivals is not None and ended > self._began:
            offered = sum(self._began <= one.due <= ended for one in self._records) / (ended - self._began)
        return LoadRun(self._records, self._began, ended, share, lags, offered, self.stopping)

    def stop(self) -> None:
        """Send nothing more."""
        self.stopping = True

    def _next(self, due: float) -> tuple[PlannedRequest, RequestRecord] | None:
        """The next request, unless there is none left that is due at this time."""
        if self.stopping or due >= self._until:
            return None
        if due >= self._began:
            if self._left < 1:
                return None
            self._left -= 1
        record = RequestRecord(due)
        self._records.append(record)
        return self._calls.make(next(self._numbers)), record

    async def _closed(self) -> None:
        async def one_client() -> None:
            answered: float | None = None
            while (found := self._next(clock())) is not None:
                call, record = found
                record.due = clock()
                record.lag_s = 0.0 if answered is None else record.due - answered
                await self._ask(call, record)
                answered = record.ended
                if record.error in REFUSED:
                    await asyncio.sleep(GRACE_S)
                    answered = None

        clients = [asyncio.ensure_future(one_client()) for _ in range(self._load.concurrency)]
        try:
            await asyncio.gather(*clients)
        finally:
            for one in clients:
                one.cancel()

    async def _open(self, arrivals: Arrivals) -> None:
        """Each is sent when it is due, or at once where that is over."""
        tasks: set[asyncio.Task[None]] = set()
        start, together = self._began - self._load.warmup_s, 0
        try:
            async with waking() as sleep_until:
                for ask in arrivals.asks(random.Random(f"{self._seed}/arrivals")):
                    if (found := self._next(start + ask.at)) is None:
                        break
                    call, record = found
                    if record.due > clock() or together >= TOGETHER:
                        together = 0
                        await sleep_until(record.due)
                    together += 1
                    if self.under_way >= MOST_AT_ONCE:
                        record.error, record.ended = f"not sent: {MOST_AT_ONCE:,} under way", clock()
                        continue
                    task = asyncio.ensure_future(self._ask(call, record))
                    tasks.add(task)
                    task.add_done_callback(tasks.discard)
            if tasks:
                await asyncio.wait(tasks)
        finally:
            for one in tasks:
                one.cancel()

    async def _ask(self, call: PlannedRequest, record: RequestRecord) -> None:
        """Never raises but when it is cancelled: what goes wrong is the record's."""
        self.under_way += 1
        record.rows = call.rows
        record.lag_s = record.lag_s or clock() - record.due
        try:
            # Asked as a stream, which knows when its bytes came: a whole answer waits for its turn of the event loop.
            async with self._client.stream("POST", self._calls.path, call.body, self._headers) as reply:
                record.route = reply.headers.get(ROUTE)
                if reply.status == 200 and self._calls.stream:
                    events = EventCounter(record)
                    feed = events.feed
                    async for at, data in reply.timed():
                        feed(at, data)
                    record.ended = reply.last_byte
                    events.finish()
                    return
                body = await reply.read()
            if reply.status != 200:
                record.error = f"HTTP {reply.status}"
            if not self._calls.stream:
                record.ended, record.first = reply.last_byte, reply.first_byte
                if reply.status == 200 and self._calls.endpoint in ("completions", "chat"):
                    read_whole(record, body)
        except RequestTimedOut:
            record.error = "timeout"
        except Unreachable:
            record.error = "unreachable"
        except ConnectionBroken:
            record.error = "connection broken off"
        except GpuinferError as error:
            record.error = type(error).__name__
        finally:
            self.under_way -= 1
            self.counted += 1
            record.ended = record.ended or clock()
