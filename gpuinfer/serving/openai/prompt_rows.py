"""Rows of a file of prompts: our own, and requests in the form of OpenAI's batches.

`PromptRowReader` parses one row, `prompts_of` reads a small file whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.config.model_names import listed_names, meant_names
from gpuinfer.errors import BadPrompt, GpuinferError, UsageError
from gpuinfer.generation import Prompt
from gpuinfer.host import error_text
from gpuinfer.serving.openai.requests import (
    MOST_SHOWN,
    URLS,
    BadRequest,
    PromptDefaults,
    RequestReader,
    parse_prompt,
    refuse_unsupported,
    unreadable,
)
from gpuinfer.serving.openai.row_files import pieces_of
from gpuinfer.serving.openai.row_splitter import (
    CHAT_FIELDS,
    TEXT_FIELDS,
    Content,
    Piece,
    Unusable,
)
from gpuinfer.serving.openai.schema import InputRow, LooseRow

LOOSE = ", put it under `metadata`, or add --no-strict"  # with a field that is not known


class ParsedRow(Struct, kw_only=True, gc=False):
    """A parsed row. Either `prompt` or `error` is set; the prompt has no key yet."""

    prompt: Prompt | None = None
    error: GpuinferError | None = None
    line: int = 0  # of the input, that it begins on
    content: bytes = b""  # what distinguishes it from others, but for its id
    id: str | int | None = None  # as it was given
    openai: str | None = None  # completion or chat, for a request of the batch format
    model: str | None = None  # that answers it, of several; or that a batch request named
    metadata: dict[str, Any] | None = None
    raw: Content = b""  # as it stands in the input


class PromptRowReader:
    """Parses rows. Never raises: a malformed row comes back with its error. `cure`: what else helps against a field
    that is not known. `models`: the names of several, of which each row names one.
    """

    def __init__(self, defaults: PromptDefaults, cure: str = LOOSE, models: Collection[str] = ()) -> None:
        self._models = models
        self._defaults, self._cure, self._requests = defaults, cure, RequestReader(defaults, cure=cure)
        self._row: Any = msgspec.json.Decoder(str | (InputRow if defaults.strict else LooseRow))
        self._encode = msgspec.msgpack.Encoder(order="deterministic").encode

    def read(self, piece: Piece) -> ParsedRow:
        line, content = piece
        try:
            asked = self._read(content)
        except Exception as error:  # noqa: BLE001 - whatever is odd about one row must not end all others
            why = f"the row cannot be used ({error_text.full_message(error)}). Write it with plain values."
            odd = content if isinstance(content, bytes) else content.content
            asked = ParsedRow(error=BadRequest(why), content=b"unusable" + odd)
        asked.line, asked.raw = line, content
        return asked

    def _read(self, piece: Content) -> ParsedRow:
        if isinstance(piece, Unusable):
            return ParsedRow(error=BadRequest(piece.why), content=b"unusable" + piece.content)
        try:
            row = self._row.decode(piece)
        except (ValueError, RecursionError) as error:
            why = _misnamed(piece) or unreadable(error, InputRow, piece, "row", self._cure)
            named = _Named()
            with contextlib.suppress(ValueError, RecursionError):
                named = msgspec.json.decode(piece, type=_Named)
            id = named.id if named.custom_id is None else named.custom_id
            return ParsedRow(error=why, content=b"unreadable" + piece, id=id)
        if isinstance(row, str):
            row = InputRow(prompt=row)
        is_request = bool(row.body) or row.custom_id is not None or row.url is not None
        asked = ParsedRow(id=row.id, metadata=row.metadata)
        if is_request:  # a completion, unless its url says that it is a chat
            asked = ParsedRow(id=row.id if row.custom_id is None else row.custom_id, openai="completion")
        try:
            refuse_unsupported(row)
            if is_request:
                if row.url not in URLS:
                    raise BadRequest(
                        f"no requests of url {_short(row.url)} are answered. Choose from {', '.join(URLS)}."
                    )
                if row.method not in (None, "POST"):
                    raise BadRequest(f"a request of method {_short(row.method)} asks nothing. Write POST.")
                if not row.body:
                    raise BadRequest("the request has no body. Give one.")
                if row.adapter is not None:
                    reason = "a request of OpenAI's form names no adapter beside its body. Leave it out."
                    raise BadRequest(reason, "adapter")
                asked.openai = "chat" if URLS[row.url] == "messages" else "completion"
                found = self._requests.read(row.body, row.url)
                asked.prompt, asked.model = found.prompt, found.model
                asked.content = self._content((*found.said, asked.openai, None))
            else:
                asked.prompt, said = parse_prompt(row, row.prompt_token_ids, self._defaults)
                asked.content = self._content((*said, None, row.metadata))
                if row.adapter is not None:
                    asked.content += b"adapter" + row.adapter.encode()
            self._choose(asked, row)
            if (adapter := self._defaults.adapter if row.adapter is None else row.adapter) and asked.prompt:
                asked.prompt = msgspec.structs.replace(asked.prompt, adapter=adapter)
        except BadPrompt as error:
            error = _misnamed(piece) or error
            asked.error, asked.metadata, asked.content = error, None, b"refused" + piece
        return asked

    def _choose(self, parsed: ParsedRow, row: InputRow) -> None:
        """The model that answers. Raises `BadRequest`."""
        if not self._models:
            if row.model is not None:
                why = f"the row names the model '{row.model[:MOST_SHOWN]}', and here is one model for all rows."
                raise BadRequest(f"{why} Leave `model` out, or give --model NAME=…,NAME=….", "model")
            return
        named = parsed.model if row.model is None else row.model
        if named is None and isinstance(of_table := (row.metadata or {}).get("model"), str):
            named = of_table  # a column that is called so
        if named is None:
            raise BadRequest(f"which model? Name one of {listed_names([*self._models])} as `model`.", "model")
        found = meant_names(named, self._models)
        if len(found) != 1:
            what = f"'{named[:MOST_SHOWN]}' {'may be several models' if found else 'is no model'} here"
            raise BadRequest(f"{what}. Name one of {listed_names(found or [*self._models])} as `model`.", "model")
        parsed.model = found[0]
        parsed.content += b"model" + found[0].encode()

    def _content(self, whole: tuple[Any, ...]) -> bytes:
        try:
            return self._encode(whole)
        except OverflowError:  # msgpack ends at 64 bits, JSON does not
            return b"json" + msgspec.json.encode(whole, order="deterministic")


def prompts_of(path: Path, flag: str, *, strict: bool = True) -> Iterator[Prompt]:
    """The prompts of a file as `generate` takes it, one after the other.

    Raises `UsageError`, which names the flag that named the file, for a row that cannot be asked and a file that cannot
    be read.
    """
    reader = PromptRowReader(PromptDefaults(strict=strict))
    for number, piece in enumerate(pieces_of(path, f"{flag} {path}"), 1):
        asked = reader.read(piece)
        if asked.prompt is None:
            raise UsageError(f"{flag} {path}, row {number}: {asked.error}")
        yield asked.prompt


def _short(value: str | None) -> str:
    return "none" if value is None else f"'{value[:MOST_SHOWN]}'"


def _misnamed(piece: bytes) -> BadRequest | None:
    """The error of a row that has its prompt or its chat under another name; None for any other row."""
    try:
        row = msgspec.json.decode(piece, type=dict[str, msgspec.Raw])
    except (ValueError, RecursionError):
        return None
    if not row.keys().isdisjoint(("prompt", "prompt_token_ids", "messages", "body")):
        return None
    for wanted, others in (("prompt", TEXT_FIELDS), ("messages", CHAT_FIELDS)):
        for name in others:
            if name in row:
                return BadRequest(f"the row has `{name}` where `{wanted}` is read. Rename it to `{wanted}`.", name)
    return None


class _Named(Struct):
    id: str | int | None = None
    custom_id: str | None = None
