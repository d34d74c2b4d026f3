"""Proof that a worker process is alive: bytes on a pipe of its own, from a thread that never runs a workload's code.

So slow is told from stuck. A worker may search or compile for minutes and still be heard; one that was stopped, or
whose interpreter is held by a call that never ends, is not. Nothing here waits: a full pipe is proof enough by itself.
The parent counts its own looks instead of seconds: one that was suspended has missed a single look, accusing nobody.

`central.pulse` is another: any number of clients look at a server's, and may not take its beats from one another, as
readers of a pipe would. Here there is one reader, which must also know whether the worker still starts.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from multiprocessing.connection import Connection

import psutil

BEAT_S = 0.5
LOOK_S = 1.0
LATE_LOOKS = 5  # looks in a row without a beat; one more, and the worker is stuck
START_LOOKS = 60  # the same while it starts: importing a large library may hold the interpreter for long
STARTING, WORKING = b"s", b"w"


class Heart:
    """The worker's side: beats from now until the process ends."""

    def __init__(self, end: Connection) -> None:
        self._end = end
        self._phase = STARTING
        threading.Thread(target=self._beat, name="gpuinfer heart", daemon=True).start()

    def work(self) -> None:
        """The start is over."""
        self._phase = WORKING

    def _beat(self) -> None:
        with contextlib.suppress(OSError):  # the parent is gone
            while True:
                with contextlib.suppress(BlockingIOError):  # full of beats that nobody has looked at yet
                    os.write(self._end.fileno(), self._phase)
                time.sleep(BEAT_S)


class Pulse:
    """The parent's side. `theirs` is the worker's end, to be closed here once the worker has it."""

    def __init__(self) -> None:
        self._ours, self.theirs = multiprocessing.Pipe(duplex=False)
        for end in (self._ours, self.theirs):
            os.set_blocking(end.fileno(), False)
        self._missed, self._working = 0, False

    def is_stuck(self, pid: int) -> bool:
        """Look once, `LOOK_S` after the last time: whether there has been no beat for too many looks."""
        try:
            beats = os.read(self._ours.fileno(), 2**16)  # all that a pipe holds
        except BlockingIOError:
            beats = b""
        self._missed = 0 if beats else self._missed + 1
        self._working |= WORKING in beats
        if self._missed <= LATE_LOOKS:
            return False
        return self._working or self._missed > START_LOOKS or _is_stopped(pid)

    def close(self) -> None:
        self._ours.close()
        self.theirs.close()


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:  # gone: its line says so
        return False
