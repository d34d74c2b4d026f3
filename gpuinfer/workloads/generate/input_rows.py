"""The input: rows as they come from files, a pipe or flags."""

from __future__ import annotations

import asyncio
import json
import os
import select
import stat
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial

from gpuinfer.errors import GpuinferError, UsageError, WorkError
from gpuinfer.serving.openai.row_files import COUNT_BYTES, RowFile, input_files, outside_quotes
from gpuinfer.serving.openai.row_splitter import MOST_BYTES, Piece

CHUNK = 256 << 10
LOOK_S = 0.1  # how long a silent input keeps us from seeing that the run is over
PIPED = "| gpuinfer generate --input -\nwith your other flags behind it."


class InputSource:
    """The input of a run. `name` is a path, a pattern of several, or - for standard input; of what is open already,
    with its `descriptor`, what people call it. `column` holds the prompts. Raises `UsageError` when it cannot be had.
    """

    def __init__(self, name: str, descriptor: int | None = None, column: str | None = None) -> None:
        self.name = "standard input" if name == "-" else name
        self._over = False
        self._begun: list[int] = []  # how many rows came before each file that has been begun
        self._owned: list[int] = []
        self._files: list[tuple[RowFile, int]] = []
        if descriptor is not None or name == "-":
            called = f"--input {name}" if name == "-" else name
            opened = sys.stdin.fileno() if descriptor is None else descriptor
            self._files = [(RowFile(name, called, column, PIPED), opened)]
            return
        for file in _row_files(name, column):
            try:
                self._owned.append(os.open(file.name, os.O_RDONLY | os.O_CLOEXEC))
            except OSError as error:
                self.close()
                raise UsageError(
                    f"{file.where} cannot be read: {error.strerror}. Give a file that you may read."
                ) from error
            self._files.append((file, self._owned[-1]))

    async def blocks(self) -> AsyncIterator[list[Piece]]:
        """The rows in blocks, until the input ends or `stop` is called.

        Raises `UsageError` for an input of a form that is not read, `WorkError` when it can be read no further.
        """
        count, self._begun = 0, []
        for file, descriptor in self._files:
            self._begun.append(count)
            blocks: Iterator[list[Piece]] = await asyncio.to_thread(file.blocks, self._chunks(descriptor))
            while not self._over and (block := await asyncio.to_thread(next, blocks, None)) is not None:
                count += len(block)
                yield block

    def file_of(self, row: int) -> str | None:
        """The name of the file that this row, counted from 1, stands in, where there are several."""
        if len(self._files) < 2:
            return None
        begun = sum(1 for before in self._begun if before < row)
        return self._files[begun - 1][0].name

    def _chunks(self, descriptor: int) -> Iterator[bytes]:
        waiting = select.poll()
        waiting.register(descriptor, select.POLLIN)
        try:
            while not self._over:
                if waiting.poll(LOOK_S * 1e3):
                    if not (chunk := os.read(descriptor, CHUNK)):
                        return
                    yield chunk
        except OSError as error:
            raise WorkError(
                f"{self.name} can be read no further: {error.strerror}. Mend that, then run again "
                "(with --resume, if --output is a file)."
            ) from error

    @property
    def is_countable(self) -> bool:
        return all(file.is_countable for file, _ in self._files)

    def count(self) -> int | None:
        """How many rows regular files have, about, that are not too large to count them; None for all else. Takes a
        while.
        """
        total = 0
        for file, descriptor in self._files:
            try:
                found = file.count(partial(self._lines, descriptor))
            except (GpuinferError, OSError):  # its reader reports it
                return None
            if found is None:
                return None
            total += found
        return total

    def _lines(self, descriptor: int, quotes: bool) -> int | None:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_size > COUNT_BYTES:
            return None
        count, position, last, inside = 0, 0, b"\n", False
        while not self._over and (chunk := os.pread(descriptor, 4 * CHUNK, position)):
            ends = chunk.count(b"\n")
            if quotes:
                ends, inside = outside_quotes(chunk, inside)
            count, position, last = count + ends, position + len(chunk), chunk[-1:]
        return None if self._over else count + (last != b"\n")

    def stop(self) -> None:
        """Read no more: `blocks` ends."""
        self._over = True

    def close(self) -> None:
        self.stop()
        for descriptor in self._owned:
            os.close(descriptor)
        self._owned.clear()


PROMPT_FILE = "FILE:"  # before a path, as nanoGPT's sample.py has it
MOST_PROMPT = MOST_BYTES // 2  # bytes of a file: as JSON a text may be longer


def prompt_of_flag(value: str) -> str:
    """The text that a flag gives as it is, or as `FILE:PATH`, whose whole content is the text.

    Raises `UsageError` for a file that cannot be read.
    """
    if not value.startswith(PROMPT_FILE):
        return value
    path = value.removeprefix(PROMPT_FILE)
    try:
        with open(path, "rb") as file:
            content = file.read(MOST_PROMPT + 1)
        if len(content) > MOST_PROMPT:
            raise UsageError(
                f"--prompt {value}: over {MOST_PROMPT >> 20} MiB, too much for a prompt. Give a shorter one."
            )
        return content.decode()
    except OSError as error:
        raise UsageError(
            f"--prompt {value} cannot be read: {error.strerror}. Give a file of one prompt; a file of many is --input."
        ) from None
    except UnicodeDecodeError:
        raise UsageError(f"--prompt {value} is not UTF-8. Write it in UTF-8.") from None


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


def check_input(name: str, column: str | None = None) -> None:
    """Raises `UsageError` for an input that cannot be read. Opens no pipe: it would notice."""
    if name == "-":
        if sys.stdin is None or sys.stdin.closed:
            raise UsageError("--input -: there is no standard input. Give a file with --input.")
        return
    for file in _row_files(name, column):
        file.check()


def _row_files(name: str, column: str | None) -> list[RowFile]:
    found = input_files(name, f"--input {name}")
    return [RowFile(one, f"--input {one}", column, PIPED) for one in found]
