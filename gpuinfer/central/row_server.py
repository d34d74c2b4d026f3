"""The server of rows: its queue, its forward threads, and one batch through the model.

One free thread leads: it watches the lines and asks the strategy; when a batch is due it hands the lead to the next
free thread and runs the batch itself, so that a request passes from the line through the model and back without a hop
between threads (leader/followers: Schmidt, O'Ryan, Kircher, Pyarali, Buschmann 2000). While all threads compute none
reads, and what arrives makes the next batch. A batch that takes less than handing the lead over is run before.
"""

from __future__ import annotations

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from gpuinfer.api import Limits, Request, Result, Strategy, forward_lane
from gpuinfer.central.blocks import Block, BlockForm
from gpuinfer.central.client_sessions import ClientAcceptor, ClientSession, Ready
from gpuinfer.central.protocol import GarbledRecord, RecordKind, WireRecord, failed_record, group_of, pack_record
from gpuinfer.engine.core import Batch, Core, Journal, outcome_of
from gpuinfer.engine.lanes import BatchPace, forward_lanes
from gpuinfer.engine.results import find_fault
from gpuinfer.engine.scheduler import Cut
from gpuinfer.engine.watchdog import Held, Patience
from gpuinfer.errors import BackendDied, BackendError, BadResult, Closed, DeviceLost, GpuinferError, WorkError
from gpuinfer.host import error_text
from gpuinfer.models.row_format import AnswerLayout
from gpuinfer.stats import Lane, Snapshot

if TYPE_CHECKING:
    from gpuinfer.models.open_model import Opened


class RequestRows(Protocol):
    """The first `rows` rows of a block."""

    block: Block
    rows: int


class ServedBatch(NamedTuple):
    """What came of one batch."""

    errors: Sequence[GpuinferError | None]  # what went wrong with each request, if anything
    again: bool = False  # each request was run a second time, alone
    whole: bool = True  # the model answered the batch at once: its time is that of so many rows


class BatchRunner:
    """The model of one server. As many threads as it allows forwards may call `answer` at once."""

    def __init__(self, opened: Opened) -> None:
        self.pin = opened.pin
        self._checked = opened.spec.layout is not None  # the forward itself checks answers, where that is wanted
        self._opened, self._layout = opened, opened.answer

    @property
    def opened(self) -> Opened:
        """The model that answers the next batch."""
        return self._opened

    def take_over(self, opened: Opened) -> None:
        """Have this model, which is the same with other weights, answer what comes; batches under way are finished by
        the one before.
        """
        self._opened = opened

    def device(self) -> Mapping[str, Any]:
        return self._opened.device()

    def answer(self, batch: Sequence[RequestRows]) -> ServedBatch:
        """Write each answer beside its rows.

        A batch that the model raises on is run again one by one: the request with the row that it cannot take fails
        alone.
        """
        opened = self._opened  # read once: another may take its place meanwhile
        try:
            # a client that is gone is answered like the others: its memory stays where it is until the batch is over,
            # and no line of the same client has it before (`ClientAcceptor`)
            blocks = [ask.block.rows[: ask.rows] for ask in batch]
            if opened.write is not None:
                sound = opened.write(blocks, [[part[: ask.rows] for part in ask.block.answers] for ask in batch])
                errors = [
                    None if fine else self._fault(ask, ask.block.answer(ask.rows, copied=False))
                    for ask, fine in zip(batch, sound, strict=True)
                ]
                return ServedBatch(errors)
            results = opened.forward(blocks)
            first = next((one for one in results if not isinstance(one, GpuinferError)), None)
            # else one odd row has made all answers odd
            if len(batch) == 1 or first is None or not unlike(first, self._layout):
                return ServedBatch([self._keep(ask, result) for ask, result in zip(batch, results, strict=True)])
        except BaseException as error:  # noqa: BLE001 (a model may raise anything, and even leave)
            if isinstance(error, BackendDied | DeviceLost):  # whatever comes next meets the same, or another device
                return ServedBatch([error] * len(batch), whole=False)
            if len(batch) == 1:
                failed = "this row" if self._checked and batch[0].rows == 1 else "the requests of this block"
                what = f"the model raised {error_text.full_message(error)}. Only {failed} failed; "
                own = (
                    error
                    if isinstance(error, GpuinferError)
                    else BackendError(
                        f"{what}look at {'it' if failed == 'this row' else 'their rows'}, or at the model."
                    )
                )
                return ServedBatch([own], whole=False)
        return ServedBatch([self.answer([ask]).errors[0] for ask in batch], again=True, whole=False)

    def _keep(self, ask: RequestRows, result: Result) -> GpuinferError | None:
        """Copy one answer into its block, if it is one."""
        if isinstance(result, GpuinferError):
            return result
        arrays = block_parts(result)
        shapes = [(ask.rows, *shape) for shape in self._layout.shapes]
        sound = self._layout.kind != "dict" and [array.shape for array in arrays] == shapes and not self._checked
        sound = sound and all(array.size and array.max() < math.inf for array in arrays)  # a NaN wins every max
        if not sound and (error := self._fault(ask, result)) is not None:  # the quick check nearly always passes
            return error
        for room, array in zip(ask.block.answers, arrays, strict=True):
            room[: ask.rows] = array
        return None

    def _fault(self, ask: RequestRows, result: Result) -> GpuinferError | None:
        fault = (None if self._checked else find_fault(result, ask.rows)) or unlike(result, self._layout)
        if fault is None:
            return None
        rows = ask.block.rows[: ask.rows]
        if rows.dtype.kind == "f" and np.isnan(rows.max()):
            return BackendError("the rows hold NaN, and so does the answer. Check where the rows come from.")
        return BadResult(f"the model answered badly: {fault}")


def block_parts(result: Result) -> Sequence[NDArray[Any]]:
    """The arrays of an answer, in order."""
    if isinstance(result, tuple | list):
        return result
    return list(result.values()) if isinstance(result, Mapping) else [result]


def unlike(result: Result, layout: AnswerLayout) -> str | None:
    """What differs from the answers that were agreed on."""
    shapes = tuple(part.shape[1:] for part in block_parts(result))
    names = tuple(result) if isinstance(result, Mapping) else ()
    if shapes == layout.shapes and names != layout.names:
        return f"the names {list(names)} where {list(layout.names)} were agreed. Let the model always answer alike."
    dtypes = tuple(str(part.dtype) for part in block_parts(result)) if layout.dtypes else ()
    if dtypes != layout.dtypes:
        return f"{list(dtypes)} where {list(layout.dtypes)} were agreed. Let the model always answer alike."
    if shapes == layout.shapes:
        return None
    return f"shapes {list(shapes)} a row where {list(layout.shapes)} were agreed. Let the model always answer alike."


Send = Callable[[ClientSession, bytes], None]


class BlockRows:
    """The payload of a request: the first rows of a session's block."""

    __slots__ = ("block", "number", "rows", "session")

    def __init__(self, session: ClientSession, number: int, block: Block, rows: int) -> None:
        self.session, self.number, self.block, self.rows = session, number, block, rows


class RowQueue:
    """The requests of all clients of one server, from the time they are taken in until they are settled."""

    def __init__(
        self,
        form: BlockForm,
        limits: Limits,
        max_queue_rows: int | None,
        strategy: Strategy,
        send: Send,
        recorder: Journal | None,
        clock: Callable[[], float],
    ) -> None:
        self.core = Core(strategy, recorder)
        self.core.open(limits, max_queue_rows)
        self._form, self._limits, self._send, self._clock = form, limits, send, clock
        self._waiting: dict[tuple[int, int], Request] = {}  # by session and number, until they are cut

    # From clients

    def take(self, session: ClientSession, record: WireRecord) -> bool:
        """Do what a record says; whether it has brought a request into the queue. Raises `Garbled` for nonsense."""
        if record.kind == RecordKind.BLOCK:
            session.attach(record, self._form, self._limits.max_rows)
        elif record.kind == RecordKind.CANCEL:  # the client drops the answer to a request that is in a batch
            if (request := self._waiting.get((session.number, record.number))) is not None:
                self.core.withdraw(request)
                self._fail(request, Closed("this request was cancelled."), "cancelled")
        elif record.kind != RecordKind.ASK:
            raise GarbledRecord(f"a record of kind {record.kind}")
        if record.kind != RecordKind.ASK:
            return False
        block = session.blocks.get(record.block)
        if block is None or not 1 <= record.rows <= block.room or math.isnan(record.left_s):
            raise GarbledRecord("a request for rows that are not there")
        if record.block in session.asked or (session.number, record.number) in self._waiting:
            raise GarbledRecord("a second request before the first is answered")
        now = self._clock()
        group = group_of(record.body.get("group")) if isinstance(record.body, dict) else None
        client, payload = record.client_name(session.number), BlockRows(session, record.number, block, record.rows)
        request = Request(payload, record.rows, now, record.priority_class, now + record.left_s, group, client)
        if (shed := self.core.arrive(request)) is not None:
            for other, error in shed.turned_away:
                self._fail(other, error, outcome_of(error))
            if shed.refusal is not None:
                self._send(session, failed_record(record.number, shed.refusal))
                return False
        self._waiting[session.number, record.number] = request
        session.asked.add(record.block)
        if client is not None and client not in session.names:
            session.names.add(client)
            self.core.join(client, now)
        return True

    def forget(self, session: ClientSession) -> None:
        """A client has gone: withdraw its requests that are not in a batch."""
        now = self._clock()
        for key, request in [item for item in self._waiting.items() if item[0][0] == session.number]:
            self.core.withdraw(request)
            self.core.settled(request, "cancelled", now)
            del self._waiting[key]
        for name in session.names:
            self.core.leave(name)

    def _fail(self, request: Request, error: GpuinferError, outcome: str) -> None:
        """Settle a request that has left the queue and was not cut."""
        asked: BlockRows = request.payload
        self._waiting.pop((asked.session.number, asked.number), None)
        asked.session.asked.discard(asked.block.number)
        self.core.settled(request, outcome, self._clock(), error)
        self._send(asked.session, failed_record(asked.number, error))

    # Batches

    def next_batch(self, now: float, lanes: int = 1) -> Batch | float:
        """The batch that is due when so many lanes are free, or when to look again."""
        while not isinstance(step := self.core.decide(now, lanes), float):
            if isinstance(step, Cut):
                for request in step.requests:
                    asked: BlockRows = request.payload
                    asked.session.serving += 1
                    del self._waiting[asked.session.number, asked.number]
                return self.core.launch(step, now)
            for request in step.requests:
                error = step.error_of(request)
                self._fail(request, error, outcome_of(error))
        return step

    @staticmethod
    def answers(batch: Batch, served: ServedBatch) -> dict[ClientSession, list[bytes]]:
        """The records to send, by session, whose client may use these blocks again from here on. Needs no lock."""
        answers: dict[ClientSession, list[bytes]] = {}
        for request, error in zip(batch.requests, served.errors, strict=True):
            asked: BlockRows = request.payload
            asked.session.asked.discard(asked.block.number)
            answer = (
                pack_record(WireRecord(RecordKind.ANSWER, number=asked.number))
                if error is None
                else failed_record(asked.number, error)
            )
            answers.setdefault(asked.session, []).append(answer)
        return answers

    def settle(self, batch: Batch, served: ServedBatch, started: float, ended: float) -> None:
        """Count a batch whose answers are on their way."""
        for request, error in zip(batch.requests, served.errors, strict=True):
            session: ClientSession = request.payload.session
            session.serving -= 1
            session.release()
            if error is None:
                self.core.settled(request, "ok", ended)
            else:
                self.core.settled(request, outcome_of(error), ended, error)
        if served.again:
            self.core.retried(batch.requests)
        if served.whole:
            self.core.ended(batch, started, ended - started, ended)


SPIN_S = 100e-6  # waking up costs as much, and what runs next runs slower
HAND_OVER_S = 300e-6  # what waking another thread costs both, and more
ACCOUNTS = 50  # milliseconds at most that a snapshot waits for what is being counted


class RowServer:
    """Serves the clients of one listening socket with `limits.in_flight` threads."""

    def __init__(
        self,
        answerer: BatchRunner,
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
        welcome = pack_record(
            WireRecord(RecordKind.WELCOME, body={"form": form.to_wire(), "max_rows": limits.max_rows})
        )
        self._lines = ClientAcceptor(listener, token, most_clients, (welcome, pulse), answerer.pin)
        self._queue = RowQueue(form, limits, max_queue_rows, strategy, self._lines.send, recorder, clock)
        self._lead = threading.Lock()  # of the thread that watches the lines
        self._state = threading.Lock()  # queue and sessions; held for moments
        self._pace = BatchPace()
        self._spin_pays = True
        self._closing = False
        self._threads = [
            threading.Thread(target=self._work, args=(lane,), name=lane.name, daemon=True) for lane in self.lanes
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self, patience_s: float) -> bool:
        """Accept nothing more, say goodbye to all clients, let batches end; whether they have."""
        self._closing = True
        self._lines.wake()
        until = time.monotonic() + patience_s
        for thread in self._threads:
            thread.join(max(0.0, until - time.monotonic()))
        self.dismiss_all(Closed("the server was closed before this request was answered. Ask another."))
        return not any(thread.is_alive() for thread in self._threads)

    def held(self, patience: Patience) -> Iterator[Held]:
        """Requests that the strategy holds back; `busy_s` tells of forwards that do not end."""
        return self._queue.core.held(patience)

    def dismiss_all(self, error: GpuinferError) -> None:
        """Tell every client why the server serves it no more."""
        with self._state:
            self._lines.dismiss_all(error)

    def snapshot(self) -> Snapshot:
        """The counters of this moment: a client that has its answer finds it counted."""
        for _ in range(ACCOUNTS):
            if not self._owing:
                break
            time.sleep(0.001)
        with self._state:
            return self._queue.core.snapshot(self.lanes)

    def busy_s(self) -> float:
        """How long the batch that has run longest has been running."""
        started = min(self.started_at.copy().values(), default=math.inf)
        return max(0.0, self._clock() - started)

    # Leading

    def _work(self, lane: Lane) -> None:
        forward_lane.set(lane)
        try:
            batch: Batch | None = None
            while not lane.retired:
                with self._lead:
                    while (batch := self._next(lane)) is not None and self._pace.seconds(batch.rows) < HAND_OVER_S:
                        self._serve(batch, lane)
                        if lane.retired:
                            batch = None
                            break
                if batch is None:
                    break
                self._serve(batch, lane)
            if lane.retired:  # its device is gone: the others go on
                with self._state:
                    self._queue.core.lose_lane()  # one batch in flight less from now on
        except BaseException as error:  # a server with a lane less would go on, and some would wait for ever
            self.fault = BackendDied(
                f"the central server failed: {error_text.full_message(error)}. Start it again, and report this."
            )
            raise

    def _next(self, lane: Lane) -> Batch | None:
        """Lead until a batch is due; None when the server closes."""

        def on_record(session: ClientSession, record: WireRecord) -> None:
            if self._queue.take(session, record):
                self._spin_pays = True

        lane.enter("queue")
        ready = self._lines.ready()  # what has come while no thread watched
        while not self._closing:
            if ready or self._lines.due:
                with self._state:
                    self._lines.take_in(ready, on_record, self._queue.forget)
            with self._state:
                due = self._queue.next_batch(self._clock())
            if isinstance(due, Batch):
                return due
            lane.enter("idle")
            ready = self._wait(due - self._clock())
            lane.enter("queue")
        return None

    def _wait(self, seconds: float) -> Ready:
        """What is ready on the lines, after that long at most. Spins a little first, as long as that pays."""
        if self._spin_pays and not self.started_at:  # a thread that computes would have to share the interpreter
            until = self._clock() + min(SPIN_S, seconds)
            while self._clock() < until:
                if ready := self._lines.ready():
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
        for session, earlier in answers.items():
            self._lines.send(session, b"".join(earlier))
        lane.enter("idle")  # a client that is answered may well take this core, and a single one certainly does
        self._lines.send(last, b"".join(parts))
        lane.enter("reply")
        with self._state:
            self._queue.settle(batch, served, started, ended)
            self._pace.took(batch.rows, ended - started)
        self._owing.discard(lane)
        lane.enter("idle")
