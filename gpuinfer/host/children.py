"""Child processes: Python processes of ours (`host/child.py` talks to them) and other programs.

How each starts, which signals it ignores, that it ends with its parent (also by `kill -9`: its standard input closes,
and Linux sends the parent-death signal), how it is ended with all its descendants, and the last lines of its log.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import IO, Any

from gpuinfer.errors import UsageError
from gpuinfer.host import machine

OURS = "gpuinfer"  # how the names of our children begin
UNGUARDED = 78  # the exit code of a child that starts processes while it is imported
UNGUARDED_SAID = (
    "this program starts {} whenever it is imported, and its process has to import it. Put what starts it below "
    "`if __name__ == '__main__':`."
)
THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def spawn(target: Callable[..., None], *arguments: Any, name: str, daemon: bool = False) -> BaseProcess:
    """Start a process that runs a function from the top of a module, which calls `set_up_child` first.

    Raises what pickling the arguments raises, and `OSError` when the system has no room for a process.
    """
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, name=name, daemon=daemon)
    program = sys.modules["__main__"]  # of one that is read from standard input a child would try to import `<stdin>`
    file = getattr(program, "__file__", None)
    with ignoring_interrupts(), contextlib.ExitStack() as put_back:
        if file is not None and file.startswith("<"):
            del program.__file__
            put_back.callback(setattr, program, "__file__", file)
        process.start()
    return process


def refuse_while_imported(what: str) -> None:
    """End a child that starts processes while it imports the program that started it: a child of ours with the exit
    code `UNGUARDED`, any other with `UsageError`.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        if process.name.startswith(OURS):
            os._exit(UNGUARDED)
        raise UsageError(UNGUARDED_SAID.format(what))


def kill_descendants() -> None:
    """Kill all descendants of this process, but for the tracker of shared memory, which tidies up afterwards."""
    import psutil  # 50 ms

    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)  # type: ignore[attr-defined]
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            if child.pid != tracker:
                with contextlib.suppress(psutil.Error):
                    child.kill()


def set_up_child(group: bool = False) -> None:
    """The first call in a child. `group`: it starts processes itself, which end with it."""
    if group:  # a resource tracker of its own, which outlives the group and tidies up its shared memory
        tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
        tracker._fd = tracker._pid = None
        resource_tracker.ensure_running()
        os.setsid()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:  # a terminal or a scheduler signals the whole group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # blocked since the parent started us
    faulthandler.enable()
    os.dup2(2, 1)  # standard output belongs to the parent's report

    def leave_with_parent() -> None:
        if (parent := multiprocessing.parent_process()) is not None:
            parent.join()
            if group:
                kill_descendants()
            os._exit(1)

    threading.Thread(target=leave_with_parent, daemon=True).start()


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Start a child inside with SIGINT and SIGTERM blocked: a terminal signals it too, and the parent decides.

    The child inherits the mask of the thread that starts it, until `set_up_child` ignores both signals for good. A
    signal to the parent meanwhile is delivered afterwards, or by another thread.
    """
    resource_tracker.ensure_running()  # before, since its start would unblock the signals again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def threads_per_process(processes: int) -> Iterator[None]:
    """Give the children their share of the cores: numeric libraries read these variables once, when imported."""
    share = str(max(1, machine.cores() // max(1, processes)))
    added = {name: share for name in THREAD_COUNTS if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)


REAPED_S = 10.0  # for the system to take a killed process away; one that waits for a broken disk may never go


@dataclass(frozen=True, slots=True)
class FinishedProgram:
    """The output of a program that has ended. `code` is its exit code; None: it took too long and was killed."""

    code: int | None
    out: bytes
    err: bytes

    @property
    def last_words(self) -> str:
        """The last line of its standard error."""
        lines = self.err.decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"


def start_program(
    command: Sequence[str],
    stderr: IO[Any] | int,
    environment: Mapping[str, str] | None = None,
    stdio: socket.socket | int = subprocess.PIPE,
) -> subprocess.Popen[bytes]:
    """Start a program with pipes for its input and output, or with a socket for both, in a session of its own: a Ctrl-C
    does not reach it.

    Raises `OSError` when there is no such program.
    """
    return subprocess.Popen(
        command,
        stdin=stdio,  # type: ignore[arg-type]  # anything with a descriptor
        stdout=stdio,  # type: ignore[arg-type]
        stderr=stderr,
        env=environment,
        start_new_session=True,
    )


def run_program(
    command: Sequence[str], limit_s: float, told: bytes = b"", environment: Mapping[str, str] | None = None
) -> FinishedProgram:
    """Run a program to its end, with `told` as its standard input. Raises `OSError` when there is no such program."""
    process = start_program(command, subprocess.PIPE, environment)
    code: int | None
    try:
        out, err = process.communicate(told, limit_s)
        code = process.returncode
    except subprocess.TimeoutExpired:
        kill_program(process)
        try:
            out, err = process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired as expired:  # a grandchild that left the session may hold the pipes for ever
            out, err = expired.stdout or b"", expired.stderr or b""
        code = None
    finally:
        kill_program(process)
    return FinishedProgram(code, out, err)


def kill_program(process: subprocess.Popen[Any]) -> None:
    """Kill a program that was started here, with its session; wait until the system has taken it away."""
    kill_group(process)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(REAPED_S)


def kill_group(process: subprocess.Popen[Any]) -> None:
    """`kill_program` without waiting."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def with_our_path(**more: str) -> dict[str, str]:
    """This environment with this process's path of Python modules, for a child in any folder."""
    path = os.pathsep.join(filter(None, map(os.path.abspath, sys.path)))
    return {**os.environ, "PYTHONPATH": path, **more}


SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def end_with_parent() -> None:
    """From now on, end at once with the process that holds our standard input, together with our own children.

    Call it from the main thread, before anything else reads standard input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)

    def watch_parent() -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        if os.getpid() == os.getpgrp():
            os.killpg(0, signal.SIGKILL)
        os._exit(1)

    threading.Thread(target=watch_parent, name="gpuinfer parent", daemon=True).start()


LOG_TAIL_BYTES = 65_536  # bytes at a log's end
LOG_LINE_CHARS = 400  # characters of a line
_ERROR = re.compile(r"\b\w*(?:Error|Exception|Killed|killed)\b: ?\S")


def last_log_line(path: Path | str) -> str:
    """The first line about an error near a log's end, since the lines after it follow from it; else the last line; ""
    for an empty log.
    """
    try:
        with open(path, "rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
            text = file.read(LOG_TAIL_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""
    lines = [line.strip()[:LOG_LINE_CHARS] for line in text.splitlines() if line.strip()]
    return next((line for line in lines if _ERROR.search(line)), (lines or [""])[-1])


def quoted_log_line(path: Path | str) -> str:
    """A space, and a sentence with `last_log_line` and the log's path."""
    return f' Its last words, in {path}: "{last_log_line(path)}".'
