"""From a piece of the input to what is asked of the model, or to why that cannot be."""

from __future__ import annotations

import difflib
import functools
import re
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.errors import BadPrompt, GpuinferError
from gpuinfer.generation import Prompt, Rendering, Sampling
from gpuinfer.workloads.generate.asking import Body, Drawing, LooseBody, LooseRow, Row
from gpuinfer.workloads.generate.checking import (
    MOST_SHOWN,
    BadRow,
    field_of,
    of_chats,
    one_of,
    refuse_body,
    refuse_wishes,
)
from gpuinfer.workloads.generate.overrides import changes, rendering, says_nothing
from gpuinfer.workloads.generate.splitting import Content, Piece, Unusable

KINDS = {"prompt": "completion", "messages": "chat"}
UNKNOWN = re.compile(r"unknown field `(.*)`", re.S)
UTF_16 = (b"\xff\xfe", b"\xfe\xff")  # its byte order marks
HIGH, LOW = rb"\\u[dD][89abAB][0-9a-fA-F]{2}", rb"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
HALF = re.compile(b"%s(?!%s)|(?<!%s)%s" % (HIGH, LOW, HIGH, LOW))  # a lone surrogate


class Asked(Struct, kw_only=True, gc=False):
    """One row as it is understood. Either `prompt` or `error` is set; the prompt has no key yet."""

    prompt: Prompt | None = None
    error: GpuinferError | None = None
    line: int = 0  # of the input, that it begins on
    content: bytes = b""  # what tells it from others, but for its id
    id: str | int | None = None  # as it was given
    openai: str | None = None  # completion or chat, for a request of the batch format
    model: str | None = None  # that a batch request named
    metadata: dict[str, Any] | None = None


@dataclass(frozen=True)
class Defaults:
    """What the flags say, for rows that say nothing else."""

    sampling: Sampling = field(default_factory=Sampling)
    rendering: Rendering = field(default_factory=Rendering)
    samples: int = 1
    truncate: Any = None
    strict: bool = True


class Reader:
    """Understands rows. Never raises: what cannot be asked comes back as an error of its row."""

    def __init__(self, defaults: Defaults) -> None:
        self._defaults = defaults
        self._plain = Prompt(sampling=defaults.sampling, samples=defaults.samples, truncate=defaults.truncate)
        row, body = (Row, Body) if defaults.strict else (LooseRow, LooseBody)
        self._row: Any = msgspec.json.Decoder(str | row)
        self._body: Any = msgspec.json.Decoder(body)
        self._encode = msgspec.msgpack.Encoder(order="deterministic").encode

    def read(self, piece: Piece) -> Asked:
        line, content = piece
        try:
            asked = self._read(content)
        except Exception as error:  # noqa: BLE001 - whatever is odd about one row must not end all others
            why = BadRow(f"the row cannot be used ({type(error).__name__}: {error}). Write it with plain values.")
            asked = Asked(error=why, content=b"unusable" + (content if isinstance(content, bytes) else content.content))
        asked.line = line
        return asked

    def _read(self, piece: Content) -> Asked:
        if isinstance(piece, Unusable):
            return Asked(error=BadRow(piece.why), content=b"unusable" + piece.content)
        try:
            row = self._row.decode(piece)
        except (ValueError, RecursionError) as error:
            return Asked(error=_unreadable(error, Row, piece), content=b"unreadable" + piece, id=_id_of(piece))
        if isinstance(row, str):
            row = Row(prompt=row)
        if row.body or row.custom_id is not None or row.url is not None:
            return self._request(row, piece)
        try:
            refuse_wishes(row)
            return self._asked(row, row, row.prompt_token_ids, Asked(id=row.id, metadata=row.metadata))
        except BadPrompt as error:
            return Asked(error=error, content=b"refused" + piece, id=row.id)

    def _request(self, row: Row, piece: bytes) -> Asked:
        """A request of the batch format."""
        asked = Asked(id=row.custom_id if row.custom_id is not None else row.id, openai="completion")
        try:
            refuse_wishes(row)
            field = field_of(row)
            asked.openai = KINDS[field]
            body = self._body.decode(row.body)
            asked.model = body.model
            refuse_body(body, field)
            return self._asked(body, body, None, asked)
        except (ValueError, RecursionError) as error:
            failure: BadPrompt = _unreadable(error, Body, piece)
        except BadPrompt as error:
            failure = error
        asked.error, asked.content = failure, b"refused" + piece
        return asked

    def _asked(self, row: Any, drawing: Drawing, tokens: list[int] | None, asked: Asked) -> Asked:
        """`asked` with its prompt. Raises `BadPrompt`."""
        text = row.prompt
        if type(text) is not str or tokens is not None or row.messages is not None:
            text, tokens = one_of(row.prompt, tokens, row.messages)
        written = self._defaults.rendering
        if says_nothing(drawing):
            own: dict[str, Any] = {}
            sampling, samples, truncate, special = self._defaults.sampling, self._defaults.samples, None, True
        else:
            own = changes(drawing)
            sampling = msgspec.structs.replace(self._defaults.sampling, **own) if own else self._defaults.sampling
            samples, truncate = drawing.n or self._defaults.samples, drawing.truncate
            special = drawing.add_special_tokens is not False
            if of_chats(drawing, row.messages is not None):
                written = rendering(drawing, written)
                own["rendering"] = msgspec.to_builtins(written)
        asked.prompt = Prompt(
            text=text,
            tokens=None if tokens is None else tuple(tokens),
            messages=None if row.messages is None else tuple(row.messages),
            rendering=written,
            sampling=sampling,
            samples=samples,
            truncate=truncate or self._defaults.truncate,
            special_tokens=special,
        )
        if "logit_bias" in own:
            own["logit_bias"] = sorted(own["logit_bias"].items())
        wishes = (own, drawing.n, truncate, special) if own or drawing.n or truncate or not special else None
        asked.content = self._content((text, tokens, row.messages, wishes, asked.openai, asked.metadata))
        return asked

    def _content(self, whole: tuple[Any, ...]) -> bytes:
        try:
            return self._encode(whole)
        except OverflowError:  # msgpack ends at 64 bits, JSON does not
            return b"json" + msgspec.json.encode(whole, order="deterministic")


def _unreadable(error: BaseException, row: type[Struct], piece: bytes) -> BadRow:
    """What is wrong with a row, in a sentence with the cure."""
    if isinstance(error, RecursionError):
        return BadRow("the row is nested too deeply. Make it flatter.")
    if b"\0" in piece or piece.startswith(UTF_16):
        return BadRow("the row is not UTF-8; it looks like UTF-16. Save the file as UTF-8.")
    if isinstance(error, UnicodeDecodeError):
        return BadRow(f"the row is not UTF-8 ({error.reason}). Save the file as UTF-8.")
    if unknown := UNKNOWN.search(str(error)):
        return BadRow(_unknown(unknown.group(1)[:MOST_SHOWN], row))
    if isinstance(error, msgspec.ValidationError):
        return BadRow(f"{error}. Correct it.")
    if HALF.search(piece):
        return BadRow(
            "an escape \\ud800 to \\udfff stands alone, which is half of a character. Write whole characters."
        )
    return BadRow(f"the row is not JSON: {error}. Write one JSON object a line.")


@functools.lru_cache(256)
def _unknown(name: str, row: type[Struct]) -> str:
    near = difflib.get_close_matches(name, row.__struct_fields__, n=1, cutoff=0.5)
    hint = f" Did you mean `{near[0]}`?" if near else ""
    return f"there is no field `{name}`.{hint} Take it out, put it under `metadata`, or add --no-strict."


class _Named(Struct):
    id: str | int | None = None
    custom_id: str | None = None


def _id_of(piece: bytes) -> str | int | None:
    """The id of a row that is wrong elsewhere, so that its error can be told whose it is."""
    try:
        named = msgspec.json.decode(piece, type=_Named)
    except (ValueError, RecursionError):
        return None
    return named.id if named.custom_id is None else named.custom_id
