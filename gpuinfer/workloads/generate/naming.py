"""Names for rows that do not depend on where they stand: ids, keys of random numbers, and digests for going on."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from gpuinfer.errors import GpuinferError
from gpuinfer.generation import Prompt
from gpuinfer.openai.requests import BadRequest
from gpuinfer.openai.rows import AskedRow
from gpuinfer.workloads.generate.seen import KEY_BYTES, Seen

NOTHING = Prompt()
PREFIX = "row-"  # of an id that is made from a row's content


class NamedRow(Struct, kw_only=True, gc=False):
    """A row with its names, to be asked unless it has an error."""

    number: int  # its place among the rows of the input, from 1: only for people, as is
    line: int  # the line of the input that it begins on
    place: int = 0  # among the rows that are written, for output in order
    id: str | int
    digest: str  # of its id, its content, the settings and the model: what has it is the same answer
    prompt: Prompt
    error: GpuinferError | None = None
    openai: str | None = None
    model: str | None = None
    metadata: dict[str, Any] | None = None


class Namer:
    """Names rows in their order, and remembers those that came before at 12 bytes each.

    `settings` are all that decides what an answer is, the model's fingerprint included. A row without an id is named by
    its content and by how many of the same came before it.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        text = msgspec.json.encode(settings, order="deterministic")
        self._salted = hashlib.blake2b(hashlib.blake2b(text).digest(), digest_size=KEY_BYTES)
        self._seen = Seen()
        self._number = 0

    def name(self, rows: Sequence[AskedRow]) -> list[NamedRow]:
        keys = [_key(row) for row in rows]
        return [
            self._named(row, key, before) for row, key, before in zip(rows, keys, self._seen.count(keys), strict=True)
        ]

    def _named(self, row: AskedRow, key: bytes, before: int) -> NamedRow:
        self._number += 1
        error, name = row.error, row.id
        if name is None:
            name = f"{PREFIX}{key.hex()}-{before + 1}" if before else PREFIX + key.hex()
        elif before:
            error = BadRequest(f"the id '{str(name)[:100]}' has come before. Give each row an id of its own.")
        prompt = row.prompt or NOTHING
        if row.prompt is not None:
            msgspec.structs.force_setattr(prompt, "key", str(name))  # nothing else has seen it yet
        return NamedRow(
            number=self._number,
            line=row.line,
            id=name,
            digest=self._digest(str(name), row.content, before),
            prompt=prompt,
            error=error,
            openai=row.openai,
            model=row.model,
            metadata=row.metadata,
        )

    def _digest(self, name: str, content: bytes, before: int) -> str:
        known = self._salted.copy()
        known.update(b"%s\0%d\0" % (name.encode(errors="surrogatepass"), before) + content)
        return known.hexdigest()


def _key(row: AskedRow) -> bytes:
    """What tells whether a row has come before: its id, or else its content."""
    text = row.content if row.id is None else str(row.id).encode(errors="surrogatepass")
    return hashlib.blake2b(text, digest_size=KEY_BYTES, person=b"id" if row.id is not None else b"content").digest()
