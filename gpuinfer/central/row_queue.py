"""The queue core for rows that lie in clients' blocks: from the records that ask to the records that answer.

It knows neither threads nor lines: one thread at a time calls it, and `send` takes what it has to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from gpuinfer.api import Limits, Priority, Request, Strategy
from gpuinfer.central.caller import Caller
from gpuinfer.central.memory import Block, BlockForm
from gpuinfer.central.serving import Served
from gpuinfer.central.wire import NOBODY, Garbled, Kind, Record, pack
from gpuinfer.engine.core import Batch, Core, Journal, outcome_of
from gpuinfer.engine.cutting import Cut
from gpuinfer.engine.watchdog import Held, Patience
from gpuinfer.errors import Closed, GpuinferError
from gpuinfer.host.error_wire import error_to_wire
from gpuinfer.stats import Lane, Snapshot

NAMES = 1024  # of clients in one process that are told apart: they cost memory as long as it is connected
PRIORITIES = tuple(Priority)

Send = Callable[[Caller, bytes], None]


class BlockRows:
    """The payload of a request here: the first rows of a caller's block."""

    __slots__ = ("block", "caller", "number", "rows")

    def __init__(self, caller: Caller, number: int, block: Block, rows: int) -> None:
        self.caller, self.number, self.block, self.rows = caller, number, block, rows


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
        self._core = Core(strategy, recorder)
        self._core.open(limits, max_queue_rows)
        self._form, self._limits, self._send, self._clock = form, limits, send, clock
        self._waiting: dict[tuple[int, int], Request] = {}  # by caller and number, until they are cut

    # What clients say

    def take(self, caller: Caller, record: Record) -> bool:
        """Do what a record says; whether it has brought a request into the queue. Raises `Garbled` for nonsense."""
        if record.kind == Kind.ASK:
            return self._ask(caller, record)
        if record.kind == Kind.BLOCK:
            caller.attach(record, self._form, self._limits.max_rows)
        elif record.kind == Kind.CANCEL:
            self._cancel(caller, record.number)
        else:
            raise Garbled(f"a record of kind {record.kind}")
        return False

    def _ask(self, caller: Caller, record: Record) -> bool:
        block = caller.blocks.get(record.block)
        if block is None or not 1 <= record.rows <= block.room or math.isnan(record.left_s):
            raise Garbled("a request for rows that are not there")
        if record.block in caller.asked or (caller.number, record.number) in self._waiting:
            raise Garbled("a second request before the first is answered")
        request = self._request(caller, record, block)
        if (shed := self._core.arrive(request)) is not None:
            for other, error in shed.turned_away:
                self._fail(other, error, outcome_of(error))
            if shed.refusal is not None:
                self._send(caller, _failed(record.number, shed.refusal))
                return False
        self._waiting[caller.number, record.number] = request
        caller.asked.add(record.block)
        if (client := request.client) is not None and client not in caller.names:
            caller.names.add(client)
            self._core.join(client, request.arrived)
        return True

    def _request(self, caller: Caller, record: Record, block: Block) -> Request:
        now = self._clock()
        group = _hashable(record.body.get("group")) if isinstance(record.body, dict) else None
        hash(group)  # raises for what cannot be one, before anything is done
        client = None if record.client == NOBODY else (caller.number, record.client % NAMES)
        priority = PRIORITIES[min(record.priority, Priority.LOW)]
        payload = BlockRows(caller, record.number, block, record.rows)
        return Request(payload, record.rows, now, priority, now + record.left_s, group, client)

    def _cancel(self, caller: Caller, number: int) -> None:
        """Take a request that waits out of the queue; the answer to one that is being served is dropped over there."""
        request = self._waiting.get((caller.number, number))
        if request is not None:
            self._core.withdraw(request)
            self._fail(request, Closed("this request was cancelled."), "cancelled")

    def forget(self, caller: Caller) -> None:
        """A client has gone, and with it all that it has asked for and that is not in a batch."""
        now = self._clock()
        for key, request in [item for item in self._waiting.items() if item[0][0] == caller.number]:
            self._core.withdraw(request)
            self._core.settled(request, "cancelled", now)
            del self._waiting[key]
        for name in caller.names:
            self._core.leave(name)

    def _fail(self, request: Request, error: GpuinferError, outcome: str) -> None:
        """Settle a request that has left the queue and was not cut."""
        asked: BlockRows = request.payload
        self._waiting.pop((asked.caller.number, asked.number), None)
        asked.caller.asked.discard(asked.block.number)
        self._core.settled(request, outcome, self._clock(), error)
        self._send(asked.caller, _failed(asked.number, error))

    # Batches

    def next_batch(self, now: float, lanes: int = 1) -> Batch | float:
        """The batch that is due when so many lanes are free, or when to look again."""
        while not isinstance(step := self._core.decide(now, lanes), float):
            if isinstance(step, Cut):
                for request in step.requests:
                    asked: BlockRows = request.payload
                    asked.caller.serving += 1
                    del self._waiting[asked.caller.number, asked.number]
                return self._core.launch(step, now)
            for request in step.requests:
                error = step.error_of(request)
                self._fail(request, error, outcome_of(error))
        return step

    @staticmethod
    def answers(batch: Batch, served: Served) -> dict[Caller, list[bytes]]:
        """What is to be sent, by caller. From here on it may ask for the same blocks again. Needs no lock."""
        answers: dict[Caller, list[bytes]] = {}
        for request, error in zip(batch.requests, served.errors, strict=True):
            asked: BlockRows = request.payload
            asked.caller.asked.discard(asked.block.number)
            answer = pack(Record(Kind.ANSWER, number=asked.number)) if error is None else _failed(asked.number, error)
            answers.setdefault(asked.caller, []).append(answer)
        return answers

    def settle(self, batch: Batch, served: Served, started: float, ended: float) -> None:
        """Count a batch whose answers are on their way."""
        for request, error in zip(batch.requests, served.errors, strict=True):
            caller: Caller = request.payload.caller
            caller.serving -= 1
            caller.release()
            if error is None:
                self._core.settled(request, "ok", ended)
            else:
                self._core.settled(request, outcome_of(error), ended, error)
        if served.again:
            self._core.retried(batch.requests)
        if served.whole:
            self._core.ended(batch, started, ended - started, ended)

    def lose_lane(self) -> None:
        """One batch in flight less from now on."""
        self._core.lose_lane()

    # What there is to see

    def held(self, patience: Patience) -> Iterator[Held]:
        """Whether the strategy lets requests wait for nothing. Any thread may ask."""
        return self._core.held(patience)

    def snapshot(self, lanes: list[Lane]) -> Snapshot:
        return self._core.snapshot(lanes)


def _failed(number: int, error: GpuinferError) -> bytes:
    return pack(Record(Kind.FAILED, number=number, body=error_to_wire(error)))


def _hashable(value: Any) -> Hashable:
    return tuple(map(_hashable, value)) if isinstance(value, list) else value
