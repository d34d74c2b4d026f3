"""A client's connection to its server: blocks of shared memory, open requests, and answers.

It never waits, and knows neither threads nor loops: `client.py` (for any program) and `async_client.py` do.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray

from gpuinfer.api import Limits, Request
from gpuinfer.central.blocks import PER_CLIENT, Block, BlockForm
from gpuinfer.central.protocol import (
    LARGEST_BODY,
    GarbledRecord,
    RecordKind,
    ServerAddress,
    Unpacker,
    WireRecord,
    group_of,
    hello,
    pack_record,
)
from gpuinfer.errors import BackendDied, BadResult, Closed, GpuinferError, QueueFull, RequestError, UsageError
from gpuinfer.host import shared_memory
from gpuinfer.host.child import AWAY_S, HEARTBEAT_SIZE, LATE_S, HeartbeatWatch
from gpuinfer.host.error_text import error_from_wire
from gpuinfer.models.row_format import misfit

GREETING_S = 60.0  # for a server that is there already, and may be in the middle of long batches
GREET_AGAIN_S = 0.1  # after a server has hung up instead of greeting
LEAST_ROOM = 64  # rows of a block of ours: smaller payloads share one size
CHUNK = 1 << 16  # bytes read at once
SEND_TIMEOUT = struct.pack("@ll", 10, 0)  # seconds, microseconds: for a server that reads nothing any more
SEND_BUFFER = 212_992  # bytes, doubled by Linux: room for all that a client can send while all lanes compute
LARGEST_GROUP = 1 << 15  # bytes
POOLED = PER_CLIENT - 64  # blocks at most in the pool, for payloads that lie anywhere; `block` hands out the others


@dataclass(slots=True)
class OpenRequest:
    """One request that has been sent."""

    number: int
    request: Request
    block: Block
    client: int
    borrowed: bool  # the block is the pool's: the answer is copied out of it
    abandoned: bool = False


class CentralConnection:
    """Not thread-safe: one thread, or one lock, at a time."""

    largest_body = LARGEST_BODY
    asked_for = "rows"

    def __init__(self, address: ServerAddress, restarts_within_s: float = 0.0) -> None:
        """`restarts_within_s`: how long a server that died may take to come back; 0 when it will not."""
        self.limits: Limits
        self.form: BlockForm
        self._address, self._patience_s = address, restarts_within_s
        self._name = os.urandom(16)  # with the process, for a child by fork that opens a copy of its own
        self._socket: socket.socket | None = None
        self._pulse: HeartbeatWatch
        self._unpacker = Unpacker(self.largest_body)
        self._blocks: list[Block] = []
        self._descriptors: list[shared_memory.Descriptor] = []  # of the blocks, for a server that comes back
        self._idle: list[Block] = []  # the pool: nobody uses them
        self._owned: dict[int, Block] = {}  # by the address of their memory: handed out by `block`
        self._asked: dict[int, OpenRequest] = {}
        self._busy: set[int] = set()  # numbers of blocks whose rows are with the server
        self.lent = 0  # blocks of the pool that are out, which an answer brings back
        self.abandoned = 0  # questions that nobody waits for, and the server has not let go of
        self._numbers = 0
        self._ended: GpuinferError | None = None  # why nothing more will come on this line
        self._said: GpuinferError | None = None  # by a server as it died, since the last answer
        self._lives = 0  # how often it has come back since
        self._greeting_line: socket.socket | None = None  # the line on which a greeting is awaited
        self._presenting = threading.Lock()  # one thread may take a block, or give up, while another comes back
        self._closed = False

    @property
    def is_open(self) -> bool:
        return self._socket is not None

    @property
    def comes_back(self) -> bool:
        """Whether a server that died is worth waiting for."""
        return self._patience_s > 0 and not self._closed

    @property
    def outstanding(self) -> int:
        return len(self._asked)

    def fileno(self) -> int:
        return -1 if self._socket is None else self._socket.fileno()

    # Opening

    def open(self, timeout_s: float = GREETING_S) -> None:
        """Connect and greet. Blocks; raises `BackendDied` without an answer, or the server's refusal."""
        self._socket = self._greet(timeout_s)

    def _greet(self, timeout_s: float) -> socket.socket:
        """A line on which the server has answered the greeting."""
        try:
            line = self._greeting_line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        except OSError as error:
            raise UsageError(
                f"there can be no line to the central server: {error.strerror}. Hold fewer files open, or allow more "
                "(`ulimit -n`)."
            ) from error
        until = time.monotonic() + timeout_s
        try:
            line.settimeout(timeout_s)
            line.connect(self._address.path)
            line.sendall(pack_record(hello(self._address.token, self._name + os.getpid().to_bytes(8))))
            self._unpacker, descriptors, records = Unpacker(self.largest_body), list[int](), list[WireRecord]()
            while not records:
                line.settimeout(max(0.001, until - time.monotonic()))
                data, found, _, _ = socket.recv_fds(line, CHUNK, 4)
                descriptors += found
                if not data:
                    raise ConnectionResetError("it hung up")
                records += self._unpacker.feed(data)
            record = records[0]
            if record.kind != RecordKind.WELCOME or len(descriptors) != 1:
                raise parting(record)
            self._learn(record.body, descriptors[0])
            line.settimeout(None)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, SEND_TIMEOUT)
            line.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER)
        except GpuinferError:
            line.close()
            raise
        except Exception as error:
            line.close()
            raise BackendDied(f"the central server does not answer ({error or 'too late'}). Start it again.") from error
        finally:
            self._greeting_line = None
        return line

    def _learn(self, told: Any, pulse: int) -> None:
        """Take limits, form and heartbeat from the server's greeting."""
        self.limits = Limits(told["max_rows"], PER_CLIENT)
        self.form = BlockForm.from_wire(told["form"])
        self._pulse = HeartbeatWatch(shared_memory.attach(pulse, HEARTBEAT_SIZE))

    def come_back(self, cause: BackendDied) -> None:
        """After the server has gone: wait until it is back, and send all open requests again. Blocks.

        Raises `cause` at once when the server will not come back, and when its address is gone; `BackendDied` when it
        is not back in time.
        """
        self._hang_up()
        if not self.comes_back:
            raise cause
        until = time.monotonic() + self._patience_s
        while True:  # one that is about to end may still accept a line, and close it
            try:
                line = self._greet(max(0.0, until - time.monotonic()))
                break
            except BackendDied as error:
                none_listens = isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError)
                if none_listens or self._closed:
                    raise (self._said or cause) from None
                if not isinstance(error.__cause__, ConnectionError) or time.monotonic() >= until:
                    raise error from None
            time.sleep(GREET_AGAIN_S)
        with self._presenting:
            if self._closed:
                line.close()
                raise cause
            self._socket = line
            self._lives += 1
            self._ask_again()

    def _ask_again(self) -> None:
        """Send blocks and open requests to a server that is back."""
        for block, descriptor in zip(self._blocks, self._descriptors, strict=True):
            self._present(block, descriptor)
        for question in self._asked.values():
            self._send_question(question)

    # Blocks

    def block(self, rows: int) -> NDArray[Any]:
        """Room for `rows` rows [rows, ...] that travel without a copy."""
        if not 1 <= rows <= self.limits.max_rows:
            raise RequestError(
                f"a block of {rows} rows cannot be served: a batch takes 1 to {self.limits.max_rows}. "
                "Take smaller blocks, or give the server a larger max_rows."
            )
        block = self._new_block(rows)
        self._owned[_place(block.rows)] = block
        return block.rows

    def _new_block(self, room: int, full: bool = False) -> Block:
        """A new block. At the limit (`full`) it replaces the smallest idle block of the pool."""
        number = len(self._blocks)
        if full or number >= PER_CLIENT:
            if not self._idle:
                raise QueueFull(
                    f"a client has at most {PER_CLIENT} blocks, {POOLED} of them for arrays that lie elsewhere, and "
                    "none is free. Wait for answers in between, or send larger requests."
                )
            number = min(self._idle, key=lambda block: block.room).number
        descriptor, mapping = shared_memory.create(self.form.size(room))
        with self._presenting:
            block = Block(number, room, mapping, self.form)
            if number == len(self._blocks):
                self._blocks.append(block)
                self._descriptors.append(shared_memory.Descriptor(descriptor))
            else:
                replaced = self._blocks[number]
                self._idle.remove(replaced)
                replaced.let_go()
                self._descriptors[number].close()
                self._blocks[number], self._descriptors[number] = block, shared_memory.Descriptor(descriptor)
            self._present(block, self._descriptors[number])
        return block

    def _present(self, block: Block, descriptor: shared_memory.Descriptor) -> None:
        self._put(pack_record(WireRecord(RecordKind.BLOCK, block=block.number, rows=block.room)), [descriptor.number])

    # Asking

    def ask(self, request: Request, client: int) -> int:
        """Send a request; returns its number. `client` stands for `request.client`.

        The payload is an array [rows, ...], which is copied, or a view of a `block`.

        Raises `BackendError` for one that does not fit the model, `QueueFull` with too many outstanding, `BackendDied`.
        """
        if self._socket is None:
            raise Closed("this client is closed. Open another with server.client().")
        payload, rows = request.payload, request.rows
        if error := misfit(payload, rows, self.form.spec):
            raise error
        if rows > self.limits.max_rows:
            raise RequestError(
                f"a request of {rows} rows can never be served: a batch takes 1 to {self.limits.max_rows}. "
                "Send smaller blocks, or give the server a larger max_rows."
            )
        refuse_group(request.group)
        block = self._owned.get(_place(payload)) if payload.flags.c_contiguous else None
        if (borrowed := block is None or block.room < rows) or block is None:
            index = next((n for n, one in enumerate(self._idle) if one.room >= rows), None)
            if index is not None:
                block = self._idle.pop(index)
            else:
                room = min(self.limits.max_rows, max(LEAST_ROOM, 1 << (rows - 1).bit_length()))
                block = self._new_block(room, full=len(self._blocks) - len(self._owned) >= POOLED)
            block.rows[:rows] = payload
        elif block.number in self._busy:
            raise RequestError("this block is with the server already. Await its answer first, or take a second block.")
        self._numbers = (self._numbers + 1) % 2**32
        question = OpenRequest(self._numbers, request, block, client, borrowed)
        self._asked[question.number] = question
        self.lent += borrowed
        self._busy.add(block.number)
        self._send_question(question)
        return question.number

    def _send_question(self, question: OpenRequest) -> None:
        request, number = question.request, question.number
        left_s = request.deadline - time.monotonic()
        body = None if request.group is None else {"group": request.group}
        block, client = question.block.number, question.client
        self._put(
            pack_record(WireRecord(RecordKind.ASK, request.priority, block, number, client, request.rows, left_s, body))
        )

    def abandon(self, number: int) -> None:
        """Cancel a request. Its block is free once the server has answered."""
        with self._presenting:
            if (question := self._asked.get(number)) is not None and not question.abandoned:
                question.abandoned = True
                self.abandoned += 1
                self._put(pack_record(WireRecord(RecordKind.CANCEL, number=number)))

    def _put(self, data: bytes, descriptors: Sequence[int] = ()) -> None:
        """Send. A broken line is noticed when reading, and open requests are sent again then, if the server is back."""
        if (line := self._socket) is None:
            return
        try:
            if descriptors:
                socket.send_fds(line, [data], descriptors)
            else:
                line.sendall(data)
        except OSError:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    # Answers

    def receive(self) -> list[tuple[int, Any]]:
        """The answers that have come: numbers of requests with their results, or errors. Never blocks.

        Raises `BackendDied` when the server is gone, or serves this client no more.
        """
        if self._socket is None:
            return []
        if self._ended is not None:
            raise self._ended
        try:
            data = self._socket.recv(CHUNK, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            raise self._gone()
        settled = []
        try:
            for record in self._unpacker.feed(data):
                if (done := self._settle(record)) is not None:
                    settled.append(done)
        except GarbledRecord as error:
            self._ended = BackendDied(f"the central server sent {error}. Let both ends run the same version.")
        except GpuinferError as error:
            self._ended = self._said = error
        else:
            if settled:
                self._said, self._lives = None, 0
        if self._ended is not None and not settled:  # else the next call raises: what was answered before is answered
            raise self._ended
        return settled

    def _gone(self) -> BackendDied:
        if self._patience_s <= 0:
            return BackendDied("the central server is gone. Start it again; with the option restart it comes back.")
        if not self._lives:
            return BackendDied(
                "the central server is gone, and has not come back. See its last words, and start it again."
            )
        times = "once" if self._lives == 1 else f"{self._lives} times"
        return BackendDied(
            f"the central server is gone: it came back {times}, and died again before it answered. "
            f"Probably these {self.asked_for} end it: look at them, or at the model, and start it again."
        )

    def _settle(self, record: WireRecord) -> tuple[int, Any] | None:
        if record.kind == RecordKind.GOODBYE:
            raise parting(record)
        question = self._asked.pop(record.number, None)
        if question is None:
            return None
        outcome: Any = None
        if record.kind == RecordKind.FAILED:
            outcome = error_from_wire(record.body)
        elif record.kind != RecordKind.ANSWER:
            outcome = BadResult("an answer of no known kind")
        elif not question.abandoned:
            outcome = question.block.answer(question.request.rows, question.borrowed)
        self._busy.discard(question.block.number)
        self.abandoned -= question.abandoned
        if question.borrowed:
            self.lent -= 1
            self._idle.append(question.block)
        return None if question.abandoned else (question.number, outcome)

    def stopped(self) -> BackendDied | None:
        """The error of a server without a heartbeat; else None. Call it at least every `AWAY_S` seconds."""
        if self._socket is None or not self._pulse.stopped:
            return None
        return BackendDied(
            f"the central server has given no sign of life for {LATE_S:g} s: it is stopped or stuck. Start it again."
        )

    # Closing

    def close(self) -> None:
        """Close the line. Open requests are not answered."""
        self.give_up()
        with self._presenting:
            self._hang_up()
            for descriptor in self._descriptors:
                descriptor.close()
            for held in (self._descriptors, self._asked, self._owned, self._idle, self._blocks):
                held.clear()  # type: ignore[attr-defined]

    def give_up(self) -> None:
        """End a wait for a server that comes back. Any thread may call this."""
        self._closed = True
        if (line := self._greeting_line) is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)

    def _hang_up(self) -> None:
        line, self._socket = self._socket, None
        if line is not None:
            with contextlib.suppress(OSError):
                line.shutdown(socket.SHUT_RDWR)  # a forked child may hold another descriptor of it
            line.close()
        self._unpacker, self._ended = Unpacker(self.largest_body), None


LOOK_S = AWAY_S / 4  # between two looks at the pulse


def parting(record: WireRecord) -> GpuinferError:
    if record.kind == RecordKind.GOODBYE:
        return error_from_wire(record.body)
    return BackendDied("the central server did not say what it serves. Let both ends run the same version.")


def _place(rows: NDArray[Any]) -> int:
    return int(rows.__array_interface__["data"][0])


def refuse_group(group: Hashable) -> None:
    """Refuse a group that cannot be sent: the server closes the line of a client with such records."""
    if group is None:
        return
    try:
        packed = msgspec.msgpack.encode(group)
        fits = len(packed) <= LARGEST_GROUP and group_of(msgspec.msgpack.decode(packed)) == group
    except (TypeError, ValueError, OverflowError, RecursionError):
        fits = False
    if not fits:
        raise RequestError(
            f"the group {str(group)[:80]!r} cannot travel to a server. Use a short string, a number or a tuple of them."
        )
