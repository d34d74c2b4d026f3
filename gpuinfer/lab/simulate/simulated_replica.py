"""The queue core on a virtual clock: one engine and its backend, of which only clock and service times are made up."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from gpuinfer.api import Limits, Request, Strategy
from gpuinfer.config import blame
from gpuinfer.engine.arrivals import Offer
from gpuinfer.engine.core import Batch, Core, Journal
from gpuinfer.engine.scheduler import Cut, Fault
from gpuinfer.errors import StrategyError
from gpuinfer.stats import Lane, Snapshot, since


class Running(NamedTuple):
    """What runs in a lane until its time comes."""

    batch: Batch
    lane: Lane
    started: float
    seconds: float


POSTPONED = 5_000  # looks in a row at which the strategy put the cut off once more: it never will


Left = Callable[[Request, float, bool], None]


class SimulatedReplica:
    """`schedule(when, replica, running)` is called for what will end, and without a batch for a time to look again.

    `service_s` draws the seconds of a batch of so many rows, and `fails` whether one fails; `turn_s` is what the engine
    itself needs for a batch of so many requests: they are answered, and the lane is free, so much later. `left`, if
    there is one, is called with each request that is settled, the time, and whether it was let in at all. What a
    strategy does wrong ends the simulation: each method may raise `StrategyError`.
    """

    def __init__(
        self,
        strategy: Strategy,
        limits: Limits,
        max_queue_rows: int | None,
        lanes: Sequence[Lane],
        service_s: Callable[[int, float], float],
        fails: Callable[[], bool],
        turn_s: Callable[[int], float],
        schedule: Callable[[float, SimulatedReplica, Running | None], None],
        left: Left | None = None,
        journal: Journal | None = None,
        warn: blame.WarnOnce | None = None,
    ) -> None:
        self.core = Core(strategy, journal, warn)
        self.core.open(limits, max_queue_rows)
        self.under_way = 0  # requests that wait here or are being served
        self.woken = False  # there is something to dispatch
        self.lanes = lanes
        self._free = list(reversed(lanes))
        self._early = Snapshot()  # of the lanes, when counting began
        self._service_s, self._fails, self._turn_s, self._schedule = service_s, fails, turn_s, schedule
        self._left = left
        self._alarm_at = math.inf
        self._rung = False  # why it looks: the time that the strategy named has come
        self._postponed = 0  # such looks in a row
        self._alone = False  # nothing but such a look has happened since the last one

    # What happens to it

    def arrive(self, ask: Offer, now: float) -> None:
        at, rows, priority, timeout, client, group = ask
        # its payload: when it was offered, which is earlier where it has waited in the router
        request = Request(at, rows, now, priority, at + timeout, group, client)
        self._alone = False
        self.under_way += 1
        if (shed := self.core.arrive(request)) is not None:
            for other, _ in shed.turned_away:
                self._settle(other, "rejected", now)
            if shed.refusal is not None:
                self.under_way -= 1
                if isinstance(shed.refusal, StrategyError):
                    raise shed.refusal
                if self._left is not None:
                    self._left(request, now, False)
                return
        if timeout < math.inf:
            self._ring_at(request.deadline)
        if self._free:
            self.woken = True

    def ring(self, now: float) -> None:
        """The time to look again has come, unless an earlier one took its place."""
        if now == self._alarm_at:
            self._alarm_at = math.inf
            self.woken = self._rung = True

    def end(self, running: Running, now: float) -> None:
        """A batch has been answered, or has failed."""
        batch, lane, started, seconds = running
        lane.enter("reply")
        if self._fails():
            for request in batch.requests:
                self._settle(request, "failed", now)
        else:
            self.under_way -= len(batch.requests)
            for request in batch.requests:
                request.arrived = request.payload  # its latency counts from there
            self.core.answered(batch, now)
            self.core.ended(batch, started, seconds, now)
            if self._left is not None:
                for request in batch.requests:
                    self._left(request, now, True)
        lane.enter("idle")
        self._free.append(lane)
        self.woken, self._alone = True, False

    def dispatch(self, now: float, *, draining: bool = False) -> None:
        """Do what the core decides, and ask to be called again in time. Raises `StrategyError` for a strategy that puts
        a cut off for ever.
        """
        self.woken = False
        if not self.core.queue.rows:
            return
        in_vain = self._rung
        while not isinstance(step := self.core.decide(now, len(self._free), draining=draining), float):
            in_vain = False
            if isinstance(step, Cut):
                batch, lane = self.core.launch(step, now), self._free.pop()
                self._postponed = 0
                lane.enter("forward")
                seconds = self._service_s(step.rows, now)
                ends = now + seconds + self._turn_s(len(step.requests))
                self._schedule(ends, self, Running(batch, lane, now, seconds))
            elif isinstance(step, Fault):
                raise step.error
            else:
                for request in step.requests:
                    self._settle(request, "expired", now)
        self._rung = False
        if in_vain and self._free:
            # The strategy's time has come, and it has put the cut off. During a batch it may wait for its end, as long
            # as anything happens; and it may wait for each client.
            idle = len(self._free) == len(self.lanes)
            self._postponed = self._postponed + 1 if idle or self._alone else 0
            self._alone = True
            if self._postponed > POSTPONED + len(self.core.queue.clients):
                raise self.uncut(f"it has put that off {self._postponed:,} times in a row")
        if step < math.inf:
            self._ring_at(step)

    # What it has counted

    def count_from_here(self) -> None:
        """Forget what has been counted so far; what is under way counts when it ends."""
        self.core.count_anew()
        self._early = Snapshot(lanes=tuple(lane.to_wire() for lane in self.lanes))

    def snapshot(self) -> Snapshot:
        return since(self.core.snapshot(self.lanes), self._early)

    # How

    def uncut(self, why: str = "nothing else will happen") -> StrategyError:
        """The error of a strategy that lets requests wait for ever."""
        strategy = self.core.strategy
        said = f"{blame.who(strategy)} {self.core.uncut}, and {why}"
        return StrategyError(f"{said}. Choose another with --strategy. {blame.cure_for(strategy)}")

    def _settle(self, request: Request, outcome: str, now: float) -> None:
        """A request that was let in ends."""
        self.under_way -= 1
        self.core.settled(request, outcome, now)
        if self._left is not None:
            self._left(request, now, True)

    def _ring_at(self, when: float) -> None:
        if when < self._alarm_at:
            self._alarm_at = when
            self._schedule(when, self, None)
