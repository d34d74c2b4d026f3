"""The server of text: an engine and a model of text on an event loop with a thread of its own, the clients' lines, and
the replies that wait for each client. All of one turn of the loop goes out in one piece. A client that reads slowly
stalls no other and takes little memory: while its line is full its parts wait here and are joined, to one for each
sample; answers go out all the same, as they come to an end.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
import socket
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import AsyncIterator, Hashable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from gpuinfer.api import Backend, BackendContext, Event, Limits, ModelSpec, Request, Result, Setup, Strategy
from gpuinfer.central.client_sessions import ClientAcceptor, ClientSession, RecordBounds
from gpuinfer.central.protocol import (
    LARGEST_BEGUN,
    GarbledRecord,
    RecordKind,
    TextRequest,
    WeightsChange,
    WireRecord,
    failed_record,
    generation_to_wire,
    group_of,
    pack_record,
    part_to_wire,
    request_from_wire,
)
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.stream import Unread
from gpuinfer.engine.trace_recorder import Recorder
from gpuinfer.engine.watchdog import Held, Patience
from gpuinfer.errors import BackendDied, BackendError, BadPrompt, Closed, GpuinferError, WorkError
from gpuinfer.generation import Part
from gpuinfer.host import error_text
from gpuinfer.stats import Snapshot
from gpuinfer.text.answer_frames import LARGEST_FRAME, LARGEST_PROMPT
from gpuinfer.text.model import TextModel
from gpuinfer.text.multi_device import TextDevices, open_text


class ClientReplies:
    """All methods belong to the loop."""

    def __init__(self, lines: ClientAcceptor, session: ClientSession, loop: AbstractEventLoop) -> None:
        self._lines, self._session, self._loop = lines, session, loop
        self._replies: list[bytes] = []
        self.unread: dict[int, Unread] = {}  # by the number of the request
        self._due = False

    def part(self, number: int, part: Part) -> None:
        self.unread.setdefault(number, Unread()).add(part)
        self._flush_soon()

    def reply(self, number: int, record: bytes) -> None:
        """The end of a request, after the last of its parts."""
        self._replies += [*self._parts(number), record]
        self._flush_soon()

    def _flush(self) -> None:
        self._due = False
        data, self._replies = self._replies, []
        if not self._session.stuck:  # else with the next part, or with the end
            for number in tuple(self.unread):
                data += self._parts(number)
        if data:
            self._lines.send(self._session, b"".join(data))

    def _parts(self, number: int) -> list[bytes]:
        unread, packed = self.unread.pop(number, None), []
        while unread:
            packed.append(pack_record(WireRecord(RecordKind.PART, number=number, body=part_to_wire(unread.take()))))
        return packed

    def _flush_soon(self) -> None:
        if not self._due:
            self._due = True
            self._loop.call_soon(self._flush)


TEXT_BOUNDS = RecordBounds(body=LARGEST_PROMPT + LARGEST_BEGUN, unsent=2 * LARGEST_FRAME)
MOST_WAITING = 1 << 20  # rows: clients of ours bound themselves, by the number of slots
LOOK_S = 1.0  # between two looks at who has not said who it is
SNAPSHOT_S = 1.0  # that the loop may take to count


class OwnTextBackend(Backend):
    """The model, as the engine here asks it."""

    def __init__(self, spec: ModelSpec, setup: Setup, tuning: Any) -> None:
        super().__init__(setup)
        self._spec, self._tuning = spec, tuning
        self._text: TextModel | TextDevices | None = None

    async def start(self, context: BackendContext) -> None:
        self._text = await open_text(
            self._spec, self.setup, self._tuning, context.stepped, None, *(context.lane, context.resized)
        )
        self.limits = self._text.limits

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        answers = {event.request: event.error or event.value async for event in self.stream(batch)}
        return [answers[request] for request in batch]

    def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        if self._text is None:
            raise BackendDied("the central server's model does not run. Start it again.")
        return self._text.stream(batch)

    def cancel(self, request: Request) -> None:
        if self._text is not None:
            self._text.cancel(request)

    @property
    def adapters(self) -> Sequence[str]:
        return () if self._text is None else self._text.adapters

    async def update(self, version: str, weights: str, *, adapter: str | None = None, drain: bool = True) -> None:
        if self._text is None:
            raise BackendDied("the central server's model does not run. Start it again.")
        if adapter is None:
            await self._text.update(version, weights, drain=drain)
        else:
            await self._text.load_adapter(adapter, version, weights)

    async def unload(self, adapter: str) -> None:
        if self._text is not None:
            await self._text.unload_adapter(adapter)

    def device(self) -> Mapping[str, Any]:
        return {} if self._text is None else self._text.device()

    async def close(self) -> None:
        text, self._text = self._text, None
        if text is not None:
            await text.close()


class TextServer:
    """Serves the clients of one listening socket, as `RowServer` does rows."""

    def __init__(
        self,
        backend: Backend,
        strategy: Strategy,
        listener: socket.socket,
        token: bytes,
        pulse: int,
        *,
        most_clients: int,
        max_queue_rows: int | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Loads the model, and takes as long. Raises `UsageError` when it cannot be had."""
        self.fault: WorkError | None = None  # why it cannot go on
        self._recorder = recorder
        self._engine = Engine(backend, strategy, max_queue_rows=max_queue_rows or MOST_WAITING, recorder=recorder)
        self._under_way: dict[tuple[int, int], asyncio.Task[None]] = {}  # by session and number
        self._outgoing: dict[ClientSession, ClientReplies] = {}
        self._latest = Snapshot()
        self._moved: dict[str, dict[str, int]] = {}  # of each lane of the forward
        self._moved_at: dict[str, float] = {}
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name="gpuinfer-text-server", daemon=True).start()
        asyncio.run_coroutine_threadsafe(self._engine.start(), self._loop).result()
        widest = self.limits.max_rows  # of one request; slots are those of all devices, and of what waits ahead
        welcome = pack_record(
            WireRecord(RecordKind.WELCOME, body={"max_rows": widest, "slots": self.limits.slots or widest})
        )
        self._lines = ClientAcceptor(listener, token, most_clients, (welcome, pulse), lambda rows: None, TEXT_BOUNDS)

    @property
    def limits(self) -> Limits:
        return self._engine.limits

    # From the main thread

    @property
    def adapters(self) -> Sequence[str]:
        return self._engine.backend.adapters

    def change(self, change: WeightsChange) -> Future[Sequence[str]]:
        """Have the model change its weights; the result is the adapters afterwards."""

        async def apply() -> Sequence[str]:
            if change.weights is None:
                await self._engine.unload(change.adapter or "")
            else:
                await self._engine.update(change.version, change.weights, adapter=change.adapter, drain=change.drain)
            return self.adapters

        return asyncio.run_coroutine_threadsafe(apply(), self._loop)

    def start(self) -> None:
        if self._recorder is not None:
            self._recorder.limits = self.limits
        asyncio.run_coroutine_threadsafe(self._watch(), self._loop)

    def close(self, patience_s: float) -> bool:
        """Accept nothing more, say goodbye to all clients; whether the model has stopped."""
        closing = asyncio.run_coroutine_threadsafe(self._close(), self._loop)
        with contextlib.suppress(TimeoutError):
            closing.result(patience_s)
        self.dismiss_all(Closed("the server was closed before this request was answered. Ask another."))
        return closing.done()

    def dismiss_all(self, error: GpuinferError) -> None:
        """Tell every client why the server serves it no more."""
        self._lines.dismiss_all(error)

    def snapshot(self) -> Snapshot:
        """The counters of this moment; those of before when the loop is too busy to tell."""

        async def count() -> Snapshot:
            return self._engine.snapshot()

        counted = asyncio.run_coroutine_threadsafe(count(), self._loop)
        with contextlib.suppress(TimeoutError):
            self._latest = counted.result(SNAPSHOT_S)
        return self._latest

    def busy_s(self) -> float:
        """For how long no lane has moved although requests are under way. Call it at least every few seconds."""
        now = time.monotonic()
        lanes = [lane for lane in self._engine.lanes if lane.name.startswith("forward")]
        for lane in lanes:
            visits = lane.visits()
            if visits != self._moved.get(lane.name) or not self._under_way:
                self._moved[lane.name], self._moved_at[lane.name] = visits, now
        still = [now - self._moved_at[lane.name] for lane in lanes]
        working = [s for s, lane in zip(still, lanes, strict=True) if lane.station != "idle"]  # one device may hang
        return max([min(still), *working])

    def held(self, patience: Patience) -> Iterator[Held]:
        """As `RowServer.held`."""
        return (one for one in self._engine.held(patience) if one.plugin is self._engine.strategy)

    # On the loop

    async def _watch(self) -> None:
        self._loop.add_reader(self._lines.fileno(), self._turn)
        while True:
            await asyncio.sleep(LOOK_S)
            if self._lines.due:
                self._turn()

    def _turn(self) -> None:
        try:
            self._lines.take_in(self._lines.ready(), self._on_record, self._forget)
        except Exception as error:  # noqa: BLE001 (whatever it is, no client may wait for ever)
            self._loop.remove_reader(self._lines.fileno())
            self.fault = BackendDied(
                f"the central server failed: {error_text.full_message(error)}. Start it again, and report this."
            )

    def _on_record(self, session: ClientSession, record: WireRecord) -> None:
        key = session.number, record.number
        if record.kind == RecordKind.CANCEL:  # the client reads this answer no more
            self._cancel(key)
            self._to(session).unread.pop(record.number, None)
            return
        if record.kind != RecordKind.PROMPT:
            raise GarbledRecord(f"a record of kind {record.kind}")
        if key in self._under_way or math.isnan(record.left_s):
            raise GarbledRecord("a second request before the first is answered")
        try:
            asked = request_from_wire(record.body)
        except BadPrompt as error:
            self._to(session).reply(record.number, failed_record(record.number, error))
            return
        group, who = group_of(asked.group), record.client_name(session.number)
        if who is not None and who not in session.names:
            session.names.add(who)
            self._engine.join(who)
        self._under_way[key] = self._loop.create_task(self._serve(session, record, asked, group, who))

    async def _serve(
        self, session: ClientSession, record: WireRecord, asked: TextRequest, group: Hashable, who: Hashable
    ) -> None:
        """One request from the queue to its answer. When the model dies, `dismiss_all` tells all clients."""
        try:
            generation = await self._engine.submit(
                asked.prompt,
                rows=record.rows,
                priority=record.priority_class,
                timeout=record.left_s,
                group=group,
                client=who,
                on_part=functools.partial(self._to(session).part, record.number) if asked.parts else None,
            )
            reply = pack_record(
                WireRecord(RecordKind.GENERATION, number=record.number, body=generation_to_wire(generation))
            )
        except BackendDied as error:
            self.fault = self.fault or error
            return
        except GpuinferError as error:
            reply = failed_record(record.number, error)
        except Exception as error:  # noqa: BLE001 (whatever it is, the client must hear of it)
            reply = failed_record(
                record.number,
                BackendError(f"the central server failed: {error_text.full_message(error)}. Report this."),
            )
        finally:
            self._under_way.pop((session.number, record.number), None)
        self._to(session).reply(record.number, reply)

    def _cancel(self, key: tuple[int, int]) -> None:
        task = self._under_way.pop(key, None)
        if task is not None:
            task.cancel()

    def _forget(self, session: ClientSession) -> None:
        """A client has gone: cancel its requests."""
        for key in [key for key in self._under_way if key[0] == session.number]:
            self._cancel(key)
        for who in session.names:
            self._engine.leave(who)
        self._outgoing.pop(session, None)

    def _to(self, session: ClientSession) -> ClientReplies:
        outgoing = self._outgoing.get(session)
        if outgoing is None:
            outgoing = self._outgoing[session] = ClientReplies(self._lines, session, self._loop)
        return outgoing

    async def _close(self) -> None:
        self._loop.remove_reader(self._lines.fileno())
        tasks = tuple(self._under_way.values())
        for key in tuple(self._under_way):
            self._cancel(key)
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.close(drain=False)
