"""What recorder, merge and reading agree on: names, bounds and where the parts of a trace lie.

A trace is JSON lines (`docs/traces.md`): a header, one list for each event in the order of their times, an end that
counts them. While a run goes on each engine writes a part of its own beside it. A part's lines are `KIND MICROSECONDS
REST`: the clock as it stands, and what follows the engine's number in the trace. A part that was closed ends in `end`.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path

from gpuinfer.errors import UsageError
from gpuinfer.stats import ERRORS

SCHEMA = "gpuinfer.trace/1"
PART_SCHEMA = "gpuinfer.trace-part/1"
PART_END = "end\n"
KINDS = ("a", "c", "b", "s")  # arrived, cut, backend has answered, settled
OUTCOMES = ("ok", *ERRORS)
MOST_ROWS = 2**53  # of one request
LONGEST_S = 1e9  # of a time; a deadline further away is none
TEXT_CHARS = 200  # of a client's or a group's name; the rest is cut off
WHOLE = "whole"  # in the place of a part's number: the trace while it is put together


def part_path(trace: Path, number: int | str) -> Path:
    """Where this process writes a part: hidden beside the trace."""
    return trace.with_name(f".{trace.name}.{os.getpid()}.{number}.part")


def lock_path(trace: Path) -> Path:
    """What the run that records to this trace holds locked."""
    return trace.with_name(f".{trace.name}.lock")


def parts_of(trace: Path) -> list[Path]:
    """All parts that lie beside a trace. Only plain files of this user's count: others may write to the folder too."""
    pattern = re.compile(rf"\.{re.escape(trace.name)}\.\d+\.(\d+|{WHOLE})\.part")
    return sorted(path for path in trace.parent.iterdir() if pattern.fullmatch(path.name) and _is_own_file(path))


def create(path: Path) -> int:
    """A descriptor of a new file that only this user may read. Raises `OSError`, also when there is one."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def unwritable(trace: Path, error: OSError) -> UsageError:
    """What to say of a place that cannot be written."""
    return UsageError(f"--trace {trace}: {error.strerror}. Give a file in a folder of yours.")


def _is_own_file(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid()
