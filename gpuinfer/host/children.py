"""Python processes of ours: how each starts, what it ignores, that it leaves with its parent, how it is ended."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any

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
    """Start a process that runs a function from the top of a module, which calls `settle_in` first.

    Raises whatever keeps the arguments from travelling, and `OSError` when the system has no room for a process.
    """
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, name=name, daemon=daemon)
    with ignoring_interrupts(), _without_absent_file():
        process.start()
    return process


@contextlib.contextmanager
def _without_absent_file() -> Iterator[None]:
    """A program that is read from standard input has the file `<stdin>`, which a child would try to import."""
    program = sys.modules["__main__"]
    file = getattr(program, "__file__", None)
    if file is None or not file.startswith("<"):
        yield
        return
    del program.__file__
    try:
        yield
    finally:
        program.__file__ = file


def refuse_while_imported(what: str) -> None:
    """A child imports the program that started it. One that starts processes whenever it is imported ends here: a child
    of ours with a code that its parent knows, any other with `UsageError`.
    """
    process = multiprocessing.current_process()
    if getattr(process, "_inheriting", False):
        if process.name.startswith(OURS):
            os._exit(UNGUARDED)
        raise UsageError(UNGUARDED_SAID.format(what))


def end(process: BaseProcess, within_s: float) -> None:
    """Kill it, and wait for so many seconds at most until the system has taken it away."""
    process.kill()
    process.join(within_s)


def kill_descendants() -> None:
    """All that this process has started, and all that they have."""
    import psutil  # 50 ms

    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)  # type: ignore[attr-defined]  # tidies up after us
    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            if child.pid != tracker:
                with contextlib.suppress(psutil.Error):
                    child.kill()


def end_group(process: BaseProcess, within_s: float) -> None:
    """End it and all that it has started, where it has settled in with a group of its own. It may be dead already."""
    if process.pid is not None and process.pid > 1:
        with contextlib.suppress(OSError):  # nobody of it is left
            os.killpg(process.pid, signal.SIGKILL)
    end(process, within_s)


def settle_in(group: bool = False) -> None:
    """The first thing that a child does. `group`: it starts processes itself, which end with it."""
    if group:
        _track_resources_apart()
        os.setsid()
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:  # a terminal or a scheduler signals the whole group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # blocked since the parent started us
    faulthandler.enable()
    os.dup2(2, 1)  # standard output belongs to the parent's report
    threading.Thread(target=_leave_with_parent, args=(group,), daemon=True).start()


def _track_resources_apart() -> None:
    """What this process and its own leave of shared memory is tidied up, and told, by a tracker of theirs. It outlives
    the group.
    """
    tracker: Any = resource_tracker._resource_tracker  # type: ignore[attr-defined]
    tracker._fd = tracker._pid = None
    resource_tracker.ensure_running()


def _leave_with_parent(group: bool) -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        if group:
            kill_descendants()
        os._exit(1)


@contextlib.contextmanager
def ignoring_interrupts() -> Iterator[None]:
    """Let a child start with SIGINT and SIGTERM blocked: a terminal signals it too, and the parent decides.

    It inherits that from the thread that starts it, and ignores them for good as soon as it can (`settle_in`). A signal
    to the parent in that instant is kept and delivered afterwards, or by another thread.
    """
    resource_tracker.ensure_running()  # before, since its start would unblock the signals again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, signal.SIGTERM))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def threads_each(processes: int) -> Iterator[None]:
    """Give the children their share of the cores: numeric libraries read these variables once, when imported."""
    share = str(max(1, machine.cores() // max(1, processes)))
    added = {name: share for name in THREAD_COUNTS if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
