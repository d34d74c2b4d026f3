"""What a process has printed last, from the file that it prints to."""

from __future__ import annotations

import os
import re
from pathlib import Path

READ = 65_536  # bytes at a log's end
LINE = 400  # characters of a line
_ERROR = re.compile(r"\b\w*(?:Error|Exception|Killed|killed)\b: ?\S")


def last_words(path: Path | str) -> str:
    """Of a log's end the first line that speaks of an error, which those after it follow from; its last line when none
    does; "" for none at all.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - READ))
            said = file.read(READ).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.strip()[:LINE] for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if _ERROR.search(line)]
    return telling[0] if telling else (lines or [""])[-1]


def quoted_words(path: Path | str) -> str:
    """A sentence with these and where they stand, after a space."""
    return f' Its last words, in {path}: "{last_words(path)}".'
