"""Server-sent events of a streamed answer, as OpenAI has them, and the tokens of each for a router to go on from.

Behind a router each event that says something of a sample begins with a line `id: SAMPLE.TOKEN,TOKEN,…`, which ends in
`!` with the sample's finish reason. Whoever has these lines knows exactly what its client has been sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from gpuinfer.errors import BadPrompt
from gpuinfer.generation import Generation, Part
from gpuinfer.openai.requests import BadRequest
from gpuinfer.openai.responses import Chunks

CONTENT_TYPE = "text/event-stream; charset=utf-8"
HEADERS = (("Cache-Control", "no-cache"), ("X-Accel-Buffering", "no"))
DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class Begun(msgspec.Struct, forbid_unknown_fields=True):
    """What the client has been sent of one sample already."""

    tokens: tuple[int, ...] = ()
    ended: bool = False


_begun: msgspec.json.Decoder[dict[str, Begun]] = msgspec.json.Decoder(dict[str, Begun])


class Events:
    """The events of one response. `begun`: of each sample what an earlier attempt has sent, which is not said again."""

    def __init__(self, chunks: Chunks, numbered: bool, begun: Mapping[int, Begun] | None = None) -> None:
        self._chunks, self._numbered = chunks, numbered
        self._over = {sample for sample, one in (begun or {}).items() if one.ended}
        for sample, one in (begun or {}).items():
            chunks.taken_up(sample, len(one.tokens), one.ended)

    def of(self, part: Part) -> bytes:
        """Those of a part, as one piece; it may be empty."""
        if part.sample in self._over:
            return b""
        return b"".join([self._event(chunk, part.tokens) for chunk in self._chunks.of(part)])

    def end(self, answers: Generation) -> bytes:
        """The last: what no part has said, the usage, and that nothing follows."""
        said = self._numbered_end(answers) if self._numbered else map(_event, self._chunks.end(answers))
        return b"".join([*said, DONE])

    def _numbered_end(self, answers: Generation) -> Iterator[bytes]:
        for chunk in self._chunks.end(answers):
            sample = chunk["choices"][0]["index"] if chunk["choices"] else 0
            yield self._event(chunk, answers.completions[sample].tokens)  # all of it: where there were no parts

    def _event(self, chunk: dict[str, Any], tokens: tuple[int, ...]) -> bytes:
        if not (self._numbered and chunk["choices"]):
            return _event(chunk)
        (choice,) = chunk["choices"]
        told = ",".join(map(str, tokens)) if _says(choice) else ""
        end = "!" if choice["finish_reason"] is not None else ""
        return b"id: %d.%s%s\n%s" % (choice["index"], told.encode(), end.encode(), _event(chunk))


def _says(choice: dict[str, Any]) -> bool:
    """Whether it is the chunk with a part's tokens: not the role before it, nor the end after it."""
    return "text" in choice or ("content" in choice["delta"] and "role" not in choice["delta"])


def _event(chunk: Any) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def error_event(body: bytes) -> bytes:
    """An error in the midst of a stream, and that nothing follows."""
    return b"data: " + body + b"\n\n" + DONE


def split_begun(body: bytes, length: int) -> tuple[dict[int, Begun] | None, bytes]:
    """What an earlier attempt has sent, and the request's own body. Raises `BadRequest`."""
    if not length:
        return None, body
    try:
        found = _begun.decode(body[:length]) if length <= len(body) else None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = None
    if found is None or not all(name.isdecimal() and len(name) < 10 for name in found):
        raise BadRequest("what has been sent already is not understood. Leave X-Gpuinfer-Begun out.")
    return {int(name): one for name, one in found.items()}, body[length:]


def tokens_begun(begun: Mapping[int, Begun], samples: int) -> tuple[tuple[int, ...], ...]:
    """Of each sample the tokens that are known. Raises `BadPrompt` for samples that nobody asked for."""
    if any(sample >= samples for sample in begun):
        raise BadPrompt(f"something has been sent of a sample that was not asked for: there are {samples}.")
    return tuple(begun[sample].tokens if sample in begun else () for sample in range(samples))
