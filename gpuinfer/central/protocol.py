"""What server, clients and owner send each other: the local address, records of a fixed size with msgpack bodies, and
changes of weights. Rows and answers are never sent: they are in the client's blocks of shared memory, and a record
names the block.
"""

from __future__ import annotations

import contextlib
import enum
import os
import secrets
import socket
import struct
import sys
import tempfile
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from gpuinfer.api import Priority
from gpuinfer.errors import BackendError, BadPrompt, GpuinferError
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.host.error_text import error_to_wire
from gpuinfer.text.answer_frames import LARGEST_PROMPT, UNFIT, packed_answer, packed_prompt

ABSTRACT = sys.platform == "linux"  # a name outside of any folder, gone with the last descriptor
BACKLOG = 512


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address and secret of a server, which its owner passes to client processes, and which is never shown."""

    path: str
    token: bytes


def listen() -> tuple[socket.socket, ServerAddress]:
    name = f"gpuinfer-{secrets.token_hex(16)}"
    path = f"\0{name}" if ABSTRACT else str(Path(tempfile.mkdtemp(prefix="gpuinfer-")) / "server")  # mode 0700
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener, ServerAddress(path, secrets.token_bytes(16))


def remove_address(address: ServerAddress) -> None:
    """Remove the socket's file, where there is one."""
    if not ABSTRACT:
        with contextlib.suppress(FileNotFoundError):
            Path(address.path).unlink(missing_ok=True)
            Path(address.path).parent.rmdir()


def is_own_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of the same user; without SO_PEERCRED the folder's mode ensures that."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", credentials)[1] == os.getuid())


VERSION = 6
HEADER = struct.Struct("<BBHIIIId")  # in the order of Record's fields, then the bytes of the body and `left_s`
LARGEST_BODY = 1 << 20  # bytes: checked before the memory is taken
PRIORITIES = tuple(Priority)
NAMES = 1024  # of clients in one process that are told apart: they cost memory as long as it is connected
NOBODY = 0xFFFFFFFF  # as the client of a request: no client is named


class RecordKind(enum.IntEnum):
    """The kinds of records."""

    # from a client
    HELLO = 1  # body: token, version, client: the same bytes at each reconnection
    BLOCK = 2  # from now on this is block number `block`, room for `rows` rows; its descriptor travels along
    ASK = 3  # answer the first `rows` rows of `block`; body, if any: group
    CANCEL = 4  # of request `number`
    PROMPT = 9  # go on with a prompt, `rows` samples; body: `TextRequest`
    # from the server
    WELCOME = 5  # body: what it serves; the descriptor of its pulse travels along
    ANSWER = 6  # the answer to request `number` lies in its block
    FAILED = 7  # request `number` failed; body: error
    GOODBYE = 8  # this client is not served, or not any more; body: error
    GENERATION = 10  # the answer to request `number`; body: `generation.Generation`
    PART = 11  # of the answer to request `number`, which grows; body: `generation.Part`


KINDS = frozenset(RecordKind)
TYPED = frozenset({RecordKind.PROMPT, RecordKind.GENERATION, RecordKind.PART})  # bodies are bytes: others know them


class WireRecord(NamedTuple):
    """One record. Fields that its kind does not need are 0."""

    kind: int
    priority: int = 0
    block: int = 0
    number: int = 0
    client: int = 0
    rows: int = 0
    left_s: float = 0.0  # to the deadline: two processes need not mean the same time by a clock's reading
    body: Any = None

    @property
    def priority_class(self) -> Priority:
        return PRIORITIES[min(self.priority, Priority.LOW)]

    def client_name(self, session: int) -> Hashable:
        """Who asks, in the process of this session; None where the record names no client."""
        return None if self.client == NOBODY else (session, self.client % NAMES)


def failed_record(number: int, error: GpuinferError) -> bytes:
    return pack_record(WireRecord(RecordKind.FAILED, number=number, body=error_to_wire(error)))


def hello(token: bytes, client: bytes) -> WireRecord:
    return WireRecord(RecordKind.HELLO, body={"token": token, "version": VERSION, "client": client})


class GarbledRecord(Exception):
    """The other end does not follow this protocol."""


def pack_record(record: WireRecord) -> bytes:
    kind, priority, block, number, client, rows, left_s, body = record
    if body is None:
        return HEADER.pack(kind, priority, block, number, client, rows, 0, left_s)
    packed = body if kind in TYPED else _encoder.encode(body)
    return HEADER.pack(kind, priority, block, number, client, rows, len(packed), left_s) + bytes(packed)


class Unpacker:
    """Records out of a stream of bytes that arrive in pieces."""

    def __init__(self, largest_body: int = LARGEST_BODY) -> None:
        self._rest = b""
        self._pieces: list[bytes] = []  # of a large body, until they are `_lacking` bytes more
        self._lacking = 0
        self._largest_body = largest_body

    def feed(self, data: bytes) -> Iterator[WireRecord]:
        """The records that are complete now. Raises `GarbledRecord`."""
        if self._lacking > 0:  # to join them with each that comes would take the square of their number
            self._pieces.append(data)
            self._lacking -= len(data)
            if self._lacking > 0:
                return
            data, self._pieces = b"".join(self._pieces), []
        data = self._rest + data if self._rest else data
        at, end = 0, len(data)
        while end - at >= HEADER.size:
            kind, priority, block, number, client, rows, length, left_s = HEADER.unpack_from(data, at)
            if kind not in KINDS or length > self._largest_body:
                self._rest = b""
                raise GarbledRecord(f"a record of kind {kind} with a body of {length:,} bytes")
            if (lacking := length - (end - at - HEADER.size)) > 0:
                self._lacking = lacking
                break
            at += HEADER.size
            body: Any = None
            if length:
                body, at = data[at : at + length], at + length
                if kind not in TYPED:
                    try:
                        body = msgspec.msgpack.decode(body)
                    except Exception as error:  # whatever somebody sends
                        raise GarbledRecord("a body that is not msgpack") from error
            yield WireRecord(kind, priority, block, number, client, rows, left_s, body)
        self._rest = data[at:]


def group_of(value: Any) -> Hashable:
    """A request's group as it was before it travelled: a tuple arrives as a list. Raises `TypeError` for none."""
    group = tuple(map(group_of, value)) if isinstance(value, list) else value
    hash(group)
    return group


LARGEST_BEGUN = 16 << 20  # what its answer may add to that when it is asked again


class TextRequest(Struct, frozen=True, array_like=True):
    """The body of a client's request for text."""

    prompt: Prompt
    group: Any = None  # a hashable value; a tuple arrives as a list
    parts: bool = False  # the answer is read as it grows


_encoder = msgspec.msgpack.Encoder()
_request, _generation = msgspec.msgpack.Decoder(TextRequest), msgspec.msgpack.Decoder(Generation)
_part = msgspec.msgpack.Decoder(Part)


def request_to_wire(prompt: Any, group: Any, parts: bool = False, *, most: int = LARGEST_PROMPT) -> bytes:
    """Raises `BadPrompt` for what cannot travel, or has more than `most` bytes."""
    return packed_prompt(prompt, TextRequest(prompt, group, parts), most)


def request_from_wire(data: bytes) -> TextRequest:
    """Raises `BadPrompt` for what is none."""
    try:
        return _request.decode(data)
    except UNFIT as error:
        raise BadPrompt(f"this is no prompt: {error}. Correct it.") from error


def generation_to_wire(generation: Generation) -> bytes:
    """Raises `BackendError` for one that is too large to travel, or none."""
    return packed_answer(generation)


def generation_from_wire(data: bytes) -> Generation | BackendError:
    """What has arrived; an error in its place when it is no answer."""
    try:
        return _generation.decode(data)
    except UNFIT as error:
        return BackendError(f"the central server sent no answer: {error}. Let both ends run the same version.")


def part_to_wire(part: Part) -> bytes:
    return _encoder.encode(part)


def part_from_wire(data: bytes) -> Part | BackendError:
    """What has arrived; an error in its place when it is no part."""
    try:
        return _part.decode(data)
    except UNFIT as error:
        return BackendError(f"the central server sent no part of an answer: {error}. Let both ends run one version.")


class WeightsChange(Struct, frozen=True):
    """As `Backend.update`; without `weights` as `Backend.unload` of `adapter`."""

    version: str = ""
    weights: str | None = None
    adapter: str | None = None
    drain: bool = True


def changes_to_replay(
    changes: Sequence[WeightsChange], change: WeightsChange, at_start: Collection[str]
) -> list[WeightsChange]:
    """The changes that a server which is started again must repeat, after one more change. `at_start`: the adapters of
    every start, by name and by name with version.
    """

    def is_replaced(one: WeightsChange) -> bool:
        """By another version of the adapter of `change`; None: of the model itself."""
        if one.weights is not None:
            return one.adapter == change.adapter
        return _name_of(one.adapter) == change.adapter and one.adapter not in at_start

    if change.weights is not None:  # no later request asks for an older version of the same
        return [*(one for one in changes if not is_replaced(one)), change]
    asked = change.adapter or ""
    name = _name_of(asked)
    if asked == name:
        return [*(one for one in changes if _name_of(one.adapter) != name), *([change] if name in at_start else [])]
    if name not in at_start:
        return [one for one in changes if _label(one) != asked]
    there = asked in at_start or any(_label(one) == asked for one in changes)
    return [*(one for one in changes if one != change), *([change] if there else [])]


def _name_of(asked: str | None) -> str | None:
    """`policy` of `policy@v7`."""
    return asked if asked is None else asked.partition("@")[0]


def _label(one: WeightsChange) -> str | None:
    """`policy@v7`, of a change that loads it."""
    return None if one.adapter is None or one.weights is None else f"{one.adapter}@{one.version}"
