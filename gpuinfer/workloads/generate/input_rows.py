"""The rows of the input: their bytes as they come from a file, a pipe or flags, their names, keys of random numbers and
digests, and the set of keys that have come before at 12 bytes each. Names do not depend on where a row stands.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import select
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from gpuinfer.errors import GpuinferError, UsageError, WorkError
from gpuinfer.generation import Prompt
from gpuinfer.serving.openai.prompt_rows import ParsedRow
from gpuinfer.serving.openai.requests import BadRequest
from gpuinfer.serving.openai.row_splitter import HEAD_BYTES, foreign_format

CHUNK = 256 << 10
LOOK_S = 0.1  # how long a silent input keeps us from seeing that the run is over
COUNT_BYTES = 4 << 30  # a larger file's rows are not counted beforehand
PIPED = "| gpuinfer generate --input -\nwith your other flags behind it."


class InputSource:
    """The input of a run. `name` is a path, or - for standard input; of what is open already, with its `descriptor`,
    what people call it. Raises `UsageError` when it cannot be opened.
    """

    def __init__(self, name: str, descriptor: int | None = None) -> None:
        self.name = "standard input" if name == "-" else name
        self._path = name
        self._own = name != "-"
        self._over = False
        if descriptor is not None or not self._own:
            self._descriptor = sys.stdin.fileno() if descriptor is None else descriptor
            return
        check_input(name)
        try:
            self._descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise UsageError(
                f"--input {name} cannot be read: {error.strerror}. Give a file that you may read."
            ) from error

    async def chunks(self) -> AsyncIterator[bytes]:
        """Until the input ends or `stop` is called.

        Raises `UsageError` when it begins as something else than JSON, `WorkError` when it can be read no further.
        """
        looked_at = False
        while chunk := await asyncio.to_thread(self._read):
            if not looked_at:
                refuse_other_format(chunk[:HEAD_BYTES], self._path, whole=False)
                looked_at = True
            yield chunk

    def _read(self) -> bytes:
        waiting = select.poll()
        waiting.register(self._descriptor, select.POLLIN)
        try:
            while not self._over:
                if waiting.poll(LOOK_S * 1e3):
                    return os.read(self._descriptor, CHUNK)
        except OSError as error:
            raise WorkError(
                f"{self.name} can be read no further: {error.strerror}. Mend that, then run again "
                "(with --resume, if --output is a file)."
            ) from error
        return b""

    def lines(self) -> int | None:
        """How many lines a regular file has that is not too large to count them; None for all else. Takes a while."""
        found = os.fstat(self._descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > COUNT_BYTES:
            return None
        count, position, last = 0, 0, b"\n"
        while not self._over and (chunk := os.pread(self._descriptor, 4 * CHUNK, position)):
            count, position, last = count + chunk.count(b"\n"), position + len(chunk), chunk[-1:]
        return None if self._over else count + (last != b"\n")

    def stop(self) -> None:
        """Read no more: `chunks` ends."""
        self._over = True

    def close(self) -> None:
        self.stop()
        if self._own:
            os.close(self._descriptor)


def texts_as_rows(prompts: Sequence[str]) -> list[bytes]:
    """Texts as the rows that an input would have."""
    return [json.dumps(prompt).encode() for prompt in prompts]


def input_of_texts(prompts: Sequence[str]) -> InputSource:
    """An input of these texts."""
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(row + b"\n" for row in texts_as_rows(prompts)))
        file.flush()
        file.seek(0)
        return InputSource("--prompt", os.dup(file.fileno()))


def check_input(name: str) -> None:
    """Raises `UsageError` for an input that cannot be read. Opens nothing: a pipe would notice."""
    if name == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise UsageError("--input -: there is no standard input. Give a file with --input.")
    elif Path(name).is_dir():
        raise UsageError(f"--input {name}: this is a folder. Give a file of prompts, one JSON object a line.")
    elif not Path(name).exists():
        raise UsageError(f"--input {name}: there is no such file. Give a file of prompts, or - for standard input.")
    elif not os.access(name, os.R_OK):
        raise UsageError(f"--input {name} cannot be read: permission denied. Give a file that you may read.")
    elif Path(name).is_file():
        try:
            with open(name, "rb") as file:
                head = file.read(HEAD_BYTES)
                refuse_other_format(head, name, whole=not file.read(1))
        except OSError as error:
            raise UsageError(
                f"--input {name} cannot be read: {error.strerror}. Give a file that you may read."
            ) from error


def refuse_other_format(head: bytes, name: str, whole: bool) -> None:
    if found := foreign_format(head, name, whole):
        raise UsageError(found.refused(f"--input {name}", PIPED))


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
            error, name = row.error, row.id
            if name is None:
                name = f"{PREFIX}{key.hex()}-{before + 1}" if before else PREFIX + key.hex()
            elif before:
                error = BadRequest(f"the id '{str(name)[:100]}' has come before. Give each row an id of its own.")
            prompt = row.prompt or NOTHING
            if row.prompt is not None:
                msgspec.structs.force_setattr(prompt, "key", str(name))  # nothing else has seen it yet
            digest = self._salted.copy()
            digest.update(b"%s\0%d\0" % (str(name).encode(errors="surrogatepass"), before) + row.content)
            named.append(
                NamedRow(
                    number=self._number,
                    line=row.line,
                    id=name,
                    digest=digest.hexdigest(),
                    prompt=prompt,
                    error=error,
                    openai=row.openai,
                    model=row.model,
                    metadata=row.metadata,
                )
            )
        return named
