"""What may be written to a terminal, and how: a model's text is not to be trusted with it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import TextIO

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CLEAR_LINE = "\r\x1b[2K"
DRAIN_S = 1.0  # for a terminal that its user has held (Ctrl-S), once all is over
CONTROLS = {number: 0x2400 + number for number in range(32)} | {127: 0x2421}  # signs that stand for them
CONTROLS |= dict.fromkeys(range(128, 160), 65533)
CONTROLS |= {ord("\n"): ord("\n"), ord("\t"): ord("\t"), ord("\r"): None}  # type: ignore[dict-item]


def printable(text: str) -> str:
    """The text without what a terminal obeys: escape sequences could retitle it, or put words in its user's mouth."""
    return text.translate(CONTROLS)


def dim(text: str) -> str:
    return f"{DIM}{text}{PLAIN}" if text else ""


class StatusLine:
    """One line on standard error that says what goes on, where that is a terminal, and leaves no trace."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._shown = ""

    def show(self, text: str) -> None:
        if text != self._shown and self._stream.isatty():
            self._put(CLEAR_LINE + dim(f"{text} …"))
            self._shown = text

    def clear(self) -> None:
        if self._shown:
            self._put(CLEAR_LINE)
            self._shown = ""

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError):
            self._stream.write(text)
            self._stream.flush()


class TerminalWriter:
    """Writes text from a thread, so that a terminal that is held holds up nothing else. It belongs to an event loop."""

    def __init__(self, write: Callable[[str], None] | None = None) -> None:
        self._write = write or _to_stdout
        self._waiting: list[str] = []
        self._writing: asyncio.Task[None] | None = None

    def put(self, text: str) -> None:
        """Soon; what is put meanwhile is written with it."""
        if text:
            self._waiting.append(text)
            if self._writing is None or self._writing.done():
                self._writing = asyncio.create_task(self._write_all())

    async def drain(self) -> None:
        """All is written when this returns, unless the terminal takes nothing for `DRAIN_S`."""
        if self._writing is not None:
            await asyncio.wait({self._writing}, timeout=DRAIN_S)

    async def _write_all(self) -> None:
        while self._waiting:
            text = "".join(self._waiting)
            self._waiting.clear()
            await asyncio.to_thread(self._write, text)


def _to_stdout(text: str) -> None:
    write(text, sys.stdout)


def write(text: str, stream: TextIO) -> None:
    """Now. Characters that the stream's encoding has not are replaced."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
