"""SIGINT and SIGTERM of a run: the first asks the run to stop, the second stops it at once, and then it is forced.

A thread reads the signals from the descriptor that Python's handler in C writes to, also while a plugin blocks the
event loop.

A process of the command line's own ends with one of our exit codes at any moment: SIGTERM before a run, or between two,
ends it at once. It ends whatever its threads do, and leaves no child behind.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import selectors
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

if TYPE_CHECKING:
    import asyncio  # slow to import, and each command imports this, `--help` too

FORCE_S = 1.5  # after the second signal
HEEDED = (signal.SIGINT, signal.SIGTERM)
OVER = 0  # no signal has this number


@contextlib.contextmanager
def handled(
    asked: Callable[[int], None], insisted: Callable[[], None], force: Callable[[], None] | None
) -> Iterator[None]:
    """Handle the signals of this process: `asked` is called with the first (from the thread), `insisted` on the loop at
    the second, and `force` from the thread when the body has not ended `FORCE_S` later. A third raises
    `KeyboardInterrupt`. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    import asyncio

    ear, mouth = os.pipe()
    os.set_blocking(mouth, False)
    seen = 0

    def handle(number: int, frame: object) -> None:
        nonlocal seen
        seen += 1
        if seen > 2:
            raise KeyboardInterrupt

    loop = asyncio.get_running_loop()
    thread = threading.Thread(
        target=_hear, args=(ear, loop, asked, insisted, force), name="gpuinfer signals", daemon=True
    )
    thread.start()
    fd_before = signal.set_wakeup_fd(mouth, warn_on_full_buffer=False)
    before = {number: signal.signal(number, handle) for number in HEEDED}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(fd_before)
        os.write(mouth, bytes([OVER]))
        thread.join()
        os.close(mouth)
        os.close(ear)


def _hear(
    ear: int,
    loop: asyncio.AbstractEventLoop,
    asked: Callable[[int], None],
    insisted: Callable[[], None],
    force: Callable[[], None] | None,
) -> None:
    heard = 0
    force_at: float | None = None
    waiting = selectors.DefaultSelector()
    waiting.register(ear, selectors.EVENT_READ)
    while True:
        if not waiting.select(None if force_at is None else max(0.0, force_at - time.monotonic())):
            force_at = None
            if force is not None:
                force()
            continue
        for number in os.read(ear, 64):
            if number == OVER:
                return waiting.close()
            if number not in HEEDED:
                continue
            heard += 1
            if heard == 1:
                asked(number)
            elif heard == 2:
                force_at = time.monotonic() + FORCE_S
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(insisted)


SHOW_CURSOR = "\x1b[?25h"  # the live view hides it
EXIT_S = 2.0  # for threads that a plugin left running
STOPPED = 3  # exit code: stopped with work left

_owned = False


def own() -> None:
    """This process runs one command and nothing else: it may be ended, and SIGTERM ends it with code `STOPPED`."""
    global _owned
    _owned = True
    signal.signal(signal.SIGTERM, lambda number, frame: _leave(STOPPED))

    def ignore() -> None:
        """While the interpreter ends, Python's handlers are gone, and the system's would set the exit code."""
        for number in HEEDED:
            signal.signal(number, signal.SIG_IGN)

    atexit.register(ignore)  # the first to be registered is the last to be called


def _leave(code: int) -> None:
    """From a signal's handler, which may interrupt an import that `now` needs."""
    try:
        now(code)
    finally:
        os._exit(code)


def owned() -> bool:
    return _owned


def now(code: int) -> NoReturn:
    """End this process and its descendants. Buffered output is written, if that takes no longer than 0.5 s."""
    last_words = threading.Thread(target=_last_words, daemon=True)  # a thread that is stuck may hold the locks
    with contextlib.suppress(RuntimeError):  # of Python 3.12 and later: none begins once the interpreter is ending
        last_words.start()
        last_words.join(0.5)
    from gpuinfer.host import children  # as asyncio above

    children.kill_descendants()
    os._exit(code)


def _last_words() -> None:
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():
            sys.stderr.write(SHOW_CURSOR)
        sys.stdout.flush()
        sys.stderr.flush()


def soon(code: int) -> None:
    """End this process in `EXIT_S`, if threads that a plugin left running keep it from ending by itself. A signal ends
    it at once, with the same code.
    """
    if _owned:
        for number in HEEDED:
            signal.signal(number, lambda number, frame: _leave(code))
    others = [one for one in threading.enumerate() if not one.daemon and one is not threading.current_thread()]
    if _owned and others:
        _last_words()  # later there may be no thread for them

        def leave() -> None:
            time.sleep(EXIT_S)
            now(code)

        threading.Thread(target=leave, name="gpuinfer leaving", daemon=True).start()
