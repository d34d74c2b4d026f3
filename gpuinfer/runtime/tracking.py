"""A run's figures on their way to trackers (`gpuinfer/trackers.py`).

Each tracker has a process of its own, which its library may hang or crash, and a thread here that talks with it. The
run hands figures to a bounded queue, and never waits. A tracker that fails is warned of once and left out.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gpuinfer import trackers
from gpuinfer.errors import WorkError
from gpuinfer.host import children, error_text
from gpuinfer.host.child import ChildProgram, Conversation, LineChannel

MOST_QUEUED = 4096  # steps that wait for a tracker; what comes beyond them is left out
START_S = 120.0  # for a tracker to begin: libraries are imported, servers are asked
ANSWER_S = 300.0  # for it to take figures: its library may try a lost network again for minutes
FINISH_S = 30.0  # for all trackers to take what is left, once the run is over
PATIENCE_S = 2.0  # before somebody is told what is waited for
AT_ONCE = 256  # steps in one message

log = logging.getLogger(__name__)


class Tracking:
    """The trackers that these words name (`tensorboard=runs`, `wandb`), from the start of one run to its end.

    `run`: the command, such as `train`; the run's name is that with the time. `settings` are plain values. `announce`
    gets the place of each tracker's run, for people, from another thread. The trackers start with the first figures, so
    that a run that is refused leaves no trace. Raises `UsageError` for trackers that cannot be had. As a context
    manager it ends what it has started, whatever happens.
    """

    def __init__(
        self,
        words: Sequence[str],
        run: str,
        settings: Mapping[str, Any],
        announce: Callable[[str], None] = lambda where: None,
    ) -> None:
        words = () if trackers.NOTHING in words else tuple(dict.fromkeys(words))
        for word in words:
            trackers.open_tracker(word)
        settings = json.loads(json.dumps(settings, default=error_text.safe_str))
        name = f"{run}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self._threads = [_TrackerThread(word, name, settings, announce) for word in words]
        self._started = self._finished = False
        self._announce = announce

    @property
    def wanted(self) -> bool:
        """Whether there is any tracker."""
        return bool(self._threads)

    def start(self) -> None:
        """Start the trackers, before there are figures. Returns at once."""
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        """Pass on the figures of a step, to be tracked soon. Returns at once."""
        self.start()
        for thread in self._threads:
            thread.put((step, dict(figures)))

    def finish(self, status: str, summary: trackers.Summary) -> None:
        """End the tracked runs: `done`, `partial` or `failed`. Waits `FINISH_S` at most until all is taken, or until
        Ctrl-C.
        """
        self.start()
        self._finished, until = True, time.monotonic() + FINISH_S
        for thread in self._threads:
            thread.finish(status, summary)
        try:
            for thread in self._threads:
                thread.join(min(PATIENCE_S, FINISH_S))
            if slow := [thread.word for thread in self._threads if thread.is_alive()]:
                self._announce(f"{', '.join(slow)}: waiting {FINISH_S:g} s at most until all is taken. Ctrl-C ends it.")
            for thread in self._threads:
                thread.join_until(until)
        except KeyboardInterrupt:
            log.warning("Ctrl-C: what the trackers have not taken is left out.")

    def finish_with(self, report: Mapping[str, Any], **more: str) -> None:
        """`finish` with what a run's report says: its verdict, its advice and its rates. `more`: in the summary."""
        bottleneck = report["bottleneck"]
        verdict = {"bottleneck": bottleneck["class"]}
        verdict |= {name: bottleneck[name] for name in ("why", "advice", "command")}
        rates = {f"throughput/{name}": rate for name, rate in report["throughput"].items()}
        summary = {**verdict, "wall_s": report["wall_s"], "setup_s": report["setup_s"], **rates, **more}
        self.finish(report["status"], {name: value for name, value in summary.items() if value is not None})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if self._started and not self._finished:
                why = {} if error is None else {"error": error_text.safe_str(error)}
                if (report := getattr(error, "report", None)) is not None:
                    self.finish_with(report, **why)
                else:
                    self.finish("done" if error is None else "failed", why)
        finally:
            for thread in self._threads:
                thread.kill()


class _TrackerThread(threading.Thread):
    """One tracker: its process, and what waits to be told to it."""

    def __init__(self, word: str, run: str, settings: Mapping[str, Any], announce: Callable[[str], None]) -> None:
        super().__init__(name=f"gpuinfer tracker {word}", daemon=True)
        self.word, self._run_name, self._settings, self._announce = word, run, settings, announce
        self._queue: queue.Queue[tuple[int, dict[str, float]] | None] = queue.Queue(MOST_QUEUED)
        self._end: dict[str, Any] | None = None  # the last order
        self._child: ChildProgram | None = None
        self._left_out = 0
        self._over = threading.Event()  # it takes nothing more

    def put(self, figures: tuple[int, dict[str, float]]) -> None:
        if self._over.is_set():
            return
        try:
            self._queue.put_nowait(figures)
        except queue.Full:
            self._left_out += 1

    def finish(self, status: str, summary: trackers.Summary) -> None:
        self._end = {"finish": status, "summary": dict(summary)}
        with contextlib.suppress(queue.Full):  # then there is something to take, and it sees the end by itself
            self._queue.put_nowait(None)

    def join_until(self, until: float) -> None:
        self.join(max(0.0, until - time.monotonic()))
        if self.is_alive() and not self._over.is_set():
            self._over.set()
            log.warning(
                "--track %s: not all has been taken within %g s after the end, and the rest is left out. See to the "
                "network, or to the disk.",
                self.word,
                FINISH_S,
            )

    def kill(self) -> None:
        """End the tracker's process, if it has not ended."""
        self._over.set()
        if self._child is not None:
            self._child.kill(1.0)

    def run(self) -> None:
        with tempfile.TemporaryDirectory(prefix="gpuinfer-track-", ignore_cleanup_errors=True) as folder:
            output = Path(folder, "output")
            try:
                self._track(output)
            except (WorkError, OSError) as error:
                if not self._over.is_set():
                    words = children.last_log_line(output)
                    log.warning(
                        "--track %s is left out from now on, and the run goes on: %s%s",
                        self.word,
                        str(error),
                        f" Its last words: {words}" if words and words not in str(error) else "",
                    )
            finally:
                self._over.set()
                if self._child is not None:
                    self._child.kill(1.0)

    def _track(self, output: Path) -> None:
        command = [sys.executable, "-P", "-m", "gpuinfer.runtime.tracker_child", self.word, str(output.parent)]
        self._child = child = ChildProgram(command, output, children.with_our_path())
        conversation = Conversation("its process", child, LineChannel(child.end))
        where = _ask(conversation, {"start": self._run_name, "settings": self._settings}, START_S)
        self._announce(f"{self.word.partition('=')[0]}: {where}")
        known = ""  # of what is lost, as it was shown
        while True:
            taken = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while len(taken) < AT_ONCE:
                    taken.append(self._queue.get_nowait())
            if figures := [one for one in taken if one is not None]:
                lost = _ask(conversation, {"log": figures}, ANSWER_S)
                if lost and not known:
                    self._warn_of_lost(lost, output)
                known = known or lost
            if self._end is not None and self._queue.empty():
                if (lost := _ask(conversation, self._end, ANSWER_S)) and lost != known:
                    self._warn_of_lost(lost, output)
                break
        conversation.close(within_s=1.0)
        if self._left_out:
            log.warning("--track %s was slower than the run: %d steps are left out.", self.word, self._left_out)

    def _warn_of_lost(self, lost: str, output: Path) -> None:
        words = children.last_log_line(output)
        log.warning("--track %s: %s%s", self.word, lost, f" Its last words: {words}" if words else "")


def _ask(conversation: Conversation, order: dict[str, Any], within_s: float) -> str:
    answer = conversation.ask(order, within_s)
    if not isinstance(answer, dict) or "result" not in answer:
        error = answer.get("error") if isinstance(answer, dict) else answer
        raise WorkError(f"{str(error).rstrip('.')}.")
    return str(answer["result"])
