"""Standard input, output and error are there, also for a program that was started with one of them closed, and take any
character, also where their encoding has it not.
"""

from __future__ import annotations

import codecs
import io
import os
import sys

NAMES = ("stdin", "stdout", "stderr")
PLAIN = {"·": "-", "–": "-", "—": "-", "…": "...", "×": "x", "µ": "u", "≥": ">=", "≤": "<=", "→": "->", "─": "-"}
PLAIN |= dict.fromkeys("“”", '"') | dict.fromkeys("‘’", "'") | dict.fromkeys("▏▎▍▌▋▊▉█", "#")
RAW = range(0xDC80, 0xDD00)  # what Python makes of bytes in file names and arguments that are no text

closed: set[str] = set()
"""Those of `NAMES` that were closed when the program began."""


def keep_open() -> None:
    """Lead standard files that are closed (`gpuinfer … >&-`) to nobody.

    Else the next pipe or socket has one of their numbers, and a child that sends its output to standard error closes
    the line to its parent.
    """
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115  to the end
            closed.add(name)


def take_any_character() -> None:
    """Have standard output and error write what their encoding lacks (`PYTHONIOENCODING=ascii`) as something alike, or
    "?", where Python would raise: a result that cannot be shown in full is no failure of the work.
    """
    codecs.register_error("gpuinfer", _something_alike)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="gpuinfer")


def _something_alike(error: UnicodeError) -> tuple[str | bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    letter = error.object[error.start]
    if ord(letter) in RAW:  # of a file's name: as the file system has it
        return bytes([ord(letter) - 0xDC00]), error.start + 1
    return PLAIN.get(letter, "?"), error.start + 1
