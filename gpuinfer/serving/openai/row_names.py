"""Names of rows, from which random numbers are drawn, their digests, and the set of keys that have come before, at 12
bytes each. Names do not depend on where a row stands.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gpuinfer.errors import GpuinferError
from gpuinfer.generation import Prompt
from gpuinfer.serving.openai.prompt_rows import ParsedRow
from gpuinfer.serving.openai.requests import BadRequest
from gpuinfer.serving.openai.row_splitter import Content

KEY_BYTES = 12
RECENT = 8192  # keys in the dict
LEAST_RUN = 1 << 17  # arrays up to here are always merged
SHARE = 8  # longer ones while both are at most such a part of all: there are never many more than that

Run = tuple[NDArray[np.uint64], NDArray[np.uint32]]
"""Keys of 96 bits as 64 and 32, sorted by the first."""


class KeySet:
    """A bag of keys of 12 bytes."""

    def __init__(self) -> None:
        self._recent: dict[bytes, int] = {}
        self._runs: list[Run] = []  # longest first
        self._size = 0

    def __len__(self) -> int:
        return self._size + sum(self._recent.values())

    def count(self, keys: Sequence[bytes]) -> list[int]:
        """How often each has come before, earlier ones of `keys` included. They are in the bag from now on."""
        recent = self._recent
        counts = self._older(keys)
        for index, key in enumerate(keys):
            now = recent.get(key, 0)
            recent[key] = now + 1
            counts[index] += now
        if len(recent) > RECENT:
            self._settle()
        return counts

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        """Whether each has come before."""
        return [older > 0 or key in self._recent for key, older in zip(keys, self._older(keys), strict=True)]

    def _older(self, keys: Sequence[bytes]) -> list[int]:
        high, low = _split(keys)
        counts = [0] * len(keys)
        for highs, lows in self._runs:
            left = highs.searchsorted(high)
            for index in (highs.take(left, mode="clip") == high).nonzero()[0].tolist():
                start = int(left[index])
                if start < len(highs) and lows[start] == low[index]:
                    counts[index] += int(highs.searchsorted(high[index], "right")) - start
        return counts

    def _settle(self) -> None:
        """Turn the dict into an array, and merge what is short."""
        keys = [key for key, times in self._recent.items() for _ in range(times)]
        self._recent.clear()
        self._size += len(keys)
        self._runs.append(_sorted(*_split(keys)))
        most = max(LEAST_RUN, self._size // SHARE)
        while len(self._runs) > 1 and len(self._runs[-2][0]) + len(self._runs[-1][0]) <= most:
            (highs, lows), (more_highs, more_lows) = self._runs[-2:]
            self._runs[-2:] = [_sorted(np.concatenate([highs, more_highs]), np.concatenate([lows, more_lows]))]
        self._runs.sort(key=lambda run: -len(run[0]))


def _split(keys: Sequence[bytes]) -> Run:
    words = np.frombuffer(b"".join(keys), np.uint32).reshape(-1, 3)
    return words[:, :2].copy().view(np.uint64).reshape(-1), words[:, 2].copy()


def _sorted(highs: NDArray[np.uint64], lows: NDArray[np.uint32]) -> Run:
    order = highs.argsort(kind="stable")
    return highs[order], lows[order]


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
    raw: Content = b""  # as it stands in the input
    file: str | None = None  # of several, the one that it stands in


def named_row(row: ParsedRow, number: int, name: str | int, digest: str) -> NamedRow:
    """The row with these names, which `Namer` has found for it, here or in another process."""
    if row.prompt is not None:
        msgspec.structs.force_setattr(row.prompt, "key", str(name))  # nothing else has seen it yet
    return NamedRow(
        number=number,
        line=row.line,
        id=name,
        digest=digest,
        prompt=row.prompt or NOTHING,
        error=row.error,
        openai=row.openai,
        model=row.model,
        metadata=row.metadata,
        raw=row.raw,
    )


class Namer:
    """Names rows in their order, and remembers those that came before at 12 bytes each.

    `settings` are all that decides what an answer is, the model's fingerprint included. A row without an id is named by
    its content and by how many of the same came before it.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        text = msgspec.json.encode(settings, order="deterministic")
        self._salted = hashlib.blake2b(hashlib.blake2b(text).digest(), digest_size=KEY_BYTES)
        self._seen = KeySet()
        self._number = 0

    def name(self, rows: Sequence[ParsedRow]) -> list[NamedRow]:
        keys = []  # what tells whether a row has come before: its id, or else its content
        for row in rows:
            text = row.content if row.id is None else str(row.id).encode(errors="surrogatepass")
            person = b"content" if row.id is None else b"id"
            keys.append(hashlib.blake2b(text, digest_size=KEY_BYTES, person=person).digest())
        named = []
        for row, key, before in zip(rows, keys, self._seen.count(keys), strict=True):
            self._number += 1
            name = row.id
            if name is None:
                name = f"{PREFIX}{key.hex()}-{before + 1}" if before else PREFIX + key.hex()
            elif before:
                row.error = BadRequest(f"the id '{str(name)[:100]}' has come before. Give each row an id of its own.")
            digest = self._salted.copy()
            digest.update(b"%s\0%d\0" % (str(name).encode(errors="surrogatepass"), before) + row.content)
            named.append(named_row(row, self._number, name, digest.hexdigest()))
        return named
