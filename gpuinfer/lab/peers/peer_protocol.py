"""The child's side of the conversation: load a model once, then run prompts as often as asked."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

Order = dict[str, Any]
Run = Callable[[Order], int]
"""Answers the prompts of an order, and returns how many tokens it made."""

Load = Callable[[Order], tuple[str, Run]]
"""Makes everything ready. Returns the generator's version, and what runs prompts."""


def converse(load: Load, package: str) -> None:
    """Serve the parent until it says quit. `package` is what a user installs to have this generator."""
    answer = _answers()
    orders: queue.Queue[Order] = queue.Queue()
    threading.Thread(target=_listen, args=(orders,), daemon=True).start()
    run: Run | None = None
    while (order := orders.get())["do"] != "quit":
        try:
            if order["do"] == "load":
                version, run = load(order)
                answer({"is": "ready", "version": version})
            elif run is not None:
                started = time.perf_counter()
                tokens = run(order)
                answer({"is": "done", "seconds": time.perf_counter() - started, "tokens": tokens})
        except BaseException as error:  # noqa: BLE001  whatever it is, the parent is to know
            answer({"is": "error", "message": _said(error, package)})


def _answers() -> Callable[[Order], None]:
    """Standard output belongs to the conversation: what libraries print goes where errors go."""
    channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(words: Order) -> None:
        channel.write(json.dumps(words) + "\n")
        channel.flush()

    return answer


def _listen(orders: queue.Queue[Order]) -> None:
    """Read orders as they come. When the parent is gone, end this process and all that it has started."""
    for line in sys.stdin:
        orders.put(json.loads(line))
    if os.getpid() == os.getpgrp():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _said(error: BaseException, package: str) -> str:
    if isinstance(error, ImportError) and (error.name or "").split(".")[0] == package:
        return f"{package} is not installed for {sys.executable}"
    import traceback

    traceback.print_exception(type(error), error, error.__traceback__)
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
