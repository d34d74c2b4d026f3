"""What vLLM's worker processes load of ours: that they leave when the engine's process is gone, however it went.

`worker_extension_cls` names the class; vLLM mixes it into its worker. This file imports nothing heavy.
"""

from __future__ import annotations

import os
import signal
import threading
import time

LOOK_S = 0.5


def _grandparent() -> tuple[int, int]:
    """Our parent, vLLM's engine core, and its parent: the process that holds AsyncLLM."""
    import psutil

    core = os.getppid()
    try:
        return core, psutil.Process(core).ppid()
    except psutil.Error:
        return core, 0


def _leave_with(core: int, owner: int) -> None:
    """vLLM's worker leaves with its core, but the core does not leave with the process that asked for it."""
    while True:
        time.sleep(LOOK_S)
        if os.getppid() != core:
            os._exit(1)
        if _grandparent()[1] != owner:
            os.kill(core, signal.SIGKILL)
            os._exit(1)


class WorkerExtension:
    """Methods that `AsyncLLM.collective_rpc` may call in each worker."""


threading.Thread(target=_leave_with, args=_grandparent(), daemon=True).start()
