"""The process of one tracker: `python -m gpuinfer.runtime.tracker_child WORD FOLDER` answers each order of the run's
process (`tracking.py`) with one line. When that process is gone it ends the tracked run as killed, removes the folder
of its own output, and ends soon.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import socket
import sys
import threading
import time
from typing import Any

from gpuinfer.host import error_text
from gpuinfer.host.child import ChannelClosed, LineChannel
from gpuinfer.trackers import Tracker, open_tracker

LEFT_S = 30.0  # for what is under way, once the run's process is gone


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # the run's process decides
        signal.signal(number, signal.SIG_IGN)
    channel_end = socket.socket(fileno=os.dup(0))
    threading.Thread(target=_end_after_parent, args=(os.dup(0),), daemon=True).start()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # a library that asks its user something gets an end of file
    os.dup2(2, 1)  # what libraries print goes where errors go
    channel, tracker = LineChannel(channel_end), open_tracker(sys.argv[1])
    while True:
        try:
            order = channel.receive()
        except ChannelClosed:
            tracker.finish("killed", {})
            shutil.rmtree(sys.argv[2], ignore_errors=True)
            break
        try:
            answer: dict[str, Any] = {"result": _execute(tracker, order)}
        except BaseException as error:  # noqa: BLE001  whatever it is, the run's process is to know
            answer = {"error": error_text.short_message(error)}
        channel.send(answer)
        if "finish" in order or "error" in answer:
            break
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # libraries' own ends may wait for a network without end


def _execute(tracker: Tracker, order: dict[str, Any]) -> str:
    """Where the run is to be seen, for the order to start; for others what has been lost."""
    if "start" in order:
        return tracker.start(order["start"], order["settings"])
    for step, figures in order.get("log", ()):
        tracker.log(step, figures)
    if "finish" in order:
        tracker.finish(order["finish"], order["summary"])
    return tracker.lost()


def _end_after_parent(end: int) -> None:
    """Also while the tracker hangs in a call."""
    watch = select.poll()
    watch.register(end, select.POLLRDHUP if hasattr(select, "POLLRDHUP") else select.POLLHUP)
    watch.poll()
    time.sleep(LEFT_S)
    os._exit(1)


if __name__ == "__main__":
    main()
