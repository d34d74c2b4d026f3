"""A run for a program: `execute` on an event loop in a thread of its own, which a script, a notebook or a coroutine
waits for. No signal handler is set: Ctrl-C reaches the thread that waits.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from datetime import UTC, datetime
from typing import Any

from gpuinfer.api import Roofline
from gpuinfer.errors import GpuinferError, UsageError
from gpuinfer.host import children, error_text, event_loop
from gpuinfer.report import report
from gpuinfer.runtime.run import ABANDON_S, GRACE_S, RunHandle, RunPlan, RunUpdate, execute
from gpuinfer.runtime.run_figures import OnFigures
from gpuinfer.runtime.tracking import Tracking

CLOSE_S = GRACE_S + ABANDON_S + 10.0  # for a run that was asked to stop: `execute` ends within the first two

log = logging.getLogger(__name__)


class BackgroundRun:
    """One run. `what` names it in errors, such as "self-play"; the functions are called in the run's thread, as
    `execute` does; `track` names trackers (`tracking.Tracking`). Raises `UsageError` for trackers that cannot be had.
    """

    def __init__(
        self,
        plan: RunPlan,
        what: str,
        on_update: Callable[[RunUpdate], None] = lambda update: None,
        on_figures: OnFigures | None = None,
        track: Sequence[str] = (),
        *,
        roofline: bool | Roofline = True,
    ) -> None:
        self._plan: RunPlan | None = plan  # until it is over: it holds the model
        self._what, self._roofline = what, roofline
        self._on_update, self._on_figures = on_update, on_figures
        self._tracking = Tracking(track, str(plan.settings["workload"]), plan.settings)
        self._handle = RunHandle()
        self._ended: Future[dict[str, Any]] = Future()
        self._update: RunUpdate | None = None
        self._report: dict[str, Any] | None = None
        self._process = os.getpid()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self._thread = threading.Thread(target=self._work, args=(plan,), name=f"gpuinfer {what}", daemon=True)

    def start(self) -> None:
        """Raises `UsageError` in a process that imports the program that started it."""
        children.refuse_while_imported(self._what)
        _end_with_the_interpreter(self)
        self._thread.start()

    def _work(self, plan: RunPlan) -> None:
        self._ended.set_running_or_notify_cancel()
        try:
            with self._tracking:
                made = event_loop.run(
                    execute(
                        plan.workload,
                        plan.backend,
                        plan.strategy,
                        settings=plan.settings,
                        roofline=self._roofline,
                        on_update=self._look,
                        on_figures=self._log if self._on_figures or self._tracking.wanted else None,
                        handle=self._handle,
                    )
                )
                if self._tracking.wanted:
                    self._tracking.finish_with(made)
        except BaseException as error:  # noqa: BLE001 (raised by those who wait)
            self._end(getattr(error, "report", None))
            self._ended.set_exception(error)
        else:
            self._end(made)
            self._ended.set_result(made)

    def _end(self, report: dict[str, Any] | None) -> None:
        self._report, self._plan = report, None
        self._handle.detach()

    def _look(self, update: RunUpdate) -> None:
        self._update = update
        self._on_update(update)

    def _log(self, step: int, figures: Mapping[str, float]) -> None:
        if self._tracking.wanted:
            self._tracking.log(step, figures)
        if self._on_figures is None:
            return
        try:
            self._on_figures(step, figures)
        except Exception as error:  # noqa: BLE001 (a user's function: trackers and the run go on)
            log.warning("on_figures raised %s: it is called no more.", error_text.short_message(error))
            self._on_figures = None

    @property
    def over(self) -> bool:
        return self._ended.done()

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it is over within so many seconds. Raises `UsageError` in a fork of the process that runs it."""
        self.refuse_fork()
        concurrent.futures.wait({self._ended}, timeout)
        return self._ended.done()

    def result(self) -> dict[str, Any]:
        """Wait for the report of its end, and raise what it raised. A KeyboardInterrupt of the wait stops it first."""
        try:
            self.wait()
        except KeyboardInterrupt:
            self.stop_in_order()
            raise
        if isinstance(error := self._ended.exception(), GpuinferError):
            raise error.with_traceback(None)  # its message says it all: the frames of this thread would bury that
        return self._ended.result()

    async def result_async(self) -> dict[str, Any]:
        """The same for a coroutine; when the wait is cancelled the run is stopped first."""
        self.refuse_fork()
        try:
            return await asyncio.shield(asyncio.wrap_future(self._ended))
        except asyncio.CancelledError:
            self._handle.stop()
            ended = asyncio.wrap_future(self._ended)
            await asyncio.wait({ended}, timeout=CLOSE_S)
            if ended.done() and not ended.cancelled():
                ended.exception()  # seen: the cancellation is what is raised
            raise

    def stop(self) -> None:
        """Ask it to keep what is finished and end."""
        self._handle.stop()

    def stop_in_order(self) -> None:
        """Ask it to keep what is finished, and wait for its end. Ctrl-C meanwhile ends it at once."""
        if self.over or os.getpid() != self._process:
            return
        self._handle.stop()
        try:
            if not self.wait(0.5):
                log.warning(
                    "%s: stopping, and keeping what is finished, within %g s. Ctrl-C ends it at once.",
                    self._what,
                    GRACE_S,
                )
            over = self.wait(CLOSE_S)
        except KeyboardInterrupt:
            self._handle.hurry()
            self.wait(CLOSE_S)
            raise
        if not over:
            log.warning("%s has not ended within %g s, and is left to itself.", self._what, CLOSE_S)

    def report(self) -> dict[str, Any]:
        """All that was measured: until now while it runs. Raises `UsageError` when it has not begun to work."""
        update, plan = self._update, self._plan  # before the look whether it is over
        if self._report is not None:
            return self._report
        if update is None or plan is None:
            raise UsageError(f"{self._what} has no figures yet. Ask again once it runs.")
        return report.build(
            report.Run(
                workload=plan.settings["workload"],
                backend=plan.settings["backend"],
                strategy=plan.settings["strategy"],
                started_at=self._started_at,
                setup_s=update.setup_s,
                wall_s=update.elapsed_s,
                status="partial",
                setup=plan.backend.setup,
                snapshot=update.snapshot,
                progress=update.progress,
                roofline=update.roofline,
                settings=plan.settings,
                command=f"gpuinfer {plan.settings['workload']}",
            )
        )

    def refuse_fork(self) -> None:
        """Raises `UsageError` in a fork of the process that runs it: its thread is not here."""
        if os.getpid() != self._process:
            raise UsageError(
                f"{self._what} was started in process {self._process}, and this process ({os.getpid()}) is a fork of "
                "it, without its threads. Start it here, or wait for it there."
            )


_running: weakref.WeakSet[BackgroundRun] = weakref.WeakSet()
_registered = False


def _end_with_the_interpreter(run: BackgroundRun) -> None:
    """Have it stopped in order before the interpreter ends, while threads can still be started."""
    global _registered
    _running.add(run)
    if not _registered:
        # `atexit` is too late: by then no executor takes work, and what is finished could not be written.
        threading._register_atexit(_stop_all)  # type: ignore[attr-defined]
        _registered = True


def _stop_all() -> None:
    ours = [run for run in _running if run._process == os.getpid() and not run.over]  # a fork has those of its parent
    for run in ours:
        run.stop()
    until = time.monotonic() + CLOSE_S
    for run in ours:
        run.wait(max(0.0, until - time.monotonic()))
