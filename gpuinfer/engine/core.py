"""The one queue core: what becomes of each request and each batch, decided without a clock and without I/O.

Three drivers stand on it: the event loop (`engine.engine`), the threads of the central server (`central.row_server`)
and the virtual clock (`lab.simulate`). A driver reports what has happened, and when; the core decides, counts, records,
and lets the strategy learn. Nothing else asks the strategy or writes to the counters and the trace.

The life of a request: `arrive`. Then it waits, until `decide` names it in a `Cut` or as one to turn away, or the driver
calls `withdraw`. In each case it ends with one `settled`, whose outcome the driver knows best: only the driver can tell
whether the client is still there. The life of a batch: `decide`, `launch`, and `ended` once the backend has answered.

Queue wait ends at the cut, latency at the `settled` of the request; `docs/decisions/core.md` has the reasons.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from gpuinfer.api import BatchRecord, Limits, Reason, Request, Strategy
from gpuinfer.config.blame import WarnOnce
from gpuinfer.engine.counters import Tally
from gpuinfer.engine.queue import Queue
from gpuinfer.engine.scheduler import Cut, Fault, QueueBounds, Shed, make_room, next_cut, notices_of
from gpuinfer.engine.watchdog import Held, Patience
from gpuinfer.errors import Expired, QueueFull
from gpuinfer.stats import Lane, Snapshot


class Journal(Protocol):
    """Records all that happens, as `trace_recorder.Recorder` does, or a test. No method raises."""

    def arrived(self, request: Request) -> None: ...
    def cut(self, requests: Sequence[Request], rows: int, reason: Reason, now: float) -> int: ...
    def ran(self, batch: int, seconds: float, now: float) -> None: ...
    def settled(self, request: Request, outcome: str, now: float) -> None: ...


@dataclass(frozen=True, slots=True)
class Late:
    """Requests whose deadlines have passed while they waited, taken out of the queue."""

    requests: Sequence[Request]
    now: float

    def error_of(self, request: Request) -> Expired:
        waited = f"its deadline passed after {self.now - request.arrived:.3f} s in the queue"
        return Expired(f"{waited}. Allow more time, or keep fewer requests outstanding.")


Decision = Cut | Fault | Late | float
"""A batch to launch, requests to turn away, or the time when to ask again: inf when only an event can tell more."""


class Batch:
    """A cut that is with the backend."""

    __slots__ = ("entry", "number", "reason", "requests", "rows", "waited_s")

    def __init__(self, cut: Cut, number: int, entry: int, now: float) -> None:
        self.requests, self.rows, self.reason = cut.requests, cut.rows, cut.reason
        self.number = number  # counted from 1
        self.entry = entry  # by which the journal knows it
        self.waited_s = now - min([request.arrived for request in cut.requests])


class Core:
    """The queue of one backend. Not thread-safe: one thread, or one lock, at a time.

    `warn` may be shared by cores whose strategies are alike, so that an error is logged once for all.
    """

    def __init__(self, strategy: Strategy, journal: Journal | None = None, warn: WarnOnce | None = None) -> None:
        self.strategy = strategy
        self.queue = Queue()
        self.rows = 0  # of all requests that wait or are being served
        self.batches = 0  # launched so far
        self.moved = 0  # requests settled, and steps reported
        self.limits: Limits  # since `open`
        self._tally = Tally()
        self._journal = journal
        self._warn = warn or WarnOnce()
        self._stepped = False
        self._put_off = False  # by the strategy, at the last `decide`

    def open(self, limits: Limits, max_queue_rows: int | None = None, *, stepped: bool = False) -> None:
        """What the backend can take. Before it no request may arrive; clients may join. Raises `UsageError`.

        `stepped` says that the backend tells its own steps (`BackendContext.stepped`): those are the run's batches
        then, and not what is admitted at once.
        """
        self._bounds = QueueBounds(limits, max_queue_rows)
        self.limits, self._stepped = limits, stepped

    # Requests

    def arrive(self, request: Request) -> Shed | None:
        """A request has come, at `request.arrived`. None: it waits; else what its coming has led to.

        Those that are turned away for it are for the driver to settle; it itself, if there is no room, is not.
        Raises `TypeError` for a group or client that cannot be hashed: then nothing has been done.
        """
        if self._journal is not None:
            self._journal.arrived(request)
        rows, queue, bounds, shed = request.rows, self.queue, self._bounds, None
        fits = 1 <= rows <= bounds.widest and queue.rows + rows <= bounds.rows
        if not (fits and request.deadline > request.arrived):  # a NaN is no time either
            shed = self._turn_away(request)
            if shed.refusal is not None:
                return shed
        queue.add(request)
        self.rows += rows
        return shed

    def _turn_away(self, request: Request) -> Shed:
        """Those that give way to a request that cannot enter otherwise, or it itself, which is counted here."""
        refusal = self._bounds.refusal(request, self.queue.rows)
        shed = Shed(refusal=refusal)
        if isinstance(refusal, QueueFull):
            shed = make_room(self.strategy, self.queue, request, self.limits, refusal, self._bounds.rows)
        if shed.refusal is not None:
            outcome = "expired" if isinstance(shed.refusal, Expired) else "rejected"
            self._tally.error(outcome, request.priority)
            if self._journal is not None:
                self._journal.settled(request, outcome, request.arrived)
        return shed

    def withdraw(self, request: Request) -> bool:
        """Take it out of the queue; False when it does not wait there. The driver settles it."""
        if request not in self.queue:
            return False
        self.queue.remove((request,))
        return True

    def settled(self, request: Request, outcome: str, now: float, detail: object = "") -> None:
        """A request that was let in has ended: "ok", or as one of `stats.ERRORS`; `detail` is the result or error."""
        self.rows -= request.rows
        self.moved += 1
        self.queue.clients.answered(request.client, now)
        if outcome == "ok":
            self._tally.answered(request, now, detail)
        else:
            self._tally.error(outcome, request.priority, detail)
        if self._journal is not None:
            self._journal.settled(request, outcome, now)

    def answered(self, batch: Batch, now: float) -> None:
        """All requests of a batch have their results: the same as as many `settled`, and quicker."""
        answered, counted, journal = self.queue.clients.answered, self._tally.answered, self._journal
        for request in batch.requests:
            answered(request.client, now)
            counted(request, now)
            if journal is not None:
                journal.settled(request, "ok", now)
        self.rows -= batch.rows
        self.moved += len(batch.requests)

    def retried(self, requests: Sequence[Request]) -> None:
        """These are served a second time, each alone, as their batch failed."""
        for request in requests:
            self._tally.error("retried", request.priority)

    # Batches

    def decide(self, now: float, lanes: int, *, draining: bool = False) -> Decision:
        """What is to be done now that so many lanes are free. Ask again until it is a time.

        While draining whatever waits is due, whatever the strategy says.
        """
        if (deadline := self.queue.next_deadline()) <= now:
            return Late(self.queue.expire(now), now)
        if not lanes or not (room := self._room()).max_rows:
            return deadline
        step = next_cut(self.strategy, self.queue, now, room, draining=draining)
        self._put_off = isinstance(step, float)
        return min(step, deadline) if isinstance(step, float) else step

    def _room(self) -> Limits:
        """The limits of the next batch: narrower than the backend's while its slots are taken."""
        if self.limits.slots is None:
            return self.limits
        taken = self.rows - self.queue.rows
        if not taken and self.limits.slots < self.limits.max_rows:  # there are fewer than there were: one may need more
            return replace(self.limits, max_rows=max(self.limits.slots, self.queue.widest))
        return replace(self.limits, max_rows=max(0, min(self.limits.max_rows, self.limits.slots - taken)))

    def resize(self, slots: int) -> None:
        """A backend with slots has so many from now on."""
        self.limits = replace(self.limits, slots=slots)

    def launch(self, cut: Cut, now: float) -> Batch:
        """The backend gets this batch, at the time of the cut."""
        self.batches += 1
        self._tally.cut(cut, now, a_batch=not self._stepped)
        journal = self._journal
        entry = 0 if journal is None else journal.cut(cut.requests, cut.rows, cut.reason, now)
        return Batch(cut, self.batches, entry, now)

    def ended(self, batch: Batch, started: float, seconds: float, now: float) -> None:
        """The backend, which had it for so many seconds from `started`, has answered a batch: after its `settled`.

        Not for one that failed as a whole or was served again in pieces: its time says nothing of its size.
        """
        if not self._stepped:
            self._tally.ran(batch.rows, seconds)
        if self._journal is not None:
            self._journal.ran(batch.entry, seconds, now)
        record = BatchRecord(batch.rows, len(batch.requests), started, seconds, batch.waited_s, batch.reason)
        try:
            self.strategy.observe(record)
        except Exception as error:  # noqa: BLE001 (a plugin may raise anything, and nothing depends on this)
            self._warn(self.strategy, "observe", error)

    def lose_lane(self) -> None:
        """One batch in flight less from now on: the device of a lane is gone."""
        self.limits = replace(self.limits, in_flight=max(1, self.limits.in_flight - 1))

    def stepped(self, rows: int, seconds: float) -> None:
        """A backend with slots has made one step of so many rows."""
        self.moved += 1
        self._tally.stepped(rows, seconds)

    # Clients

    def join(self, client: Hashable, now: float) -> None:
        """Count this client as live: a strategy may wait for it."""
        self.queue.clients.join(client, now)

    def leave(self, client: Hashable) -> None:
        """Wait no longer for this client. Its outstanding requests stay."""
        self.queue.clients.leave(client)

    # What there is to see

    @property
    def waits_for_nothing(self) -> bool:
        """Whether the strategy lets requests wait although nothing is being served."""
        return self._put_off and 0 < self.queue.rows == self.rows

    @property
    def uncut(self) -> str:
        """What a strategy does that lets them wait."""
        waiting = self.queue.clients.outstanding
        return f"does not cut: {'1 request waits' if waiting == 1 else f'{waiting:,} requests wait'}"

    def held(self, patience: Patience) -> Iterator[Held]:
        """What the strategy has in hand. Any thread may ask."""
        if self.waits_for_nothing:
            yield Held(("cut", self.batches), self.strategy, f"{self.uncut}, for {{age}} now", patience.strategy_s)

    def snapshot(self, lanes: Sequence[Lane]) -> Snapshot:
        slots = self.limits.slots if self._stepped else None
        return self._tally.snapshot(self.queue.rows, lanes, notices_of(self.strategy), slots or 0)

    def count_anew(self) -> None:
        """Forget what has been counted so far. What is under way counts when it ends."""
        self._tally = Tally()


def outcome_of(error: BaseException) -> str:
    """As which of `stats.ERRORS` a request counts that was let in and ends with this error."""
    if isinstance(error, QueueFull):
        return "rejected"
    return "expired" if isinstance(error, Expired) else "failed"
