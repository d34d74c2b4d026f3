"""One engine and its backend on the virtual clock: the same questions to the strategy, in the same order.

What `engine` does with futures and tasks is done here with numbers; whatever decides a batch (queue, clients,
admission, cutting, strategy) is shared with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from gpuinfer.api import BatchRecord, Limits, Reason, Request, Strategy
from gpuinfer.config import blame
from gpuinfer.engine.admission import Admission, make_room
from gpuinfer.engine.cutting import Cut, Fault, blamed, next_cut, notices_of
from gpuinfer.engine.queue import Queue
from gpuinfer.engine.tally import Tally
from gpuinfer.errors import Expired, QueueFull, RequestError, StrategyError
from gpuinfer.load.arrivals import Offer
from gpuinfer.stats import Lane, Snapshot, since


class Recorder(Protocol):
    """Whoever writes down what happens: `gpuinfer.trace` does, and so may a test."""

    def arrived(self, request: Request) -> None: ...
    def cut(self, requests: Sequence[Request], rows: int, reason: Reason, now: float) -> int: ...
    def ran(self, batch: int, seconds: float, now: float) -> None: ...
    def settled(self, request: Request, outcome: str, now: float) -> None: ...


class Batch(NamedTuple):
    """What runs in a lane until its time comes."""

    cut: Cut
    lane: Lane
    started: float
    seconds: float
    number: int  # the recorder's


POSTPONED = 5_000  # looks in a row at which the strategy put the cut off once more: it never will


Left = Callable[[Request, float, bool], None]


class Replica:
    """`schedule(when, replica, batch)` is called for what will end, and without a batch for a time to look again.

    `service_s` draws the seconds of a batch of so many rows, and `fails` whether one fails; `turn_s` is what the engine
    itself needs for a batch of so many requests: they are answered, and the lane is free, so much later. `left`, if
    there is one, is called with each request that is settled, the time, and whether it was let in at all.
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
        schedule: Callable[[float, Replica, Batch | None], None],
        left: Left | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        self.strategy, self.limits = strategy, limits
        self.queue, self.tally = Queue(), Tally()
        self.outstanding = 0  # rows that wait or are being served
        self.woken = False  # there is something to dispatch
        self.lanes = lanes
        self._admission = Admission(limits, max_queue_rows)
        self._free = list(reversed(lanes))
        self._early = Snapshot()  # of the lanes, when counting began
        self._service_s, self._fails, self._turn_s, self._schedule = service_s, fails, turn_s, schedule
        self._left = left
        self._recorder = recorder
        self._alarm_at = math.inf
        self.has_cut = False  # ever
        self._rung = False  # why it looks: the time that the strategy named has come
        self._postponed = 0  # such looks since the last cut, with every lane free

    # What happens to it

    def arrive(self, ask: Offer, now: float) -> None:
        request = Request(None, ask.rows, now, ask.priority, now + ask.timeout, ask.group, ask.client)
        if self._recorder is not None:
            self._recorder.arrived(request)
        refusal = self._admission.refuse(ask.rows, ask.timeout, self.queue.rows)
        if refusal is not None and not self._others_go(request, refusal, now):
            self._tell(request, "expired" if isinstance(refusal, Expired) else "rejected", now, queued=False)
            return
        self.queue.add(request)
        self.outstanding += ask.rows
        if ask.timeout < math.inf:
            self._ring_at(request.deadline)
        if self._free:
            self.woken = True

    def ring(self, now: float) -> None:
        """The time to look again has come, unless an earlier one took its place."""
        if now == self._alarm_at:
            self._alarm_at = math.inf
            self.woken = self._rung = True

    def uncut(self) -> StrategyError:
        """The error of a strategy that lets requests wait for ever."""
        waiting = "1 row waits" if self.queue.rows == 1 else f"{self.queue.rows:,} rows wait"
        return blamed(self.strategy, f"it does not cut, though {waiting} and nothing else will happen")

    def end(self, batch: Batch, now: float) -> None:
        """A batch has been answered, or has failed."""
        cut, lane, started, seconds, number = batch
        lane.enter("reply")
        outcome = "failed" if self._fails() else "ok"
        if outcome == "ok":
            if self._recorder is not None:
                self._recorder.ran(number, seconds, now)
            self._answer(cut, now)
            self.tally.ran(cut.rows, seconds)
            waited = started - min(request.arrived for request in cut.requests)
            with blame.calling(self.strategy, "observe"):
                self.strategy.observe(BatchRecord(cut.rows, len(cut.requests), started, seconds, waited, cut.reason))
        else:
            for request in cut.requests:
                self._settle(request, outcome, now)
        lane.enter("idle")
        self._free.append(lane)
        self.woken = True

    def dispatch(self, now: float, *, draining: bool = False) -> None:
        """Expire what is late, cut while there is room and a batch is due, and ask to be called again in time."""
        self.woken = False
        if not self.queue.rows:
            return
        for request in self.queue.expire(now):
            self._settle(request, "expired", now)
        when = min(self._cut_what_is_due(now, draining), self.queue.next_deadline())
        if when < math.inf:
            self._ring_at(when)

    # What it has counted

    def count_from_here(self) -> None:
        """Forget what has been counted so far; what is under way counts when it ends."""
        self.tally = Tally()
        self._early = Snapshot(lanes=tuple(lane.to_wire() for lane in self.lanes))

    def snapshot(self) -> Snapshot:
        return since(self.tally.snapshot(self.queue.rows, self.lanes, notices_of(self.strategy)), self._early)

    # How

    def _cut_what_is_due(self, now: float, draining: bool) -> float:
        while self._free:
            step = next_cut(self.strategy, self.queue, now, self._room(), draining=draining)
            if isinstance(step, Cut):
                self._launch(step, now)
            elif isinstance(step, Fault):
                raise step.error
            else:
                self._put_off()
                return step
        return math.inf

    def _put_off(self) -> None:
        """The strategy waits for later. Raises `StrategyError` when it does so again and again, and for nothing."""
        self._postponed += self._rung and len(self._free) == len(self.lanes)
        self._rung = False
        if self._postponed > POSTPONED + len(self.queue.clients):  # each of which it may have waited for
            raise self.uncut()

    def _room(self) -> Limits:
        if self.limits.slots is None:
            return self.limits
        taken = self.outstanding - self.queue.rows
        return replace(self.limits, max_rows=min(self.limits.max_rows, self.limits.slots - taken))

    def _launch(self, cut: Cut, now: float) -> None:
        self.tally.cut(cut, now)
        self._postponed, self._rung, self.has_cut = 0, False, True
        number = self._recorder.cut(cut.requests, cut.rows, cut.reason, now) if self._recorder is not None else 0
        lane = self._free.pop()
        lane.enter("forward")
        seconds = self._service_s(cut.rows, now)
        self._schedule(now + seconds + self._turn_s(len(cut.requests)), self, Batch(cut, lane, now, seconds, number))

    def _answer(self, cut: Cut, now: float) -> None:
        answered, counted, left, recorder = self.queue.clients.answered, self.tally.answered, self._left, self._recorder
        for request in cut.requests:
            answered(request.client, now)
            counted(request, now)
            if recorder is not None:
                recorder.settled(request, "ok", now)
            if left is not None:
                left(request, now, True)
        self.outstanding -= cut.rows

    def _others_go(self, request: Request, refusal: RequestError, now: float) -> bool:
        """Whether the strategy turns others away for a request that finds the queue full."""
        if not isinstance(refusal, QueueFull):
            return False
        shed = make_room(self.strategy, self.queue, request, self.limits, refusal, self._admission.bound)
        if isinstance(shed.refusal, StrategyError):
            raise shed.refusal
        for other, _ in shed.turned_away:
            self._settle(other, "rejected", now)
        return shed.refusal is None

    def _settle(self, request: Request, outcome: str, now: float) -> None:
        """A request that was queued ends without an answer."""
        self.queue.clients.answered(request.client, now)
        self.outstanding -= request.rows
        self._tell(request, outcome, now, queued=True)

    def _tell(self, request: Request, outcome: str, now: float, *, queued: bool) -> None:
        self.tally.error(outcome, request.priority)
        if self._recorder is not None:
            self._recorder.settled(request, outcome, now)
        if self._left is not None:
            self._left(request, now, queued)

    def _ring_at(self, when: float) -> None:
        if when < self._alarm_at:
            self._alarm_at = when
            self._schedule(when, self, None)
