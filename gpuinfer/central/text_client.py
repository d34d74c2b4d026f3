"""An event loop's way to a central server whose model goes on with prompts.

Like `connection.py` and `link.py`, but prompts and answers travel themselves, and those that come together go out in
one piece: short ones would cost a system call each.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any, NamedTuple

from gpuinfer.api import Event, Limits, Priority, Request
from gpuinfer.central import memory
from gpuinfer.central.address import Address
from gpuinfer.central.connection import Connection, parting, refuse_group
from gpuinfer.central.link import Link
from gpuinfer.central.memory import SIZE as PULSE_SIZE
from gpuinfer.central.memory import SharedPulse
from gpuinfer.central.wire import (
    LARGEST_BEGUN,
    NOBODY,
    Kind,
    Record,
    asked_to_wire,
    generation_from_wire,
    pack,
    part_from_wire,
)
from gpuinfer.engine.admission import class_of
from gpuinfer.errors import BackendError, Closed, GpuinferError
from gpuinfer.generation import Part
from gpuinfer.host.error_wire import error_from_wire
from gpuinfer.text.frames import LARGEST_FRAME, LARGEST_PROMPT
from gpuinfer.text.resuming import Had

AHEAD = 3  # times as many rows with the server as it has slots: one that becomes free finds a row waiting there
LEAST_AHEAD = 64  # rows, where there are few slots and answers come faster than they travel


class Sent(NamedTuple):
    """One request that has been sent: a server that comes back is sent it again."""

    body: bytes
    group: Hashable
    rows: int
    client: int
    priority: int
    deadline: float
    had: Had | None = None  # by a reader who reads along, where the server may come back


class TextConnection(Connection):
    """`soon` calls a function once whoever asks now has asked."""

    largest_body = LARGEST_FRAME
    asked_for = "prompts"

    def __init__(
        self, address: Address, restarts_within_s: float, soon: Callable[[Callable[[], None]], object]
    ) -> None:
        super().__init__(address, restarts_within_s)
        self._sent: dict[int, Sent] = {}
        self._outbox: list[bytes] = []
        self._soon = soon

    def _learn(self, told: Any, pulse: int) -> None:
        slots = told["slots"]
        self.limits = Limits(told["max_rows"], in_flight=slots, slots=max(LEAST_AHEAD, AHEAD * slots))
        self._pulse = SharedPulse(memory.attach(pulse, PULSE_SIZE))

    def ask(
        self,
        payload: Any,
        rows: int,
        *,
        client: int = 0,
        priority: int = Priority.NORMAL,
        deadline: float = float("inf"),
        group: Hashable = None,
        parts: bool = False,
    ) -> int:
        """Send a prompt soon; returns its number. Raises `BadPrompt` for one that cannot travel, `Closed`."""
        if self._socket is None:
            raise Closed("the way to the central server is closed. Open another.")
        refuse_group(group)
        body = asked_to_wire(payload, group, parts)
        had = Had(payload) if parts and self.comes_back else None
        sent = Sent(body, group, rows, client, class_of(priority), deadline, had)
        self._numbers = (self._numbers + 1) % 2**32
        self._sent[self._numbers] = sent
        self._post(_packed(self._numbers, sent))
        return self._numbers

    def abandon(self, number: int) -> None:
        with self._presenting:
            if self._sent.pop(number, None) is not None:
                self._post(pack(Record(Kind.CANCEL, number=number)))

    def _post(self, record: bytes) -> None:
        if not self._outbox:
            self._soon(self._flush)
        self._outbox.append(record)

    def _flush(self) -> None:
        with self._presenting:
            outbox, self._outbox = self._outbox, []
            self._put(b"".join(outbox))

    def _ask_again(self) -> None:
        self._outbox.clear()
        for number, sent in self._sent.items():
            if sent.had is not None:  # it goes on after what its reader has had
                most = LARGEST_PROMPT + LARGEST_BEGUN
                body = asked_to_wire(sent.had.rest(), sent.group, parts=True, most=most)
                self._sent[number] = sent._replace(body=body)
        self._put(b"".join(_packed(number, sent) for number, sent in self._sent.items()))

    def _settle(self, record: Record) -> tuple[int, Any] | None:
        if record.kind == Kind.GOODBYE:
            raise parting(record)
        if record.kind == Kind.PART:
            return self._part(record)
        if self._sent.pop(record.number, None) is None:  # nobody waits for it any more
            return None
        if record.kind == Kind.GENERATION:
            return record.number, generation_from_wire(record.body)
        if record.kind == Kind.FAILED:
            return record.number, error_from_wire(record.body)
        return record.number, BackendError("the central server sent an answer of no known kind. Start it again.")

    def _part(self, record: Record) -> tuple[int, Any] | None:
        """A part, or the error that ends its request: None for what its reader has had, or does not want any more."""
        if (sent := self._sent.get(record.number)) is None:
            return None
        outcome: Part | GpuinferError | None = part_from_wire(record.body)
        if isinstance(outcome, Part) and sent.had is not None:
            try:
                outcome = sent.had.fresh(outcome)
            except BackendError as error:
                outcome = error
        if isinstance(outcome, GpuinferError):
            self.abandon(record.number)
        return None if outcome is None else (record.number, outcome)


class TextLink(Link):
    """One loop's connection. Its waiting requests are those of the streams that are followed."""

    _connection: TextConnection

    async def stream(self, batch: Sequence[Request]) -> AsyncIterator[Event]:
        """Each answer as it comes, in parts where they are wanted. What is unanswered is cancelled with the stream."""
        await self._up.wait()
        if self._lost is not None:
            raise self._lost
        answers: asyncio.Queue[Event] = asyncio.Queue()
        for request in batch:
            self._send(request, answers)
        try:
            left = len(batch)
            while left:
                event = await answers.get()
                left -= event.last
                yield event
        finally:
            for request in batch:
                self.cancel(request)

    def _send(self, request: Request, answers: asyncio.Queue[Event]) -> None:
        client = request.client
        who = NOBODY if client is None else self._clients.setdefault(client, len(self._clients))
        try:
            number = self._connection.ask(
                request.payload,
                request.rows,
                client=who,
                priority=request.priority,
                deadline=request.deadline,
                group=request.group,
                parts=request.parts,
            )
        except GpuinferError as error:
            answers.put_nowait(Event(request, error=error))
            return
        self._waiting[number] = request, answers
        self._numbers[request] = number

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


def _packed(number: int, sent: Sent) -> bytes:
    left_s = sent.deadline - time.monotonic()
    return pack(Record(Kind.PROMPT, sent.priority, 0, number, sent.client, sent.rows, left_s, sent.body))
