"""Prompts and their answers as they travel: msgpack of known types and bounded size."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.errors import BackendError, BadPrompt
from gpuinfer.generation import Generation, Prompt

LARGEST_PROMPT = 16 << 20  # bytes, encoded
LARGEST_ANSWER = 256 << 20


class Asked(Struct, frozen=True, array_like=True):
    """What a client sends with a request."""

    prompt: Prompt
    group: Any = None  # a hashable value; a tuple arrives as a list


_encoder = msgspec.msgpack.Encoder()
_asked, _generation = msgspec.msgpack.Decoder(Asked), msgspec.msgpack.Decoder(Generation)
UNFIT = (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError)


def asked_to_wire(prompt: Any, group: Any) -> bytes:
    """Raises `BadPrompt` for what cannot travel."""
    if not isinstance(prompt, Prompt):
        raise BackendError(
            f"a payload is a {type(prompt).__name__}, but this model continues prompts. "
            "Submit gpuinfer.generation.Prompt."
        )
    try:
        data = _encoder.encode(Asked(prompt, group))
    except UNFIT as error:
        raise BadPrompt(f"this prompt cannot travel to a server: {error}. Correct it.") from error
    if len(data) > LARGEST_PROMPT:
        raise BadPrompt(
            f"this prompt has {len(data):,} bytes, and at most {LARGEST_PROMPT:,} travel to a server. Shorten it."
        )
    return data


def asked_from_wire(data: bytes) -> Asked:
    """Raises `BadPrompt` for what is none."""
    try:
        return _asked.decode(data)
    except UNFIT as error:
        raise BadPrompt(f"this is no prompt: {error}. Correct it.") from error


def generation_to_wire(generation: Generation) -> bytes:
    """Raises `BackendError` for one that is too large to travel, or none."""
    try:
        data = _encoder.encode(generation)
    except UNFIT as error:
        raise BackendError(f"this answer cannot travel: {error}. Use the backend inprocess.") from error
    if len(data) > LARGEST_ANSWER:
        raise BackendError(
            f"this answer has {len(data):,} bytes, and at most {LARGEST_ANSWER:,} travel from a server. "
            "Ask for fewer logprobs or samples at once."
        )
    return data


def generation_from_wire(data: bytes) -> Generation | BackendError:
    """What has arrived; an error in its place when it is no answer."""
    try:
        return _generation.decode(data)
    except UNFIT as error:
        return BackendError(f"the central server sent no answer: {error}. Let both ends run the same version.")
