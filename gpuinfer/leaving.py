"""The end of a process of the command line's own: at once, whatever its threads do, and no child stays behind."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from multiprocessing import resource_tracker
from typing import NoReturn

SHOW_CURSOR = "\x1b[?25h"  # the live view hides it
EXIT_S = 2.0  # for threads that a plugin left running, once all is said

_owned = False


def own() -> None:
    """This process runs one command and nothing else: it may be ended."""
    global _owned
    _owned = True


def owned() -> bool:
    return _owned


def now(code: int) -> NoReturn:
    """End this process and all that it started. What is buffered is written, if that can be done quickly."""
    last_words = threading.Thread(target=_last_words, daemon=True)  # a thread that is stuck may hold the locks
    last_words.start()
    last_words.join(0.5)
    _kill_children()
    os._exit(code)


def _kill_children() -> None:
    import psutil  # 50 ms

    with contextlib.suppress(psutil.Error):
        for child in psutil.Process().children(recursive=True):
            if child.pid != getattr(resource_tracker._resource_tracker, "_pid", None):  # it tidies up after us
                with contextlib.suppress(psutil.Error):
                    child.kill()


def _last_words() -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
        sys.stdout.flush()
        sys.stderr.flush()


def soon(code: int) -> None:
    """End this process in a moment, if threads that nobody waits for keep it from ending by itself."""
    others = [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]
    if _owned and others:
        threading.Thread(target=_later, args=(code,), name="gpuinfer leaving", daemon=True).start()


def _later(code: int) -> None:
    time.sleep(EXIT_S)
    now(code)
