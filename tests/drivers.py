"""One schedule of requests through each driver of the queue core, on a virtual clock: what each wrote down.

Every driver is the real one, and so is the core below it. Made up are clock and service times: those of batch number n
are `seconds[n]`, and it fails if `fails[n]`. Clients say at the beginning who they are, each with a request of one row.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
import socket
from dataclasses import dataclass, field

from gpuinfer.api import Backend, Limits, ModelSpec, Priority
from gpuinfer.central.blocks import Block, BlockForm
from gpuinfer.central.client_sessions import ROW_BOUNDS, ClientSession
from gpuinfer.central.protocol import NOBODY, RecordKind, Unpacker, WireRecord
from gpuinfer.central.row_server import RowQueue, ServedBatch
from gpuinfer.engine.arrivals import Offer
from gpuinfer.engine.core import Batch
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.watchdog import Patience
from gpuinfer.errors import BackendError, GpuinferError
from gpuinfer.host import shared_memory
from gpuinfer.host.error_text import error_from_wire
from gpuinfer.lab.simulate.simulated_replica import SimulatedReplica
from gpuinfer.models.row_format import AnswerLayout
from gpuinfer.stats import Lane
from gpuinfer.testing import VirtualLoop

CLIENTS = 3
FAILURE = BackendError("as planned. Try again.")


@dataclass(frozen=True)
class Ask:
    """One request of a schedule, `at` seconds after its beginning."""

    at: float
    rows: int
    priority: Priority
    timeout: float
    group: str | None
    client: int | None
    cancel_at: float = math.inf  # unless it has been cut by then; a simulation knows no cancellation


@dataclass(frozen=True)
class Schedule:
    """What happens, whatever the driver."""

    limits: Limits
    max_queue_rows: int
    asks: list[Ask]
    seconds: list[float]
    fails: list[bool]
    after_s: float = 1000.0  # that it goes on after the last arrival: all that can happen has happened

    def service_s(self, number):
        return self.seconds[number % len(self.seconds)]

    def failing(self, number):
        return self.fails[number % len(self.fails)]

    def at_once(self):
        """The requests that arrive at each instant."""
        return [(at, list(asks)) for at, asks in itertools.groupby(self.asks, key=lambda ask: ask.at)]


@dataclass
class Diary:
    """A journal. Requests go by their number, in the order in which they came."""

    numbers: dict = field(default_factory=dict)
    arrivals: list = field(default_factory=list)  # times
    cuts: list = field(default_factory=list)  # (time, reason, rows, requests)
    runs: list = field(default_factory=list)  # (batch, end, seconds)
    ends: dict = field(default_factory=dict)  # request → (outcome, time)
    accounted: list = field(default_factory=list)  # (time, requests)
    observed: list = field(default_factory=list)
    told: dict = field(default_factory=dict)  # request → text of its error
    snapshot: object = None
    held: list = field(default_factory=list)  # at the end, by the strategy

    def waits(self, number):
        """Whether this request may be in the queue."""
        return number not in self.ends and not any(number in requests for *_, requests in self.cuts)

    def arrived(self, request):
        self.numbers[request] = len(self.arrivals)
        self.arrivals.append(request.arrived)

    def cut(self, requests, rows, reason, now):
        self.cuts.append((now, reason, rows, [self.numbers[request] for request in requests]))
        return len(self.cuts)

    def ran(self, batch, seconds, now):
        self.runs.append((batch, now, seconds))

    def settled(self, request, outcome, now):
        assert self.numbers[request] not in self.ends, "settled twice"
        self.ends[self.numbers[request]] = (outcome, now)


def kept_by(strategy, diary):
    """The strategy, with its lessons written into the diary."""
    account, observe = strategy.account, strategy.observe

    def noting_account(batch, now):
        diary.accounted.append((now, [diary.numbers[request] for request in batch]))
        account(batch, now)

    def noting_observe(record):
        diary.observed.append(record)
        observe(record)

    strategy.account, strategy.observe = noting_account, noting_observe
    return strategy


# The event loop


class Model(Backend):
    """Takes its time, and answers or fails as the schedule says."""

    def __init__(self, schedule):
        super().__init__()
        self.limits, self.schedule, self.numbers = schedule.limits, schedule, itertools.count()

    async def infer(self, batch):
        number = next(self.numbers)
        await asyncio.sleep(self.schedule.service_s(number))
        if self.schedule.failing(number):
            raise FAILURE
        return [None] * len(batch)


def by_the_engine(schedule, strategy):
    def loop_at_zero():
        loop = VirtualLoop()
        loop.clock.now = 0.0
        return loop

    with asyncio.Runner(loop_factory=loop_at_zero) as runner:
        return runner.run(_by_the_engine(schedule, strategy))


async def _by_the_engine(schedule, strategy):
    diary, loop = Diary(), asyncio.get_running_loop()
    engine = Engine(
        Model(schedule),
        kept_by(strategy, diary),
        max_queue_rows=schedule.max_queue_rows,
        recorder=diary,
        clock=loop.time,
    )
    await engine.start()
    numbers, tasks, live = itertools.count(), [], set()

    async def submit(ask):
        number = next(numbers)
        try:
            await engine.submit(
                None, rows=ask.rows, priority=ask.priority, timeout=ask.timeout, group=ask.group, client=ask.client
            )
        except GpuinferError as error:
            diary.told[number] = str(error)

    def cancel(number):
        if diary.waits(number):
            tasks[number].cancel()

    for at, asks in schedule.at_once():
        await asyncio.sleep(at - loop.time())
        for ask in asks:
            if ask.client is not None and ask.client not in live:
                live.add(ask.client)
                engine.join(ask.client)
            if ask.cancel_at < math.inf:
                loop.call_at(ask.cancel_at, cancel, len(tasks))
            tasks.append(loop.create_task(submit(ask)))
    await asyncio.sleep(schedule.after_s)
    diary.held = list(engine.held(Patience()))
    diary.snapshot, ends, told = engine.snapshot(), dict(diary.ends), dict(diary.told)
    await engine.close(drain=False)
    await asyncio.gather(*tasks, return_exceptions=True)
    diary.ends, diary.told = ends, told
    return diary


# The virtual clock


def by_the_simulation(schedule, strategy):
    diary, events, order, live = Diary(), [], itertools.count(), set()
    numbers, failing = itertools.count(), [False]
    now = 0.0
    replica = SimulatedReplica(
        kept_by(strategy, diary),
        schedule.limits,
        schedule.max_queue_rows,
        [Lane(f"forward {number}", clock=lambda: now) for number in range(schedule.limits.in_flight)],
        service_s=lambda rows, now: schedule.service_s(next(numbers)),
        fails=lambda: failing[0],
        turn_s=lambda requests: 0.0,
        schedule=lambda when, replica, running: heapq.heappush(events, (when, next(order), running)),
        journal=diary,
    )
    arrivals = schedule.at_once()
    until = arrivals[-1][0] + schedule.after_s
    while arrivals or (events and events[0][0] <= until):
        if arrivals and (not events or arrivals[0][0] <= events[0][0]):
            now, asks = arrivals.pop(0)
            for ask in asks:
                if ask.client is not None and ask.client not in live:
                    live.add(ask.client)
                    replica.core.join(ask.client, now)
                replica.arrive(Offer(now, ask.rows, ask.priority, ask.timeout, ask.client, ask.group), now)
        else:
            now, _, running = heapq.heappop(events)
            if running is None:
                replica.ring(now)
            else:
                failing[0] = schedule.failing(running.batch.number - 1)
                replica.end(running, now)
        if replica.woken:
            replica.dispatch(now)
    diary.held = list(replica.core.held(Patience()))
    diary.snapshot = replica.snapshot()
    return diary


# The central server


def by_the_server(schedule, strategy):
    """What its threads do, in turns: one that is free takes in what has come, asks for a batch, and has it served."""
    diary, now, cancelled = Diary(), 0.0, set()
    cancels = sorted((ask.cancel_at, number) for number, ask in enumerate(schedule.asks) if ask.cancel_at < math.inf)
    lanes = [Lane(f"forward {number}", clock=lambda: now) for number in range(schedule.limits.in_flight)]
    form = BlockForm(ModelSpec("none", inputs=1), AnswerLayout("tensor", ((1,),)))
    unpacker = Unpacker()

    def told(caller, data):
        for record in unpacker.feed(data):
            if record.kind == RecordKind.FAILED and record.number not in cancelled:
                diary.told[record.number] = str(error_from_wire(record.body))

    kept = kept_by(strategy, diary)
    queue = RowQueue(form, schedule.limits, schedule.max_queue_rows, kept, told, diary, lambda: now)
    line, theirs = socket.socketpair()
    with line, theirs:
        caller = ClientSession(line, 1, lambda rows: None, ROW_BOUNDS)
        descriptor, mapping = shared_memory.create(form.size(64))
        shared_memory.Descriptor(descriptor).close()
        caller.blocks = {number: Block(number, 64, mapping, form) for number in range(len(schedule.asks))}
        arrivals, ends = schedule.at_once(), []
        until, look_at, numbers, order = (
            arrivals[-1][0] + schedule.after_s,
            math.inf,
            itertools.count(),
            itertools.count(),
        )
        while True:
            now = min([look_at, *(events[0][0] for events in (arrivals, ends, cancels) if events)])
            if now > until:
                break
            if arrivals and arrivals[0][0] == now:
                for ask in arrivals.pop(0)[1]:
                    number = next(order)
                    client = NOBODY if ask.client is None else ask.client
                    body = None if ask.group is None else {"group": ask.group}
                    queue.take(
                        caller,
                        WireRecord(RecordKind.ASK, ask.priority, number, number, client, ask.rows, ask.timeout, body),
                    )
            elif cancels and cancels[0][0] == now:
                _, number = cancels.pop(0)
                if diary.waits(number):
                    cancelled.add(number)
                    queue.take(caller, WireRecord(RecordKind.CANCEL, number=number))
            elif ends and ends[0][0] == now:
                _, _, batch, started, failed = heapq.heappop(ends)
                errors = [FAILURE if failed else None] * len(batch.requests)
                served = ServedBatch(errors, whole=not failed)
                for _, data in queue.answers(batch, served).items():
                    told(caller, b"".join(data))
                queue.settle(batch, served, started, now)
            while True:
                step = queue.next_batch(now, lanes=len(lanes) - len(ends))
                if not isinstance(step, Batch):
                    break
                number = next(numbers)
                heapq.heappush(ends, (now + schedule.service_s(number), number, step, now, schedule.failing(number)))
            look_at = step
        diary.held = list(queue.core.held(Patience()))
        diary.snapshot = queue.core.snapshot(lanes)
        caller.blocks.clear()
    return diary
