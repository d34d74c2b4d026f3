"""The input: its bytes as they come from a file, a pipe or flags."""

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
