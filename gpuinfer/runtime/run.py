"""Runs a workload from start to report: roofline, clock, signals, and an update four times a second."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from statistics import fmean
from typing import Any

from gpuinfer import errors
from gpuinfer.api import Backend, Progress, Roofline, Strategy, TextRoofline, Workload
from gpuinfer.config import blame
from gpuinfer.engine.profiler import ProfileWindow, profiled
from gpuinfer.engine.trace_merge import Merged, recording
from gpuinfer.engine.watchdog import Held
from gpuinfer.errors import WorkError
from gpuinfer.host import compile_status, cpu_contention, error_text, event_loop, machine, signals
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.models import roofline_process
from gpuinfer.report import report, report_sections
from gpuinfer.runtime import run_roofline
from gpuinfer.runtime.run_figures import OnFigures, RunFigures
from gpuinfer.runtime.session import Session
from gpuinfer.stats import Snapshot

log = logging.getLogger(__name__)

GRACE_S = 30.0  # for a workload to keep what is finished and return, once asked to stop
CORE_TIME_S = 1.0  # between two readings of who used the cores
CORE_TIME_SHARE = 100  # times as long as a reading took
LONG_UPDATE_S = 0.01  # of a core: an update that takes more, as of many workers, is followed by a longer pause:
PAUSE_SHARE, MOST_PAUSES = 25, 4  # so many times the update, and at most so many times the usual pause
ABANDON_S = 20.0  # for a cancelled workload to end, its worker processes included
SILENT = 6.0  # times the patience, after which a workload without requests and progress is named
MEASURING = "measuring the roofline"
FAILED, PARTIAL = 1, 3  # exit codes of a process that has to be ended


@dataclass(frozen=True, slots=True)
class RunPlan:
    """All that a run needs, built and checked, nothing started."""

    workload: Workload
    backend: Backend
    strategy: Strategy
    settings: dict[str, Any]  # as the report shows them


@dataclass(frozen=True, slots=True)
class RunUpdate:
    """A run's state at one moment."""

    progress: Progress
    snapshot: Snapshot
    elapsed_s: float  # on the run's clock; 0 while it prepares
    setup_s: float  # spent on preparing, so far or in all
    phase: str  # for people: "measuring the roofline", "running", "stopping", or the workload's own note
    roofline: Roofline | None
    cores: Mapping[str, Any] | None = None  # who used them, as in the report; None while the run prepares
    text_roofline: TextRoofline | None = None  # of a model of text, as an earlier run has measured it


class RunHandle:
    """Stops a run of `execute` from any thread, as signals do; also before the run has begun."""

    def __init__(self) -> None:
        self._run: _Execution | None = None
        self._stopped = False

    def stop(self) -> None:
        """Ask the workload to keep what is finished and return, as the first signal does."""
        self._stopped = True
        if (run := self._run) is not None:
            run.interrupt()

    def hurry(self) -> None:
        """Stop without waiting, as the second signal does."""
        self._stopped = True
        if (run := self._run) is not None:
            run.interrupt(at_once=True)

    def attach(self, run: _Execution) -> None:
        self._run = run
        if self._stopped:
            run.interrupt()

    def detach(self) -> None:
        """The run is over."""
        self._run = None


def run(workload: Workload, backend: Backend, strategy: Strategy, **arguments: Any) -> dict[str, Any]:
    """`execute` for callers without an event loop."""
    return event_loop.run(execute(workload, backend, strategy, **arguments))


async def execute(
    workload: Workload,
    backend: Backend,
    strategy: Strategy,
    *,
    settings: Mapping[str, Any] | None = None,
    roofline: bool | Roofline = True,
    on_update: Callable[[RunUpdate], None] = lambda update: None,
    until: Callable[[RunUpdate], bool] = lambda update: False,
    update_s: float = 0.25,
    command: str | None = None,
    grace_s: float = GRACE_S,
    on_trace: Callable[[Merged], None] = lambda trace: None,
    on_report: Callable[[dict[str, Any]], None] = lambda report: None,
    on_abandon: Callable[[dict[str, Any]], None] = lambda report: None,
    max_failures: float = 1.0,
    on_figures: OnFigures | None = None,
    handle: RunHandle | None = None,
) -> dict[str, Any]:
    """Run the workload and return its report (`report.SCHEMA`).

    `settings` go into the report unchanged; their `workload`, `backend` and `strategy` name the three. `roofline`: True
    measures the bare model of the backend's setup before and after the run; a measured one is not measured again.
    `command` is the command line that the verdict's advice changes. `until` is called at every update; once it returns
    True the run is over, and done. The run has failed when a larger share of its work than `max_failures` failed.

    The first SIGINT or SIGTERM asks the workload to stop and waits `grace_s` seconds at most; the second cancels it at
    once; `handle` does both from a program. Errors of the workload are raised with the report so far as
    `error.report`; so is the `WorkError` about a plugin that held something for longer than the setup's `give_up`. When
    the setup names a trace, `on_trace` gets what was recorded, also after an error.

    `on_report` gets the report of a run without an error, before the backend is closed, which may take long. When a
    plugin blocks the event loop and the run has to end, `on_abandon` gets the report so far from another thread; then
    the process is ended, if it is the command line's own (`signals.owned`).

    `on_figures` gets figures by name while the run goes on, with the workload's step: `runtime/run_figures.py` says
    which. It is called on the event loop, at most a few times a second, and returns at once; what it raises is warned
    of, and it is called no more. `tracking.Tracking.log` is such a function.
    """
    done: dict[str, Any] | None = None
    try:
        with recording(backend.setup.trace, on_trace):
            run = _Execution(workload, backend, strategy, on_update, until, update_s, grace_s, max_failures)
            run.settings, run.command, run.on_abandon = settings or {}, command, on_abandon
            run.figures = RunFigures(run.name_of("workload"), on_figures)
            if handle is not None:
                handle.attach(run)
            status = "failed"
            with signals.handled(run.asked, run.insist, run.force), contextlib.closing(run):
                async with run.session:
                    try:
                        await run.check()
                        await run.measure(roofline)
                        await run.work()
                        status = run.status()
                        await run.reconcile()
                    except BaseException as caught:
                        error = errors.unwrap(caught)
                        error.report = run.report(status)  # type: ignore[attr-defined]
                        if error is caught:
                            raise
                        raise error from caught
                    made = run.report(status)
                    on_report(made)
                    run.reported = True
            done = made
    except WorkError as error:
        error.report = error.report or done  # when all that failed is to write the trace
        raise
    return done


class _Execution:
    def __init__(
        self,
        workload: Workload,
        backend: Backend,
        strategy: Strategy,
        on_update: Callable[[RunUpdate], None],
        until: Callable[[RunUpdate], bool],
        update_s: float,
        grace_s: float,
        max_failures: float,
    ) -> None:
        self.workload, self.backend, self.strategy = workload, backend, strategy
        self.session = Session(backend, strategy, on_fault=self._fault, on_stuck=self._stuck)
        self.session.watchdog.watch(self._held, workload)
        self.settings: Mapping[str, Any]
        self.command: str | None
        self.figures: RunFigures
        self.on_abandon: Callable[[dict[str, Any]], None]
        self.reported = False  # to `on_report`
        self._max_failures = max_failures
        self._loop = asyncio.get_running_loop()
        self.progress = Progress(0)
        self.phase = "starting"
        self._on_update, self._until, self._update_s, self._grace_s = on_update, until, update_s, grace_s
        self._began = time.monotonic()
        self._started_at = datetime.now(UTC).isoformat(timespec="seconds")
        self.roofline: Roofline | None = None  # once it is measured in this run, or given
        self._bare: run_roofline.BareModel | None = None
        self.text_roofline: TextRoofline | None = None  # of an earlier run, until it is measured after this one
        self._measures_text = False
        self._clock_from: float | None = None  # None while the run prepares
        self._clock_to: float | None = None
        self._final: Snapshot | None = None  # once the clock has stopped
        self._at_work = False  # past its setup
        self._counts_before: Mapping[str, float] = {}
        self._cores_from: CoreTime | None = None  # when the clock started
        self._cores_to: CoreTime | None = None
        self._read_cores_at = 0.0  # the next reading of who used the cores, for updates
        self._seen: tuple[float, CoreTime | None] | None = None
        self._give_up_at = float("inf")
        self._interrupted = False
        self._failure: WorkError | None = None  # a plugin that was given up
        self._following = False  # the workload
        self._reports = 0  # of progress, by the workload
        self._active: object = None  # counters that change while the run makes progress
        self._noticed: set[str] = set()  # notices that were shown
        self._busy: list[float] = []  # the device's utilisation, at each look while the clock runs
        self._enough = False  # `until` has returned True
        self._keep: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly

    # Phases

    def close(self) -> None:
        """End the process that measures the roofline."""
        if self._bare is not None:
            self._bare.close()

    async def check(self) -> None:
        """Let the backend refuse what it cannot serve (`Backend.check`)."""
        task = asyncio.create_task(self.session.check())
        await asyncio.sleep(0)  # most have nothing to check
        await self._watch(task, self.session.stopping.is_set)
        await self._end(task)

    async def measure(self, wanted: bool | Roofline) -> None:
        """Measure the bare model while nothing else computes: now, or once the workload has prepared, where an earlier
        run has found the best arrangement, which preparing may need to know.
        """
        if isinstance(wanted, Roofline):
            self.roofline = self.session.roofline = wanted
        elif self.backend.counts_requests:  # nodes measure what they have
            pass
        elif wanted and (spec := self.backend.setup.model) is not None and spec.kind == "text":
            self._measures_text = True
            place = run_roofline.place_of(self.backend, machine.cores())
            self.text_roofline = await asyncio.to_thread(roofline_process.recall_text, place)
        elif wanted and run_roofline.has_roofline(self.backend):
            self._bare = run_roofline.BareModel(self.backend)
            if self.workload.prepares and self._bare.known is not None and self._bare.fits_beside:
                self.session.roofline = self._bare.known.roofline  # the best batch size, for the workload
            else:
                self.phase = MEASURING
                task = asyncio.create_task(self._measure())
                await self._watch(task, lambda: False)  # which ends at once when it is stopped
                task.result()
        self.phase = "starting"

    async def _measure(self) -> None:
        """Measure the bare model, unless that is done, or not wanted."""
        if self._bare is None or self.roofline is not None or self.session.stopping.is_set():
            return
        self.phase = MEASURING
        stopped = self.session.stopping.is_set
        measure = functools.partial(self._bare.before, stopped)
        self.roofline = await asyncio.to_thread(run_roofline.attempted, measure, stopped)
        self.session.roofline = self.roofline or self.session.roofline

    async def reconcile(self) -> None:
        """Compare the run with its roofline, which is measured again if it was measured, unless the user has stopped
        the run.
        """
        if (nodes := self.snapshot().cluster) is not None:  # they have measured theirs
            self.roofline, self.text_roofline = nodes.roofline, nodes.text_roofline
        sizes = self.snapshot().batch_s
        steps_s = math.fsum(seconds for _, seconds in sizes.values())
        # The model of text is idle now. A user who has the answers on a screen would only wait for the report.
        if self._measures_text and steps_s and not (self.session.stopping.is_set() or self.workload.shows_answers):
            rows = round(math.fsum(rows * seconds for rows, (_, seconds) in sizes.items()) / steps_s)
            self.phase = MEASURING
            measuring = asyncio.create_task(run_roofline.text_roofline(self.backend, rows, self.wall_s()))
            await self._watch(measuring, self.session.stopping.is_set)
            if measuring.done():
                self.text_roofline = measuring.result() or self.text_roofline
            else:
                measuring.cancel()
        before, bare = self.roofline, self._bare
        if before is None or self.wall_s() <= 0:
            return
        if not self.session.alike:  # rows of another network are no measure of this one
            self.roofline = self.session.roofline = None
            return
        stopped, rate = self.session.stopping.is_set, self.snapshot().rows / self.wall_s()
        # Starting on a CUDA device takes longer than measuring it, and a neighbour there is rare.
        needless = "reserved_mb" in self.snapshot().device and rate <= before.rows_per_s

        def once_more(seconds: float) -> Roofline | None:
            if bare is None or stopped() or needless:
                return None
            return run_roofline.attempted(functools.partial(bare.again, before, seconds, stopped), stopped)

        self.phase = "measuring the roofline again"
        reconciled = functools.partial(run_roofline.reconciled, before, rate, self.wall_s(), once_more)
        task = asyncio.create_task(asyncio.to_thread(reconciled))
        await self._watch(task, lambda: False)
        self.roofline = self.session.roofline = task.result()

    async def work(self) -> None:
        """Follow the workload until it ends, or the run has to."""
        if self.session.stopping.is_set():
            return
        async with profiled(ProfileWindow.of(self.backend.setup, "run")):
            await self._work()

    async def _work(self) -> None:
        self._clock_from, self._cores_from = time.monotonic(), cpu_contention.core_time()
        task = asyncio.create_task(self._follow())
        self._following = True
        try:
            await self._watch(task, lambda: time.monotonic() > self._give_up_at)
            await self._end(task, quietly=self._failure is not None)
            if self._failure is not None:
                raise self._failure
        finally:
            self._following = False
            self._clock_to, self._cores_to = time.monotonic(), cpu_contention.core_time()
            await self.session.refresh()  # while a remote backend is still there
            await self._end(task, quietly=True)
            self._final = self.session.snapshot()
            self.figures.look(self.update(), last=True)

    async def _end(self, task: asyncio.Task[None], quietly: bool = False) -> None:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=ABANDON_S)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None and not quietly:
            raise error

    async def _watch(self, task: asyncio.Task[Any], enough: Callable[[], bool]) -> None:
        while not task.done() and not enough() and self._failure is None:
            await self.session.refresh()
            began = time.thread_time()  # not wall time, which others' use of the cores adds to
            update = self.update()
            self._on_update(update)
            self.figures.look(update)
            if self._until(update) and not self.session.stopping.is_set():
                self._enough = True
                self._stop(self._grace_s)
            pause_s, update_s = self._update_s, time.thread_time() - began
            if update_s > LONG_UPDATE_S:  # updates must not take the cores from the run
                pause_s = max(pause_s, min(MOST_PAUSES * pause_s, PAUSE_SHARE * update_s))
            await asyncio.wait({task}, timeout=pause_s)

    async def _follow(self) -> None:
        with blame.blaming(self.workload, "run"):
            stream = self.workload.run(self.session)
            try:
                async for progress in stream:
                    clock_starts = self._clock_from is None and not progress.setup
                    if progress.setup and not self._at_work:
                        self._clock_from = None
                    elif clock_starts:
                        await self._measure()  # all is ready, and waits
                        await self.session.mark()
                        self._clock_from, self._cores_from = time.monotonic(), cpu_contention.core_time()
                        self._counts_before, self._seen = dict(progress.counts), None
                    self._at_work |= not progress.setup
                    self._reports += 1
                    self.progress = progress
                    self.figures.add(progress)
                    if clock_starts:  # else a short run would have no figures: they are of the time between two looks
                        self.figures.look(self.update())
                    self.phase = progress.note or ("preparing" if progress.setup else "running")
            finally:  # end the workload's own contexts now, its worker processes above all, not at garbage collection
                if (close := getattr(stream, "aclose", None)) is not None:
                    await close()

    # Stopping

    def asked(self, number: int) -> None:
        """The first signal. Called from another thread, which logs even while the event loop is blocked."""
        first = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if not self.workload.shows_answers:  # else all answers are on the screen
            log.warning(
                "%s: stopping, and keeping what is finished, within %g s. Once more, and it ends at once.",
                first,
                self._grace_s,
            )
        self.interrupt()

    def interrupt(self, at_once: bool = False) -> None:
        """Stop the run, which is then partial. Any thread may call it."""
        self._interrupted = True
        with contextlib.suppress(RuntimeError):  # the loop is closed: the run is over
            if at_once:
                self._loop.call_soon_threadsafe(self.insist)
            else:
                self._loop.call_soon_threadsafe(self._stop, self._grace_s)

    def insist(self) -> None:
        """The second signal: stop without waiting."""
        self._stop(0.0)
        self.session.hurry()

    def force(self) -> None:
        """The run has not ended after the second signal. Called from another thread."""
        self._abandon(
            "partial", PARTIAL, "stopped at once, as it did not end by itself. What was finished before is kept."
        )

    def _stuck(self, error: WorkError) -> None:
        """A plugin that is given up blocks the event loop. Called from another thread."""
        self._abandon("failed", FAILED, error_text.safe_str(error))

    def _abandon(self, status: str, code: int, why: str) -> None:
        if not signals.owned():
            log.error("%s", why)
            return
        try:
            if not self.reported:
                self.on_abandon(self.report(status))
        except Exception as error:  # noqa: BLE001 (the loop's thread is in the midst of something)
            log.warning("there is no report: %s", error_text.short_message(error))
        print(f"gpuinfer: {why}", file=sys.stderr, flush=True)
        signals.now(code)

    def _fault(self, error: WorkError) -> None:
        self._failure = error

    def _held(self) -> list[Held]:
        """A workload that waits although none of its requests is under way. Called by the watchdog."""
        if not self._following or self.progress.setup or self.session.asked or self.session.stopping.is_set():
            return []  # preparing, such as compiling kernels, may take minutes, and is shown as the phase
        doing = "has asked for nothing and told of nothing for {age}"
        return [Held(("silent", self._reports, self._active), self.workload, doing, grace=SILENT)]

    def _stop(self, grace_s: float) -> None:
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s)
        self._keep.add(asyncio.create_task(self.session.stop()))

    # Reporting

    def status(self) -> str:
        # with nothing to do a stop wins: the workload may not have known yet that its input is empty
        total = self.progress.total
        finished = total is not None and 0 < total <= self.progress.done
        finished |= self._enough and not self._interrupted
        if self.session.stopping.is_set() and not finished:
            return "partial"
        failed = report.failures(self.progress, self.snapshot(), self._max_failures)
        return "failed" if failed and failed["share"] > self._max_failures else "done"

    def wall_s(self) -> float:
        return 0.0 if self._clock_from is None else (self._clock_to or time.monotonic()) - self._clock_from

    def setup_s(self) -> float:
        return (self._clock_to or time.monotonic()) - self._began - self.wall_s()

    def cores(self) -> CoreTime | None:
        """Who used the cores while the clock ran; None where the system does not say."""
        if self._cores_from is None or self._cores_to is None:
            return None
        return self._cores_to.since(self._cores_from)

    def snapshot(self) -> Snapshot:
        """The counters while the clock ran."""
        return self._final or self.session.snapshot()

    def update(self) -> RunUpdate:
        phase = "stopping" if self.session.stopping.is_set() else self.phase
        phase = compile_status.NOTE if phase == "starting" and compile_status.is_compiling() else phase
        snapshot = self.snapshot()
        stations = [item for lane in snapshot.lanes for item in lane["stations"].items()]
        busy_s = math.fsum(spent for station, spent in stations if station != "idle")
        self._active = snapshot.requests, sum(snapshot.errors.values()), busy_s
        replaced = (str(line["said"]) for line in snapshot.fallback.values())
        for notice in (*self.backend.notices, *snapshot.notices, *replaced):
            if notice not in self._noticed:
                self._noticed.add(notice)
                log.warning("%s", notice)
        elapsed_s, setup_s, cores = self.wall_s(), self.setup_s(), None
        if elapsed_s and self._at_work and (busy := snapshot.device.get("utilisation")) is not None:
            self._busy.append(float(busy))
        if elapsed_s and self._clock_to is not None:
            cores = report_sections.core_shares(snapshot, elapsed_s, self.cores())
        elif elapsed_s:  # who uses the cores, by the last reading: reading takes time
            now = time.monotonic()
            if self._seen is None or now >= self._read_cores_at:
                used = cpu_contention.core_time()
                self._seen = self.wall_s(), used.since(self._cores_from) if used and self._cores_from else None
                self._read_cores_at = now + max(CORE_TIME_S, CORE_TIME_SHARE * (time.monotonic() - now))
            cores = report_sections.core_shares(snapshot, *self._seen)
        roofline, text_roofline = self.roofline, self.text_roofline
        if (nodes := snapshot.cluster) is not None:
            roofline, text_roofline = roofline or nodes.roofline, text_roofline or nodes.text_roofline
        return RunUpdate(
            self.progress, snapshot, elapsed_s, setup_s, phase, roofline, cores, text_roofline=text_roofline
        )

    def name_of(self, kind: str) -> str:
        """Of the workload, the backend or the strategy."""
        given = self.settings.get(kind)
        return given if isinstance(given, str) else type(getattr(self, kind)).__name__.lower()

    def report(self, status: str) -> dict[str, Any]:
        names = {kind: self.name_of(kind) for kind in ("workload", "backend", "strategy")}
        return report.build(
            report.Run(
                workload=names["workload"],
                backend=names["backend"],
                strategy=names["strategy"],
                started_at=self._started_at,
                setup_s=self.setup_s(),
                wall_s=self.wall_s(),
                status=status,
                setup=self.backend.setup,
                snapshot=self.snapshot(),
                progress=self.progress,
                counts_before=self._counts_before,
                roofline=self.roofline,
                text_roofline=self.text_roofline,
                cores=self.cores(),
                max_failures=self._max_failures,
                utilisation_mean=fmean(self._busy) if self._busy else None,
                settings=self.settings,
                command=self.command or f"gpuinfer {names['workload']}",
            )
        )
