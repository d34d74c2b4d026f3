"""Programs run as children: each in a session of its own, and ended together with all that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any

REAPED_S = 10.0  # for the system to take a killed process away; one that waits for a broken disk may never go


@dataclass(frozen=True, slots=True)
class Ended:
    """What a program has come to. `code` is its exit code, or None where it took too long and was killed."""

    code: int | None
    out: bytes
    err: bytes

    @property
    def last_words(self) -> str:
        """The last line of its complaints."""
        lines = self.err.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"


def start(
    command: Sequence[str], stderr: IO[Any] | int, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start a program with pipes for its input and output. A Ctrl-C in the terminal does not reach it: we decide.

    Raises `OSError` when there is no such program.
    """
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, env=environment, start_new_session=True)


def run(
    command: Sequence[str], limit_s: float, told: bytes = b"", environment: Mapping[str, str] | None = None
) -> Ended:
    """Run a program to its end, with `told` as its standard input. Raises `OSError` when there is no such program."""
    process = start(command, subprocess.PIPE, environment)
    code: int | None
    try:
        out, err = process.communicate(told, limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        kill(process)
        out, err = _left_over(process)
        code = None
    finally:
        kill(process)
    return Ended(code, out, err)


def kill(process: subprocess.Popen[Any]) -> None:
    """End a program that was started here, and whatever it has started that is still in its session."""
    kill_group(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAPED_S)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """The same, without waiting until the system has taken it away."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def with_our_path(**more: str) -> dict[str, str]:
    """This environment, where Python finds what it finds here, whichever folder the child runs in."""
    path = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    return {**os.environ, "PYTHONPATH": path, **more}


def _left_over(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """What it said before it was killed. A grandchild that left its session may hold the pipes for ever."""
    try:
        return process.communicate(timeout=1.0)
    except subprocess.TimeoutExpired as expired:
        return expired.stdout or b"", expired.stderr or b""
