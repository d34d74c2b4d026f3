"""Settings of this process: short pauses of Python's garbage collector, and standard files that are open and take any
character. A full collection visits every object, 20 to 50 ms with torch loaded; so objects that exist when serving
begins are set aside (`gc.freeze`), and full collections become rare.
"""

from __future__ import annotations

import codecs
import gc
import io
import os
import sys

THRESHOLDS_AT_START = (
    50_000  # new objects between two collections while imports make them, which all stay; Python's choice is 700
)
THRESHOLDS_SERVING = 1000  # younger collections between two full ones; Python's own choice is 10

_usual = gc.get_threshold()

_before: list[tuple[int, int, int]] = []  # thresholds to restore, one for each open `shorten_collections`


def collect_seldom() -> None:
    """At the process's start: collections while torch is imported find nothing, and would take a fifth of the time."""
    gc.set_threshold(THRESHOLDS_AT_START, *_usual[1:])


def shorten_collections() -> None:
    """Serving begins. `restore_collector` ends it, once for each call."""
    _before.append(gc.get_threshold())
    if len(_before) == 1:
        gc.freeze()  # garbage included: to collect it now would be such a pause
        gc.set_threshold(*_usual[:2], THRESHOLDS_SERVING)


def restore_collector() -> None:
    """Serving has ended; after the last call the thresholds are as before."""
    thresholds = _before.pop()
    if not _before:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


NAMES = ("stdin", "stdout", "stderr")
PLAIN = {"·": "-", "–": "-", "—": "-", "…": "...", "×": "x", "µ": "u", "≥": ">=", "≤": "<=", "→": "->", "─": "-"}
PLAIN |= dict.fromkeys("“”", '"') | dict.fromkeys("‘’", "'") | dict.fromkeys("▏▎▍▌▋▊▉█", "#")
RAW = range(0xDC80, 0xDD00)  # Python's stand-ins for bytes in file names and arguments that are no text

closed: set[str] = set()
"""Those of `NAMES` that were closed when the program began."""


def open_standard_files() -> None:
    """Open standard files that are closed (`gpuinfer … >&-`) on the null device.

    Else the next pipe or socket gets one of their numbers, and a child that redirects standard error closes the channel
    to its parent.
    """
    for number, name in enumerate(NAMES):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
            setattr(sys, name, open(number, "r" if number == 0 else "w", closefd=False))  # noqa: SIM115  to the end
            closed.add(name)


def accept_any_character() -> None:
    """Standard output and error write a character that their encoding lacks (`PYTHONIOENCODING=ascii`) as a similar
    one, or "?", where Python would raise: a result that cannot be shown in full is no failure of the work.
    """

    def similar(error: UnicodeError) -> tuple[str | bytes, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        letter = error.object[error.start]
        if ord(letter) in RAW:  # of a file's name: as the file system has it
            return bytes([ord(letter) - 0xDC00]), error.start + 1
        return PLAIN.get(letter, "?"), error.start + 1

    codecs.register_error("gpuinfer", similar)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="gpuinfer")
