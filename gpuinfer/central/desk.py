"""The forward threads of a server: one that is free takes requests in, cuts a batch and runs it.

One free thread leads: it watches the lines, and asks the strategy. When a batch is due it hands the lead to the next
free thread and runs the batch itself, so that a request passes from the line through the model and back without a hop
between threads (leader/followers: Schmidt, O'Ryan, Kircher, Pyarali, Buschmann 2000). While all threads compute none
reads, and what arrives makes the next batch. A batch that takes less than handing the lead over is run before.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator

from gpuinfer.api import Limits, Strategy, forward_lane
from gpuinfer.central.caller import Caller
from gpuinfer.central.lines import ClientLines, Ready
from gpuinfer.central.memory import BlockForm
from gpuinfer.central.row_queue import RowQueue
from gpuinfer.central.serving import Answerer
from gpuinfer.central.wire import Kind, Record, pack
from gpuinfer.engine.core import Batch, Journal
from gpuinfer.engine.lanes import Pace, forward_lanes
from gpuinfer.engine.watchdog import Held, Patience
from gpuinfer.errors import BackendDied, Closed, GpuinferError, WorkError
from gpuinfer.host import spoken
from gpuinfer.stats import Lane, Snapshot

SPIN_S = 100e-6  # waking up costs as much, and what runs next runs slower
HAND_OVER_S = 300e-6  # what waking another thread costs both, and more
ACCOUNTS = 50  # milliseconds at most that a snapshot waits for what is being counted


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
        max_queue_rows: int | None = None,
        recorder: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`pulse` is the descriptor of the pulse's memory, which every client gets. `recorder` writes all down, and is
        closed by its maker.
        """
        self.limits = limits
        self.lanes = forward_lanes(limits, clock)
        self.started_at: dict[Lane, float] = {}  # of the batch that runs in a lane
        self._owing: set[Lane] = set()  # lanes whose last batch has been answered and not yet been counted
        self.fault: WorkError | None = None  # why it cannot go on
        self._answerer = answerer
        self._clock = clock
        welcome = pack(Record(Kind.WELCOME, body={"form": form.to_wire(), "max_rows": limits.max_rows}))
        self._lines = ClientLines(listener, token, most_clients, (welcome, pulse), answerer.pin)
        self._queue = RowQueue(form, limits, max_queue_rows, strategy, self._lines.send, recorder, clock)
        self._lead = threading.Lock()  # of the thread that watches the lines
        self._state = threading.Lock()  # queue and callers; held for moments
        self._pace = Pace()
        self._spin_pays = True
        self._closing = False
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
        """What the strategy has in hand: forwards that do not end are seen by `busy_s`."""
        return self._queue.held(patience)

    def dismiss_all(self, error: GpuinferError) -> None:
        """Tell every client why it is served no more."""
        with self._state:
            for caller in self._lines.callers.values():
                caller.dismiss(error)

    def snapshot(self) -> Snapshot:
        """The counters of this moment: a client that has its answer finds it counted."""
        for _ in range(ACCOUNTS):
            if not self._owing:
                break
            time.sleep(0.001)
        with self._state:
            return self._queue.snapshot(self.lanes)

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
            if lane.retired:  # its device is gone: the others go on
                with self._state:
                    self._queue.lose_lane()
        except BaseException as error:  # a server with a lane less would go on, and some would wait for ever
            self.fault = BackendDied(
                f"the central server failed: {spoken.in_full(error)}. Start it again, and report this."
            )
            raise

    def _take_turns(self, lane: Lane) -> None:
        while not lane.retired:
            with self._lead:
                while (batch := self._next(lane)) is not None and self._pace.seconds(batch.rows) < HAND_OVER_S:
                    self._serve(batch, lane)
                    if lane.retired:
                        return
            if batch is None:
                return
            self._serve(batch, lane)

    def _next(self, lane: Lane) -> Batch | None:
        """Lead until a batch is due; None when the desk closes."""
        lane.enter("queue")
        ready = self._lines.look()  # what has come while no thread watched
        while not self._closing:
            if ready or self._lines.due:
                with self._state:
                    self._lines.take_in(ready, self._on_record, self._queue.forget)
            with self._state:
                due = self._queue.next_batch(self._clock())
            if isinstance(due, Batch):
                return due
            lane.enter("idle")
            ready = self._wait(due - self._clock())
            lane.enter("queue")
        return None

    def _on_record(self, caller: Caller, record: Record) -> None:
        if self._queue.take(caller, record):
            self._spin_pays = True

    def _wait(self, seconds: float) -> Ready:
        """What is ready on the lines, after that long at most. Spins a little first, as long as that pays."""
        if self._spin_pays and not self.started_at:  # a thread that computes would have to share the interpreter
            until = self._clock() + min(SPIN_S, seconds)
            while self._clock() < until:
                if ready := self._lines.look():
                    return ready
            self._spin_pays = False
        return self._lines.wait(seconds)

    # Serving

    def _serve(self, batch: Batch, lane: Lane) -> None:
        """Run a batch and answer it. What must be counted is counted when the answers are on their way."""
        started = self.started_at[lane] = self._clock()
        lane.enter("forward")
        served = self._answerer.answer([request.payload for request in batch.requests])
        if (died := next((error for error in served.errors if isinstance(error, BackendDied)), None)) is not None:
            self.fault = self.fault or died  # its last device is gone
        ended = self._clock()
        lane.enter("reply")
        answers = self._queue.answers(batch, served)
        del self.started_at[lane]
        self._owing.add(lane)
        last, parts = answers.popitem()
        for caller, earlier in answers.items():
            self._lines.send(caller, b"".join(earlier))
        lane.enter("idle")  # a client that is answered may well take this core, and a single one certainly does
        self._lines.send(last, b"".join(parts))
        lane.enter("reply")
        with self._state:
            self._queue.settle(batch, served, started, ended)
            self._pace.took(batch.rows, ended - started)
        self._owing.discard(lane)
        lane.enter("idle")
