"""What every child process of ours has in common: how it starts, what it ignores, that it leaves with its parent."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterator
from multiprocessing import resource_tracker

from gpuinfer.host import machine

THREAD_COUNTS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def settle_in() -> None:
    """The first thing that a child does."""
    signals = (signal.SIGINT, signal.SIGTERM)
    for number in signals:  # a terminal or a scheduler signals the whole group: the parent decides
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)  # blocked since the parent started us
    faulthandler.enable()
    os.dup2(2, 1)  # standard output belongs to the parent's report
    threading.Thread(target=_leave_with_parent, daemon=True).start()


def _leave_with_parent() -> None:
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
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
