"""What travels on a client's socket: records of a fixed size, some followed by a msgpack body.

Rows and answers never do: they lie in the client's blocks of shared memory, and a record only says which. Prompts and
what a model of text makes of them are bodies.

Prompts and their answers as they travel: msgpack of known types and bounded size.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgpack
import msgspec
from msgspec import Struct

from gpuinfer.errors import BackendError, BadPrompt
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.text.frames import LARGEST_PROMPT, UNFIT, packed_answer, packed_prompt

VERSION = 5
HEADER = struct.Struct("<BBHIIIId")  # in the order of Record's fields, then the bytes of the body and `left_s`
LARGEST_BODY = 1 << 20  # bytes: checked before the memory is taken
NOBODY = 0xFFFFFFFF  # as the client of a request: nobody says who asks


class Kind(enum.IntEnum):
    """What a record says."""

    # from a client
    HELLO = 1  # body: token, version, client: whose line it is, the same bytes each time that one comes back
    BLOCK = 2  # from now on this is block number `block`, room for `rows` rows; its descriptor travels along
    ASK = 3  # answer the first `rows` rows of `block`; body, if any: group
    CANCEL = 4  # nobody wants the answer to request `number` any more
    PROMPT = 9  # go on with a prompt, `rows` samples; body: `TextRequest`
    # from the server
    WELCOME = 5  # body: what it serves; the descriptor of its pulse travels along
    ANSWER = 6  # the answer to request `number` lies in its block
    FAILED = 7  # request `number` failed; body: error
    GOODBYE = 8  # this client is not served, or not any more; body: error
    GENERATION = 10  # the answer to request `number`; body: `generation.Generation`
    PART = 11  # of the answer to request `number`, which grows; body: `generation.Part`


KINDS = frozenset(Kind)
TYPED = frozenset({Kind.PROMPT, Kind.GENERATION, Kind.PART})  # their bodies are bytes here: others know their types


class Record(NamedTuple):
    """One record. Fields that its kind does not need are 0."""

    kind: int
    priority: int = 0
    block: int = 0
    number: int = 0
    client: int = 0
    rows: int = 0
    left_s: float = (
        0.0  # to the deadline: times that two processes mean by the same clock reading would not be portable
    )
    body: Any = None


def hello(token: bytes, client: bytes) -> Record:
    """A client's greeting."""
    return Record(Kind.HELLO, body={"token": token, "version": VERSION, "client": client})


class Garbled(Exception):
    """The other end does not speak this protocol."""


def pack(record: Record) -> bytes:
    kind, priority, block, number, client, rows, left_s, body = record
    if body is None:
        return HEADER.pack(kind, priority, block, number, client, rows, 0, left_s)
    packed = body if kind in TYPED else msgpack.packb(body)
    return HEADER.pack(kind, priority, block, number, client, rows, len(packed), left_s) + bytes(packed)


class Unpacker:
    """Records out of a stream of bytes that arrive in pieces."""

    __slots__ = ("_lacking", "_largest_body", "_pieces", "_rest")

    def __init__(self, largest_body: int = LARGEST_BODY) -> None:
        self._rest = b""
        self._pieces: list[bytes] = []  # of a large body, until they are `_lacking` bytes more
        self._lacking = 0
        self._largest_body = largest_body

    def feed(self, data: bytes) -> Iterator[Record]:
        """The records that are complete now. Raises `Garbled`."""
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
                raise Garbled(f"a record of kind {kind} with a body of {length:,} bytes")
            if (lacking := length - (end - at - HEADER.size)) > 0:
                self._lacking = lacking
                break
            at += HEADER.size
            body = None
            if length:
                body = data[at : at + length] if kind in TYPED else _body(data[at : at + length])
                at += length
            yield Record(kind, priority, block, number, client, rows, left_s, body)
        self._rest = data[at:]


def _body(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, strict_map_key=False)
    except Exception as error:
        raise Garbled("a body that is not msgpack") from error


LARGEST_BEGUN = 16 << 20  # what its answer may add to that when it is asked again


class TextRequest(Struct, frozen=True, array_like=True):
    """What a client sends with a request."""

    prompt: Prompt
    group: Any = None  # a hashable value; a tuple arrives as a list
    parts: bool = False  # the answer is read as it grows


_encoder = msgspec.msgpack.Encoder()
_asked, _generation = msgspec.msgpack.Decoder(TextRequest), msgspec.msgpack.Decoder(Generation)
_part = msgspec.msgpack.Decoder(Part)


def asked_to_wire(prompt: Any, group: Any, parts: bool = False, *, most: int = LARGEST_PROMPT) -> bytes:
    """Raises `BadPrompt` for what cannot travel, or has more than `most` bytes."""
    return packed_prompt(prompt, TextRequest(prompt, group, parts), most)


def asked_from_wire(data: bytes) -> TextRequest:
    """Raises `BadPrompt` for what is none."""
    try:
        return _asked.decode(data)
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
