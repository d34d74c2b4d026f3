"""The bytes of the input as they come: from a file, from a program that writes to standard input, or from flags."""

from __future__ import annotations

import asyncio
import json
import os
import select
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.openai.formats import HEAD_BYTES, other_format

CHUNK = 256 << 10
LOOK_S = 0.1  # how long a silent input keeps us from seeing that the run is over
COUNT_BYTES = 4 << 30  # a larger file's rows are not counted beforehand
PIPED = "| gpuinfer generate --input -\nwith your other flags behind it."


class Source:
    """The input of a run. `name` is a path, or - for standard input; of what is open already, with its `descriptor`,
    what people call it. Raises `UsageError` when it cannot be opened.
    """

    def __init__(self, name: str, descriptor: int | None = None) -> None:
        self.name = "standard input" if name == "-" else name
        self._path = name
        self._own = name != "-"
        opened = _opened(name) if self._own and descriptor is None else descriptor
        self._descriptor = sys.stdin.fileno() if opened is None else opened
        self._over = False

    @property
    def size(self) -> int | None:
        """In bytes; None for what is no regular file."""
        found = os.fstat(self._descriptor)
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    async def chunks(self) -> AsyncIterator[bytes]:
        """Until the input ends or `stop` is called.

        Raises `UsageError` when it begins as something else than JSON, `WorkError` when it can be read no further.
        """
        looked_at = False
        while chunk := await asyncio.to_thread(self._read):
            if not looked_at:
                _refuse_other_format(chunk[:HEAD_BYTES], self._path, whole=False)
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
        size = self.size
        if size is None or size > COUNT_BYTES:
            return None
        count, position, last = 0, 0, b"\n"
        while not self._over and (chunk := os.pread(self._descriptor, 4 * CHUNK, position)):
            count, position, last = count + chunk.count(b"\n"), position + len(chunk), chunk[-1:]
        return None if self._over else count + (last != b"\n")

    def stop(self) -> None:
        """Read no more: what waits for bytes gets none."""
        self._over = True

    def close(self) -> None:
        self.stop()
        if self._own:
            os.close(self._descriptor)


def rows_of(prompts: Sequence[str]) -> list[bytes]:
    """Texts as the rows that an input would have."""
    return [json.dumps(prompt).encode() for prompt in prompts]


def given(prompts: Sequence[str]) -> Source:
    """An input of these texts."""
    with tempfile.TemporaryFile() as file:
        file.write(b"".join(row + b"\n" for row in rows_of(prompts)))
        file.flush()
        file.seek(0)
        return Source("--prompt", os.dup(file.fileno()))


def check(name: str) -> None:
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
                _refuse_other_format(head, name, whole=not file.read(1))
        except OSError as error:
            raise _unreadable(name, error) from error


def _refuse_other_format(head: bytes, name: str, whole: bool) -> None:
    if found := other_format(head, name, whole):
        raise UsageError(found.refused(f"--input {name}", PIPED))


def _opened(name: str) -> int:
    check(name)
    try:
        return os.open(name, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise _unreadable(name, error) from error


def _unreadable(name: str, error: OSError) -> UsageError:
    return UsageError(f"--input {name} cannot be read: {error.strerror}. Give a file that you may read.")
