"""What may be written to a terminal, and how: a model's text is not to be trusted with it."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable
from typing import TextIO

DIM, PLAIN = "\x1b[2m", "\x1b[0m"
CLEAR_LINE = "\r\x1b[2K"
FRAME_S = 0.02  # between two writes: smooth to the eye, and no thread is woken for each token
DRAIN_S = 1.0  # for a terminal that its user has held (Ctrl-S), once all is over
CONTROLS = {number: 0x2400 + number for number in range(32)} | {127: 0x2421}  # signs that stand for them
CONTROLS |= dict.fromkeys(range(128, 160), 65533)
CONTROLS |= {ord("\n"): ord("\n"), ord("\t"): ord("\t"), ord("\r"): None}  # type: ignore[dict-item]


def printable(text: str) -> str:
    """The text without what a terminal obeys: escape sequences could retitle it, or put words in its user's mouth."""
    return text.translate(CONTROLS)


def dim(text: str) -> str:
    return f"{DIM}{text}{PLAIN}" if text else ""


_status = ""  # that stands there now


def show_status(text: str) -> None:
    """Say on standard error what goes on, where that is a terminal, in a line that leaves no trace. "" clears it."""
    global _status
    if text != _status and sys.stderr.isatty():
        with contextlib.suppress(OSError):
            sys.stderr.write(CLEAR_LINE + dim(f"{text} …" if text else ""))
            sys.stderr.flush()
        _status = text


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
            await asyncio.sleep(FRAME_S)


def _to_stdout(text: str) -> None:
    write(text, sys.stdout)


def write(text: str, stream: TextIO) -> None:
    """Now. Characters that the stream's encoding has not are replaced."""
    encoding = stream.encoding or "utf-8"
    stream.write(text.encode(encoding, "replace").decode(encoding))
    stream.flush()
