"""A prompt and its answer as bodies of `/v1/generations`: msgpack, the answer in frames as it grows; and the part of an
answer that has been delivered, from which another server can go on. A frame is its length, 4 bytes little-endian, and
msgpack of `[kind, payload]`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Raw, structs

from gpuinfer.errors import BackendError, BadPrompt, GpuinferError
from gpuinfer.generation import Generation, Part, Prompt
from gpuinfer.host.error_text import error_from_wire, error_to_wire

PROMPT_TYPE = "application/msgpack"
FRAMES_TYPE = "application/x-gpuinfer-frames"
LARGEST_PROMPT = 16 << 20  # bytes, encoded
LARGEST_FRAME = 256 << 20
UNFIT = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)

_length = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
_prompt = msgspec.msgpack.Decoder(Prompt)
_frame = msgspec.msgpack.Decoder(tuple[str, Raw])
_part, _done = msgspec.msgpack.Decoder(Part), msgspec.msgpack.Decoder(Generation)
_error = msgspec.msgpack.Decoder(dict[str, Any])

News = Part | Generation | GpuinferError


def no_prompt(payload: object) -> BackendError:
    """The error of a request whose payload is something else."""
    return BackendError(
        f"a payload is a {type(payload).__name__}, but this model continues prompts. Submit gpuinfer.generation.Prompt."
    )


def packed_prompt(prompt: Any, asked: Any, most: int = LARGEST_PROMPT) -> bytes:
    """msgpack of `asked`, which is the prompt or holds it. Raises `BadPrompt` for what cannot travel, or has more bytes
    than `most`.
    """
    if not isinstance(prompt, Prompt):
        raise no_prompt(prompt)
    try:
        data = _encoder.encode(asked)
    except UNFIT as error:
        raise BadPrompt(f"this prompt cannot travel to a server: {error}. Correct it.") from error
    if len(data) > most:
        raise BadPrompt(f"this prompt has {len(data):,} bytes, and at most {most:,} travel to a server. Shorten it.")
    return data


def packed_answer(answer: Any) -> bytes:
    """msgpack of an answer, or of what holds it. Raises `BackendError` for one that is none, or too large to travel."""
    try:
        data = _encoder.encode(answer)
    except UNFIT as error:
        raise BackendError(f"this answer cannot travel: {error}. Use the backend inprocess.") from error
    if len(data) > LARGEST_FRAME:
        raise BackendError(
            f"this answer has {len(data):,} bytes, and at most {LARGEST_FRAME:,} travel from a server. "
            "Ask for fewer logprobs or samples at once."
        )
    return data


def prompt_to_body(prompt: Any) -> bytes:
    """Raises `BadPrompt` for what cannot travel."""
    return packed_prompt(prompt, prompt)


def prompt_from_body(body: bytes) -> Prompt:
    """Raises `BadPrompt` for what is none."""
    if len(body) > LARGEST_PROMPT:
        raise BadPrompt(f"a prompt of {len(body):,} bytes: at most {LARGEST_PROMPT:,} are read. Shorten it.")
    try:
        return _prompt.decode(body)
    except UNFIT as error:
        raise BadPrompt(f"this is no prompt: {error}. Send msgpack of gpuinfer.generation.Prompt.") from error


def to_frame(news: News) -> bytes:
    """Raises `BackendError` for an answer that is none, or too large to travel."""
    kind = "part" if isinstance(news, Part) else "error" if isinstance(news, GpuinferError) else "done"
    data = packed_answer((kind, error_to_wire(news) if isinstance(news, GpuinferError) else news))
    return _length.pack(len(data)) + data


class Unframer:
    """News out of a stream of bytes that arrive in pieces."""

    __slots__ = ("_have", "_pieces", "_want")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []  # joined only once they are a frame: a large one comes in many
        self._have, self._want = 0, _length.size

    def feed(self, data: bytes) -> list[News]:
        """What is complete now. Raises `BackendError` for bytes that are no frames."""
        self._pieces.append(data)
        self._have += len(data)
        if self._have < self._want:
            return []
        return list(self._complete(b"".join(self._pieces)))

    def _complete(self, data: bytes) -> Iterator[News]:
        at = 0
        while len(data) - at >= _length.size:
            (size,) = _length.unpack_from(data, at)
            if size > LARGEST_FRAME:
                raise BackendError(f"a frame of {size:,} bytes: the server speaks otherwise. {_CURE}")
            self._want = _length.size + size
            if len(data) - at < self._want:
                break
            yield _news(data[at + _length.size : at + self._want])
            at += self._want
            self._want = _length.size
        self._pieces, self._have = [data[at:]], len(data) - at


def _news(data: bytes) -> News:
    try:
        kind, payload = _frame.decode(data)
        if kind == "part":
            return _part.decode(payload)
        if kind == "done":
            return _done.decode(payload)
        if kind == "error":
            return error_from_wire(_error.decode(payload))
    except UNFIT as error:
        raise BackendError(f"the server sent no answer: {error}. {_CURE}") from error
    raise BackendError(f"the server sent a frame of kind '{kind[:40]}', which nobody knows here. {_CURE}")


_CURE = "Let both ends run the same version of gpuinfer."


class DeliveredAnswer:
    """The parts of one request that have been passed on."""

    def __init__(self, prompt: Prompt) -> None:
        self._prompt = prompt
        self._tokens = [list(tokens) for tokens in prompt.begun] or [list[int]() for _ in range(prompt.samples)]
        self._versions = [list(spans) for spans in prompt.begun_versions] or [[] for _ in range(prompt.samples)]
        self._processed = [list(one) for one in prompt.begun_processed] or [[] for _ in range(prompt.samples)]
        self._whole: set[int] = set()  # samples whose last part has been passed on

    def fresh(self, part: Part) -> Part | None:
        """This part, passed on; None where its sample is whole: a server that has come back says the end again.

        Raises `BackendError` for a sample that nobody has asked for.
        """
        if not 0 <= part.sample < len(self._tokens):
            raise BackendError(f"the server answered sample {part.sample}, which nobody asked for.")
        if part.sample in self._whole:
            return None
        self._tokens[part.sample] += part.tokens
        known = self._versions[part.sample]
        known += [span for span in part.versions if not known or span[0] > known[-1][0]]
        self._processed[part.sample] += part.processed or ()
        if part.finish_reason is not None:
            self._whole.add(part.sample)
        return part

    def rest(self) -> Prompt:
        """What asks for all that has not come yet; the very prompt, where nothing has."""
        if not any(self._tokens):
            return self._prompt
        return structs.replace(
            self._prompt,
            begun=tuple(map(tuple, self._tokens)),
            begun_versions=tuple(map(tuple, self._versions)) if any(self._versions) else (),
            begun_processed=tuple(map(tuple, self._processed)) if any(self._processed) else (),
        )
