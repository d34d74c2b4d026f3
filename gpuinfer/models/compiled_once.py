"""Of several processes that need the same kernel at once, one compiles it; the others wait, and load what it has kept.

Two locks are involved. Numba lets one thread of a process compile at a time, and whoever compiles a kernel holds that
kernel's file. They are always taken in this order, a callee's file after its caller's: nobody waits for somebody who
waits for him.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

from numba.core.compiler_lock import global_compiler_lock

from gpuinfer.host import compiling

LOOK_S = 0.05
LOOKS = 6000
"""Five minutes, and longer than a kernel takes on a busy machine: counted in looks, so that whoever was suspended does
not find its time over. After them it compiles too."""


class Turn:
    """The lock of a file: one process has it at a time, and loses it when it ends, however it ends."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._held: int | None = None

    def take(self) -> None:
        """Wait for it, not for ever. Without it something is compiled twice, which harms nobody."""
        if self._held is not None:
            return
        try:
            descriptor = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError:
            return
        try:
            if os.fstat(descriptor).st_uid == os.getuid() and _locked(descriptor):
                self._held = descriptor
        finally:
            if self._held is None:
                os.close(descriptor)

    def give(self) -> None:
        """Let the next one have it, if it is ours."""
        if self._held is not None:
            descriptor, self._held = self._held, None
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing alone leaves it with a copy that was forked meanwhile
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    for _ in range(LOOKS):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(LOOK_S)
        except OSError:
            return False  # a file system without locks
        else:
            return True
    return False


def compiled_once(function: Any, folder: Path) -> Any:
    """The same function of Numba, compiled by one process at a time.

    function: a dispatcher or a `CFunc` with its cache enabled, which has not been compiled yet. What is no such thing,
              as where Numba is switched off, is left as it is
    folder: where the file that is locked will be; ours alone (`kernel_cache.cache_folder`)
    """
    if not hasattr(function, "_cache"):
        return function
    python = function.__wrapped__
    turn = Turn(folder / f"{python.__module__}.{python.__qualname__}-{python.__code__.co_firstlineno}.lock")
    load, compile_it = function._cache.load_overload, function.compile

    def load_or_take(signature: Any, context: Any) -> Any:
        found = load(signature, context)
        if found is None:
            compiling.begin(turn)
            turn.take()
            found = load(signature, context)  # what was compiled while we waited
        return found

    def compile_and_give(*signature: Any) -> Any:
        with compiling.booked(), global_compiler_lock:
            try:
                return compile_it(*signature)
            finally:
                turn.give()
                compiling.end(turn)

    function._cache.load_overload = load_or_take
    function.compile = compile_and_give
    return function
