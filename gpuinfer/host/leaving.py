"""A program that leaves with the process that started it, however that ended: also by `kill -9`.

Two signs, each enough. The parent holds the other end of our standard input and never writes: its end is the parent's.
And Linux is asked to kill us when the thread that started us ends, which also reaches a process that is suspended.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG of <linux/prctl.h>


def with_parent() -> None:
    """From now on, end at once with the process that holds our standard input, and take our own children along.

    To be called from the main thread, before anything else reads standard input.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_PARENT_DEATH_SIGNAL, ctypes.c_ulong(signal.SIGKILL), 0, 0, 0)
    threading.Thread(target=_watch, name="gpuinfer parent", daemon=True).start()


def _watch() -> None:
    try:
        while os.read(0, 4096):  # whoever writes to us is alive
            pass
    except OSError:
        pass
    if os.getpid() == os.getpgrp():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
