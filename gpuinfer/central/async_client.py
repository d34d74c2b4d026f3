"""An event loop's clients of a central server: of rows, of text, and the backend of text on top of them.

Prompts and answers of text travel in records themselves, and those that come together are sent in one piece: short ones
would cost a system call each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from numpy.typing import NDArray

from gpuinfer.api import Backend, BackendContext, Event, Limits, ModelKind, Request, Result, Setup
from gpuinfer.central.connection import LOOK_S, POOLED, CentralConnection, parting, refuse_group
from gpuinfer.central.protocol import (
    LARGEST_BEGUN,
    NOBODY,
    RecordKind,
    ServerAddress,
    WireRecord,
    generation_from_wire,
    pack_record,
    part_from_wire,
    request_to_wire,
)
from gpuinfer.errors import BackendDied, BackendError, Closed, GpuinferError, UsageError
from gpuinfer.generation import Part
from gpuinfer.host import shared_memory
from gpuinfer.host.child import HEARTBEAT_SIZE, HeartbeatWatch
from gpuinfer.host.error_text import error_from_wire
from gpuinfer.text.answer_frames import LARGEST_FRAME, LARGEST_PROMPT, DeliveredAnswer


class AsyncClient:
    """One loop's connection. Like `client.Client`, but waiting is awaiting."""

    def __init__(self, connection: CentralConnection) -> None:
        self._connection = connection
        self._waiting: dict[int, Any] = {}  # by the number of a request: the future of its answer
        self._numbers: dict[Request, int] = {}  # of those that wait
        self._clients: dict[Hashable, int] = {}  # numbers, for the wire
        self._room = asyncio.Semaphore(POOLED)
        self._up = asyncio.Event()  # cleared while the server comes back
        self._lost: GpuinferError | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(self._connection.open)
        self.limits = self._connection.limits
        self._loop.add_reader(self._connection.fileno(), self._read)
        self._up.set()
        self._keep(self._watch())

    def _keep(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)  # the loop itself holds tasks only weakly
        task.add_done_callback(self._tasks.discard)

    def block(self, rows: int) -> NDArray[Any]:
        return self._connection.block(rows)

    async def ask(self, request: Request) -> Result:
        """Send one request and await its answer. Raises as `CentralConnection.ask`, and the request's own error."""
        async with self._room:
            await self._up.wait()
            if self._lost is not None:
                raise self._lost
            number = self._send(request)
            future = self._waiting[number] = self._loop.create_future()
            try:
                return await future
            finally:
                del self._numbers[request]
                if self._waiting.pop(number, None) is not None:  # the awaiting task was cancelled
                    self._connection.abandon(number)

    def _send(self, request: Request) -> int:
        client = request.client
        who = NOBODY if client is None else self._clients.setdefault(client, len(self._clients))
        number = self._numbers[request] = self._connection.ask(request, who)
        return number

    def cancel(self, request: Request) -> None:
        """Cancel the request: `ask` raises `Closed`, and the server is told."""
        if (number := self._numbers.get(request)) is not None:
            self._settle(number, Closed("this request was cancelled."))
            self._connection.abandon(number)

    def _read(self) -> None:
        try:
            for number, outcome in self._connection.receive():
                self._settle(number, outcome)
        except GpuinferError as error:
            self._gone(error)

    def _settle(self, number: int, outcome: Any) -> None:
        future = self._waiting.pop(number, None)
        if future is None or future.done():
            return
        if isinstance(outcome, GpuinferError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    async def _watch(self) -> None:
        """Look at the server's heartbeat: a stopped server closes no connection."""
        while self._lost is None:
            await asyncio.sleep(LOOK_S)
            if self._up.is_set() and (error := self._connection.stopped()) is not None:
                self._gone(error)

    def _gone(self, error: GpuinferError) -> None:
        self._loop.remove_reader(self._connection.fileno())
        self._up.clear()
        self._keep(self._come_back(error))

    async def _come_back(self, error: GpuinferError) -> None:
        try:
            if not isinstance(error, BackendDied):
                raise error
            await asyncio.to_thread(self._connection.come_back, error)
            self._loop.add_reader(self._connection.fileno(), self._read)
            self._up.set()
        except GpuinferError as final:
            self._lose(final)
        except Exception as strange:  # noqa: BLE001 (whatever it is, no request may wait for ever)
            self._lose(BackendDied(f"the way to the central server is lost: {strange!r}. Start it again."))

    @property
    def lost(self) -> BackendDied | None:
        """Why there is no way back to the server; None while there is, and after `close`."""
        return self._lost if isinstance(self._lost, BackendDied) else None

    def _lose(self, error: GpuinferError) -> None:
        """The server does not come back: all requests, waiting and future, get this error."""
        self._lost = error
        for number in tuple(self._waiting):
            self._settle(number, error)
        self._up.set()

    async def close(self) -> None:
        self._lose(Closed("the backend was closed before this request was answered. Ask before you close it."))
        self._connection.give_up()
        for task in tuple(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=1.0)
        if self._connection.is_open:
            self._loop.remove_reader(self._connection.fileno())
        self._connection.close()


AHEAD = 3  # times as many rows with the server as it has slots: one that becomes free finds a row waiting there
LEAST_AHEAD = 64  # rows, where there are few slots and answers come faster than they travel


class SentPrompt(NamedTuple):
    """One request that has been sent: a server that comes back is sent it again."""

    body: bytes
    request: Request
    client: int
    had: DeliveredAnswer | None = None  # by a reader who reads along, where the server may come back

    def packed(self, number: int) -> bytes:
        left_s, one = self.request.deadline - time.monotonic(), self.request
        return pack_record(
            WireRecord(RecordKind.PROMPT, one.priority, 0, number, self.client, one.rows, left_s, self.body)
        )


class TextConnection(CentralConnection):
    """`soon` runs a function after the loop's present turn: requests made together are sent together."""

    largest_body = LARGEST_FRAME
    asked_for = "prompts"

    def __init__(
        self, address: ServerAddress, restarts_within_s: float, soon: Callable[[Callable[[], None]], object]
    ) -> None:
        super().__init__(address, restarts_within_s)
        self._sent: dict[int, SentPrompt] = {}
        self._outbox: list[bytes] = []
        self._soon = soon

    def _learn(self, told: Any, pulse: int) -> None:
        slots = told["slots"]
        self.limits = Limits(told["max_rows"], in_flight=slots, slots=max(LEAST_AHEAD, AHEAD * slots))
        self._pulse = HeartbeatWatch(shared_memory.attach(pulse, HEARTBEAT_SIZE))

    def ask(self, request: Request, client: int) -> int:
        """Send a prompt soon; returns its number. Raises `BadPrompt` for one that cannot travel, `Closed`."""
        if self._socket is None:
            raise Closed("the way to the central server is closed. Open another.")
        refuse_group(request.group)
        body = request_to_wire(request.payload, request.group, request.parts)
        had = DeliveredAnswer(request.payload) if request.parts and self.comes_back else None
        sent = SentPrompt(body, request, client, had)
        self._numbers = (self._numbers + 1) % 2**32
        self._sent[self._numbers] = sent
        self._post(sent.packed(self._numbers))
        return self._numbers

    def abandon(self, number: int) -> None:
        with self._presenting:
            if self._sent.pop(number, None) is not None:
                self._post(pack_record(WireRecord(RecordKind.CANCEL, number=number)))

    def _post(self, record: bytes) -> None:
        def flush() -> None:
            with self._presenting:
                outbox, self._outbox = self._outbox, []
                self._put(b"".join(outbox))

        if not self._outbox:
            self._soon(flush)
        self._outbox.append(record)

    def _ask_again(self) -> None:
        self._outbox.clear()
        for number, sent in self._sent.items():
            if sent.had is not None:  # it goes on after what its reader has had
                most = LARGEST_PROMPT + LARGEST_BEGUN
                body = request_to_wire(sent.had.rest(), sent.request.group, parts=True, most=most)
                self._sent[number] = sent._replace(body=body)
        self._put(b"".join(sent.packed(number) for number, sent in self._sent.items()))

    def _settle(self, record: WireRecord) -> tuple[int, Any] | None:
        if record.kind == RecordKind.GOODBYE:
            raise parting(record)
        if record.kind == RecordKind.PART:
            if (sent := self._sent.get(record.number)) is None:  # cancelled
                return None
            outcome: Part | GpuinferError | None = part_from_wire(record.body)
            if isinstance(outcome, Part) and sent.had is not None:
                try:
                    outcome = sent.had.fresh(outcome)
                except BackendError as error:
                    outcome = error
            if isinstance(outcome, GpuinferError):
                self.abandon(record.number)
            return None if outcome is None else (record.number, outcome)  # None: a part already delivered
        if self._sent.pop(record.number, None) is None:  # cancelled
            return None
        if record.kind == RecordKind.GENERATION:
            return record.number, generation_from_wire(record.body)
        if record.kind == RecordKind.FAILED:
            return record.number, error_from_wire(record.body)
        return record.number, BackendError("the central server sent an answer of no known kind. Start it again.")


class AsyncTextClient(AsyncClient):
    """One loop's connection. Its waiting requests are those of the streams that are followed."""

    _connection: TextConnection

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Each answer as it comes, in parts where they are wanted. What is unanswered is cancelled with the stream."""
        await self._up.wait()
        if self._lost is not None:
            raise self._lost
        answers: asyncio.Queue[Event] = asyncio.Queue()
        for request in batch:
            try:
                self._waiting[self._send(request)] = request, answers
            except GpuinferError as error:
                answers.put_nowait(Event(request, error=error))
        try:
            left = len(batch)
            while left:
                event = await answers.get()
                left -= event.last
                yield event
        finally:
            for request in batch:
                self.cancel(request)

    def _settle(self, number: int, outcome: Any) -> None:
        if isinstance(outcome, Part):
            if (asked := self._waiting.get(number)) is not None:
                request, answers = asked
                answers.put_nowait(Event(request, outcome, last=False))
            return
        if (asked := self._waiting.pop(number, None)) is None:
            return
        request, answers = asked
        del self._numbers[request]
        failed = isinstance(outcome, GpuinferError)
        answers.put_nowait(Event(request, error=outcome) if failed else Event(request, outcome))


class RemoteTextBackend(Backend):
    """A backend whose model is in a server process, which the backend of the name `called` starts."""

    serves: ClassVar[Sequence[ModelKind]] = ("text",)
    remote = True
    called = "central"

    def __init__(
        self,
        setup: Setup | None = None,
        /,
        address: ServerAddress | None = None,
        restarts_within_s: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(setup, **options)
        self.limits = Limits(1)
        self._address, self._restarts_within_s = address, restarts_within_s
        self._link: AsyncTextClient | None = None

    async def start(self, context: BackendContext) -> None:
        soon = asyncio.get_running_loop().call_soon
        self._link = AsyncTextClient(TextConnection(self._address_or_refuse(), self._restarts_within_s, soon))
        await self._link.open()
        self.limits = self._link.limits

    def _address_or_refuse(self) -> ServerAddress:
        """Raises `UsageError` without an address."""
        if self._address is None:
            raise UsageError(f"there is nothing to connect to. Start it with the backend '{self.called}'.")
        return self._address

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        answers = {event.request: event.error or event.value async for event in self.stream(batch)}
        return [answers[request] for request in batch]

    def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Each answer as it comes, in parts where they are wanted. What is unanswered is cancelled with the stream."""
        if self._link is None:
            raise self._closed()
        return self._link.stream(batch)

    def _closed(self) -> BackendDied:
        return BackendDied(f"the backend '{self.called}' is not running. Await start() first, and not after close().")

    @property
    def lost(self) -> BackendDied | None:
        return None if self._link is None else self._link.lost

    def cancel(self, request: Request) -> None:
        if self._link is not None:
            self._link.cancel(request)

    async def close(self) -> None:
        if self._link is not None:
            await self._link.close()
            self._link = None


@dataclass(frozen=True)
class TextConnector:
    kind: type[RemoteTextBackend]
    setup: Setup
    address: ServerAddress
    restarts_within_s: float

    def open(self) -> Backend:
        return self.kind(self.setup, address=self.address, restarts_within_s=self.restarts_within_s)
