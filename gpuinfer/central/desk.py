"""The server's queue and its forward threads: whoever of them is free takes requests in, cuts a batch and runs it.

One free thread leads: it watches the lines, and asks the strategy. When a batch is due it hands the lead to the next
free thread and runs the batch itself, so that a request passes from the line through the model and back without a hop
between threads (leader/followers: Schmidt, O'Ryan, Kircher, Pyarali, Buschmann 2000). While all threads compute nobody
reads, and what arrives makes the next batch. A batch that takes less than handing the lead over is run before.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

from gpuinfer.api import BatchRecord, Limits, Priority, Request, Strategy, forward_lane
from gpuinfer.central.caller import Caller
from gpuinfer.central.lines import ClientLines, Ready
from gpuinfer.central.memory import Block, BlockForm
from gpuinfer.central.serving import Answerer
from gpuinfer.central.wire import NOBODY, Garbled, Kind, Record, error_to_wire, pack
from gpuinfer.config import blame
from gpuinfer.engine.admission import Admission, make_room
from gpuinfer.engine.cutting import Cut, Fault, next_cut, notices_of
from gpuinfer.engine.queue import Queue
from gpuinfer.engine.settling import kind_of
from gpuinfer.engine.tally import Tally
from gpuinfer.engine.watchdog import Held, Patience, uncut
from gpuinfer.errors import BackendDied, Closed, Expired, GpuinferError, QueueFull, WorkError
from gpuinfer.stats import Lane, Snapshot
from gpuinfer.trace.recorder import Recorder

SPIN_S = 100e-6  # waking up costs as much, and what runs next runs slower
NAMES = 1024  # of clients in one process that are told apart: they cost memory as long as it is connected
HAND_OVER_S = 300e-6  # what waking another thread costs both, and more
ACCOUNTS = 50  # milliseconds at most that a snapshot waits for what is being counted
PRIORITIES = tuple(Priority)


class Ask:
    """The payload of a request here: rows in a caller's block."""

    __slots__ = ("block", "caller", "number", "rows")

    def __init__(self, caller: Caller, number: int, block: Block, rows: int) -> None:
        self.caller, self.number, self.block, self.rows = caller, number, block, rows

    @property
    def wanted(self) -> bool:
        return not self.caller.gone


class Pace:
    """How long batches took lately, by size: within a factor of two of rows they are alike."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}

    def took(self, rows: int, seconds: float) -> None:
        size = rows.bit_length()
        self._seconds[size] = 0.75 * self._seconds.get(size, seconds) + 0.25 * seconds

    def seconds(self, rows: int) -> float:
        """What a batch of so many rows is expected to take; inf before the first."""
        return self._seconds.get(rows.bit_length(), math.inf)


class Desk:
    """Serves the clients of one listening socket with `limits.in_flight` threads."""

    def __init__(
        self,
        answerer: Answerer,
        form: BlockForm,
        limits: Limits,
        strategy: Strategy,
        listener: socket.socket,
        token: bytes,
        pulse: int,
        *,
        most_clients: int,
        recorder: Recorder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pulse` is the descriptor of the pulse's memory, which every client gets. `recorder` writes all down,
        and whoever made it closes it.
        """
        self.form, self.limits, self.strategy = form, limits, strategy
        self.lanes = [Lane(f"forward {number}", clock=clock) for number in range(limits.in_flight)]
        self.started_at: dict[Lane, float] = {}  # of the batch that runs in a lane
        self._owing: set[Lane] = set()  # lanes whose last batch has been answered and not yet been counted
        self.fault: WorkError | None = None  # why it cannot go on
        self._answerer = answerer
        self._recorder = recorder
        self._clock = clock
        welcome = pack(Record(Kind.WELCOME, body={"form": form.to_wire(), "max_rows": limits.max_rows}))
        self._lines = ClientLines(listener, token, most_clients, (welcome, pulse), answerer.pin)
        self._lead = threading.Lock()  # whoever watches the lines
        self._state = threading.Lock()  # queue, tally, strategy, callers; held for moments
        self._queue, self._tally = Queue(), Tally()
        self._admission = Admission(limits, None)
        self._waiting: dict[tuple[int, int], Request] = {}  # by caller and number, until they are cut
        self._numbers: dict[Cut, int] = {}  # by which the recorder knows the batches under way
        self._pace = Pace()
        self._spin_pays = True
        self._closing = False
        self._warned = False  # of a strategy that raises in observe
        self._put_off = False  # by the strategy, when it was last asked
        self._cuts = 0
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=lane.name, daemon=True) for lane in self.lanes
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, patience_s: float) -> bool:
        """Take nothing more, dismiss everybody, let batches end; whether they have."""
        self._closing = True
        self._lines.ring()
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.dismiss_all(Closed("the server was closed before this request was answered. Ask another."))
        return not any(thread.is_alive() for thread in self._threads)

    def held(self, patience: Patience) -> Iterator[Held]:
        """Whether the strategy lets requests wait for nobody: forwards that do not end are seen by `busy_s`."""
        if self._put_off and self._waiting and not self.started_at:
            yield uncut(self.strategy, self._cuts, len(self._waiting), patience)

    def dismiss_all(self, error: GpuinferError) -> None:
        """Tell every client why it is served no more."""
        with self._state:
            for caller in self._lines.callers.values():
                caller.dismiss(error)

    def snapshot(self) -> Snapshot:
        """The counters of this moment: whoever has its answer finds it counted."""
        for _ in range(ACCOUNTS):
            if not self._owing:
                break
            time.sleep(0.001)
        with self._state:
            return self._tally.snapshot(self._queue.rows, self.lanes, notices_of(self.strategy))

    def busy_s(self) -> float:
        """How long the batch that has run longest has been running."""
        started = min(self.started_at.copy().values(), default=math.inf)
        return max(0.0, self._clock() - started)

    # Leading

    def _work(self, lane: Lane) -> None:
        """The life of one forward thread."""
        forward_lane.set(lane)
        try:
            self._take_turns(lane)
        except BaseException as error:  # a server with a lane less would go on, and some would wait for ever
            self.fault = BackendDied(f"the central server failed: {error!r}. Start it again, and report this.")
            raise

    def _take_turns(self, lane: Lane) -> None:
        while True:
            with self._lead:
                while (cut := self._next(lane)) is not None and self._pace.seconds(cut.rows) < HAND_OVER_S:
                    self._serve(cut, lane)
            if cut is None:
                return
            self._serve(cut, lane)

    def _next(self, lane: Lane) -> Cut | None:
        """Lead until a batch is due; None when the desk closes."""
        lane.enter("queue")
        ready = self._lines.look()  # what has come while nobody watched
        while not self._closing:
            if ready or self._lines.overdue:
                with self._state:
                    self._lines.take_in(ready, self._on_record, self._forget)
            due = self._due()
            if isinstance(due, Cut):
                return due
            lane.enter("idle")
            ready = self._wait(due - self._clock())
            lane.enter("queue")
        return None

    def _due(self) -> Cut | float:
        """The next batch, or when to look again."""
        with self._state:
            now = self._clock()
            for request in self._queue.expire(now):
                waited = f"its deadline passed after {now - request.arrived:.3f} s in the queue"
                self._fail(request, Expired(f"{waited}. Allow more time, or keep fewer outstanding."))
            while True:
                step = next_cut(self.strategy, self._queue, now, self.limits, draining=False)
                if not isinstance(step, Fault):
                    break
                for request in step.requests:
                    self._fail(request, step.error)
            self._put_off = not isinstance(step, Cut)
            if not isinstance(step, Cut):
                return min(step, self._queue.next_deadline())
            self._cuts += 1
            self._tally.cut(step, now)
            if self._recorder is not None:
                self._numbers[step] = self._recorder.cut(step.requests, step.rows, step.reason, now)
            for request in step.requests:
                ask: Ask = request.payload
                ask.caller.serving += 1
                del self._waiting[ask.caller.number, ask.number]
            return step

    def _wait(self, seconds: float) -> Ready:
        """What is ready on the lines, after that long at most. Spins a little first, as long as that pays."""
        if self._spin_pays and not self.started_at:  # whoever computes would have to share the interpreter
            until = self._clock() + min(SPIN_S, seconds)
            while self._clock() < until:
                if ready := self._lines.look():
                    return ready
            self._spin_pays = False
        return self._lines.wait(seconds)

    # Taking requests in; all of this with `_state` held

    def _on_record(self, caller: Caller, record: Record) -> None:
        if record.kind == Kind.ASK:
            self._ask(caller, record)
        elif record.kind == Kind.BLOCK:
            caller.attach(record, self.form, self.limits.max_rows)
        elif record.kind == Kind.CANCEL:
            self._cancel(caller, record.number)
        else:
            raise Garbled(f"a record of kind {record.kind}")

    def _ask(self, caller: Caller, record: Record) -> None:
        block = caller.blocks.get(record.block)
        if block is None or not 1 <= record.rows <= block.room or math.isnan(record.left_s):
            raise Garbled("a request for rows that are not there")
        if record.block in caller.asked or (caller.number, record.number) in self._waiting:
            raise Garbled("a second request before the first is answered")
        now, rows = self._clock(), record.rows
        who = None if record.client == NOBODY else (caller.number, record.client % NAMES)
        group = _hashable(record.body.get("group")) if isinstance(record.body, dict) else None
        hash(group)  # raises for what cannot be one, before anything is done
        priority = PRIORITIES[min(record.priority, Priority.LOW)]
        request = Request(Ask(caller, record.number, block, rows), rows, now, priority, now + record.left_s, group, who)
        if self._recorder is not None:
            self._recorder.arrived(request)
        if refusal := self._refused(request, record.left_s):
            self._settled(request, "expired" if isinstance(refusal, Expired) else "rejected", now)
            self._lines.send(caller, _failed(record.number, refusal))
            return
        self._waiting[caller.number, record.number] = request
        caller.asked.add(record.block)
        if who is not None and who not in caller.names:
            caller.names.add(who)
            self._queue.clients.join(who, now)
        self._queue.add(request)
        self._spin_pays = True

    def _refused(self, request: Request, left_s: float) -> GpuinferError | None:
        """Why this request cannot enter; None when it can, if need be because others were turned away."""
        refusal = self._admission.refuse(request.rows, left_s, self._queue.rows)
        if not isinstance(refusal, QueueFull):
            return refusal
        shed = make_room(self.strategy, self._queue, request, self.limits, refusal, self._admission.bound)
        for other, error in shed.turned_away:
            self._fail(other, error)
        return shed.refusal

    def _cancel(self, caller: Caller, number: int) -> None:
        """Take a request that waits out of the queue; one that is being served is answered, and nobody cares."""
        request = self._waiting.get((caller.number, number))
        if request is not None:
            self._queue.remove((request,))
            self._fail(request, Closed("this request was cancelled."), "cancelled")

    def _fail(self, request: Request, error: GpuinferError, kind: str | None = None) -> None:
        """Settle a request that has left the queue and was not cut."""
        now = self._clock()
        ask: Ask = request.payload
        self._waiting.pop((ask.caller.number, ask.number), None)
        ask.caller.asked.discard(ask.block.number)
        self._settled(request, kind or kind_of(error), now)
        self._queue.clients.answered(request.client, now)
        self._lines.send(ask.caller, _failed(ask.number, error))

    def _forget(self, caller: Caller) -> None:
        """A client has gone; what it asked for and is not in a batch is nobody's any more."""
        now = self._clock()
        for key, request in [item for item in self._waiting.items() if item[0][0] == caller.number]:
            self._queue.remove((request,))
            self._queue.clients.answered(request.client, now)
            self._settled(request, "cancelled", now)
            del self._waiting[key]
        for who in caller.names:
            self._queue.clients.leave(who)

    # Serving

    def _serve(self, cut: Cut, lane: Lane) -> None:
        """Run a batch and answer it. What must be counted is counted when the answers are on their way."""
        started = self.started_at[lane] = self._clock()
        lane.enter("forward")
        outcomes, retried = self._answerer.answer([request.payload for request in cut.requests])
        ended = self._clock()
        lane.enter("reply")
        tokens = self._tokens(cut, outcomes)
        del self.started_at[lane]
        self._owing.add(lane)
        last, parts = tokens.popitem()
        for caller, earlier in tokens.items():
            self._lines.send(caller, b"".join(earlier))
        lane.enter("idle")  # whoever is answered may well take this core, and with a single client certainly does
        self._lines.send(last, b"".join(parts))
        lane.enter("reply")
        with self._state:
            self._account(cut, outcomes, retried, started, ended)
        self._owing.discard(lane)
        lane.enter("idle")

    def _tokens(self, cut: Cut, outcomes: Sequence[GpuinferError | None]) -> dict[Caller, list[bytes]]:
        """What is to be sent, by caller. From here on it may ask for the same blocks again."""
        tokens: dict[Caller, list[bytes]] = {}
        for request, error in zip(cut.requests, outcomes, strict=True):
            ask: Ask = request.payload
            ask.caller.asked.discard(ask.block.number)
            token = pack(Record(Kind.ANSWER, number=ask.number)) if error is None else _failed(ask.number, error)
            tokens.setdefault(ask.caller, []).append(token)
        return tokens

    def _account(
        self, cut: Cut, outcomes: Sequence[GpuinferError | None], retried: int, started: float, ended: float
    ) -> None:
        for request, error in zip(cut.requests, outcomes, strict=True):
            caller: Caller = request.payload.caller
            caller.serving -= 1
            caller.release()
            self._queue.clients.answered(request.client, ended)
            self._settled(request, "ok" if error is None else kind_of(error), ended)
        for request in cut.requests[:retried]:  # all of them, or none
            self._tally.error("retried", request.priority)
        self._tally.ran(cut.rows, ended - started)
        if self._recorder is not None:
            self._recorder.ran(self._numbers.pop(cut), ended - started, ended)
        self._pace.took(cut.rows, ended - started)
        waited = started - min(request.arrived for request in cut.requests)
        self._observe(BatchRecord(cut.rows, len(cut.requests), started, ended - started, waited, cut.reason))

    def _settled(self, request: Request, outcome: str, now: float) -> None:
        """Count what became of a request: "ok", or one of `stats.ERRORS`."""
        if outcome == "ok":
            self._tally.answered(request, now)
        else:
            self._tally.error(outcome, request.priority)
        if self._recorder is not None:
            self._recorder.settled(request, outcome, now)

    def _observe(self, record: BatchRecord) -> None:
        try:
            self.strategy.observe(record)
        except Exception as error:  # noqa: BLE001 (a plugin may raise anything)
            if not self._warned:
                self._warned = True
                blame.warn(self.strategy, "observe", error)


def _failed(number: int, error: GpuinferError) -> bytes:
    return pack(Record(Kind.FAILED, number=number, body=error_to_wire(error)))


def _hashable(value: Any) -> Hashable:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
