"""Runs a workload from start to report: roofline, clock, signals, and a look at it four times a second."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from gpuinfer import errors
from gpuinfer.api import Backend, Plugin, Progress, Roofline, Strategy, TextRoofline, Workload
from gpuinfer.config import blame
from gpuinfer.engine.trace_merge import Merged, recording
from gpuinfer.engine.watchdog import Held
from gpuinfer.errors import WorkError
from gpuinfer.host import compile_status, cpu_contention, error_text, event_loop, machine, signals
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.models import roofline_process
from gpuinfer.report import report, report_sections
from gpuinfer.runtime import run_roofline
from gpuinfer.runtime.session import Session
from gpuinfer.stats import Snapshot

log = logging.getLogger(__name__)

GRACE_S = 30.0  # for a workload to keep what is finished and return, once asked to stop
ASK_S = 1.0  # between two questions whose the cores are
ASK_SHARE = 100  # times as long as one took
LONG_LOOK_S = 0.01  # of a core: a look that takes more, as of many workers, is followed by a longer pause:
PAUSE_SHARE, MOST_PAUSES = 25, 4  # so many times as long as the look, and as the usual pause at the most
ABANDON_S = 20.0  # for a cancelled workload to end, its worker processes included
SILENT = 6.0  # times the patience, after which a workload that neither asks nor tells is named: it may have its reasons
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
    """A look at a run while it goes on."""

    progress: Progress
    snapshot: Snapshot
    elapsed_s: float  # on the run's clock; 0 while it prepares
    setup_s: float  # spent on preparing, so far or in all
    phase: str  # for people: "measuring the roofline", "running", "stopping", or the workload's own note
    roofline: Roofline | None
    cores: Mapping[str, Any] | None = None  # whose they were, as in the report; None while the run prepares
    text_roofline: TextRoofline | None = None  # of a model of text, as an earlier run has measured it


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
) -> dict[str, Any]:
    """Run the workload and return its report (`report.SCHEMA`).

    `settings` go into the report as they are; its `workload`, `backend` and `strategy` name the three. `roofline` says
    whether to measure the bare model of the backend's setup, before and after, or is what has been measured, and is not
    measured again. `command` does the work again: the verdict's advice is said as a change to it. `until` is asked at
    every update, and once it says yes the run is over, and done; it has failed when a larger share than `max_failures`
    did. The first SIGINT or SIGTERM asks the workload to stop and waits `grace_s` seconds at most; the second cancels
    it, and waits for nobody. What the workload raises is raised again, with the report so far as its `report`. So is
    `WorkError` about a plugin that held something for longer than the setup's `give_up`. When the setup names a trace,
    `on_trace` is told what was recorded, whatever happened.

    `on_report` is told the report of a run that raises nothing, before the backend is closed, which may take long. When
    a plugin blocks the event loop, and the run has to end, `on_abandon` is told the report so far from another thread;
    then a process of the command line's own (`leaving`) is ended.
    """
    done: dict[str, Any] | None = None
    try:
        with recording(backend.setup.trace, on_trace):
            execution = _Execution(
                workload, backend, strategy, on_update, until, update_s, grace_s, settings or {}, command, max_failures
            )
            execution.on_report, execution.on_abandon = on_report, on_abandon
            done = await _execute(execution, roofline)
    except WorkError as error:
        error.report = error.report or done  # when all that failed is to write the trace
        raise
    return done


async def _execute(execution: _Execution, roofline: bool | Roofline) -> dict[str, Any]:
    status = "failed"
    with signals.handled(execution.asked, execution.insist, execution.force), execution.measured():
        async with execution.session:
            try:
                await execution.check()
                await execution.measure(roofline)
                await execution.work()
                status = execution.status()
                await execution.reconcile()
            except BaseException as caught:
                error = errors.unwrap(caught)
                error.report = execution.report(status)  # type: ignore[attr-defined]
                if error is caught:
                    raise
                raise error from caught
            made = execution.report(status)
            execution.on_report(made)
            execution.reported = True
        return made


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
        settings: Mapping[str, Any],
        command: str | None,
        max_failures: float,
    ) -> None:
        self.workload, self.backend, self.strategy = workload, backend, strategy
        self.session = Session(backend, strategy, on_fault=self._fault, on_stuck=self._stuck)
        self.session.watchdog.watch(self._held, workload)
        self.on_report: Callable[[dict[str, Any]], None]
        self.on_abandon: Callable[[dict[str, Any]], None]
        self.reported = False  # to `on_report`
        self._settings, self._command, self._max_failures = settings, command, max_failures
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
        self._ask_at = 0.0  # whose the cores are, for those who watch
        self._seen: tuple[float, CoreTime | None] | None = None
        self._give_up_at = float("inf")
        self._interrupted = False
        self._failure: WorkError | None = None  # a plugin that was given up
        self._following = False  # the workload
        self._told = 0  # words of the workload
        self._active: object = None  # what has come of it, to see whether it moves
        self._noticed: set[str] = set()  # what the strategy had to say
        self._enough = False  # `until` has said so
        self._keep: set[asyncio.Task[None]] = set()  # the loop itself holds tasks only weakly

    # What it does

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """What measures the roofline ends with this."""
        try:
            yield
        finally:
            if self._bare is not None:
                self._bare.close()

    async def check(self) -> None:
        """Let the backend refuse what it can."""
        task = asyncio.create_task(self.session.check())
        await asyncio.sleep(0)  # most have nothing to look at
        await self._watch(task, self.session.stopping.is_set)
        await self._end(task)

    async def measure(self, wanted: bool | Roofline) -> None:
        """Have the bare model measured while nothing else computes: now, or once the workload has prepared, where an
        earlier run has found what that needs to know of it.
        """
        if isinstance(wanted, Roofline):
            self.roofline = self.session.roofline = wanted
        elif wanted and run_roofline.is_text(self.backend):
            self._measures_text = True
            place = run_roofline.place_of(self.backend, machine.cores())
            self.text_roofline = await asyncio.to_thread(roofline_process.recall_text, place)
        elif wanted and run_roofline.has_roofline(self.backend):
            self._bare = run_roofline.BareModel(self.backend)
            if self.workload.prepares and self._bare.known is not None and self._bare.fits_beside:
                self.session.roofline = self._bare.known.roofline  # for who asks at which batch size it is at its best
            else:
                self.phase = MEASURING
                task = asyncio.create_task(self._measure())
                await self._watch(task, lambda: False)  # which ends at once when it is stopped
                task.result()
        self.phase = "starting"

    async def _measure(self) -> None:
        """Unless it is done, or not wanted."""
        if self._bare is None or self.roofline is not None or self.session.stopping.is_set():
            return
        self.phase = MEASURING
        stopped = self.session.stopping.is_set
        measure = functools.partial(self._bare.before, stopped)
        self.roofline = await asyncio.to_thread(run_roofline.attempted, measure, stopped)
        self.session.roofline = self.roofline or self.session.roofline

    async def reconcile(self) -> None:
        """Hold the run against its roofline, and measure that again if it was measured, unless the user has stopped the
        run.
        """
        if self._measures_text and not self.session.stopping.is_set():
            await self._measure_text()
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

    async def _measure_text(self) -> None:
        """The model of text, now that nothing of it is under way. Of answers that are on a screen already nobody waits
        for the report.
        """
        sizes = self.snapshot().batch_s
        steps_s = math.fsum(seconds for _, seconds in sizes.values())
        if self.workload.shows_answers or not steps_s:
            return
        rows = round(math.fsum(rows * seconds for rows, (_, seconds) in sizes.items()) / steps_s)
        self.phase = MEASURING
        task = asyncio.create_task(run_roofline.text_roofline(self.backend, rows, self.wall_s()))
        await self._watch(task, self.session.stopping.is_set)
        if task.done():
            self.text_roofline = task.result() or self.text_roofline
        else:
            task.cancel()

    async def work(self) -> None:
        """Follow the workload to its end, or to ours."""
        if self.session.stopping.is_set():
            return
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
            await self.session.refresh()  # while there still is a far side
            await self._end(task, quietly=True)
            self._final = self.session.snapshot()

    async def _end(self, task: asyncio.Task[None], quietly: bool = False) -> None:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=ABANDON_S)
        if task.done() and not task.cancelled() and (error := task.exception()) is not None and not quietly:
            raise error

    async def _watch(self, task: asyncio.Task[Any], enough: Callable[[], bool]) -> None:
        while not task.done() and not enough() and self._failure is None:
            await self.session.refresh()
            began = time.thread_time()  # by the clock a look takes long where others have the cores too
            update = self.update()
            self._on_update(update)
            if self._until(update) and not self.session.stopping.is_set():
                self._enough = True
                self._stop(self._grace_s)
            await asyncio.wait({task}, timeout=self._pause(time.thread_time() - began))

    def _pause(self, look_s: float) -> float:
        """Seconds between two looks at the run, which are not to take its cores from it."""
        if look_s <= LONG_LOOK_S:
            return self._update_s
        return max(self._update_s, min(MOST_PAUSES * self._update_s, PAUSE_SHARE * look_s))

    async def _follow(self) -> None:
        with blame.calling(self.workload, "run"):
            stream = self.workload.run(self.session)
            try:
                async for progress in stream:
                    await self._take(progress)
            finally:
                await _close(stream)

    async def _take(self, progress: Progress) -> None:
        """The clock starts with the workload, or, when that prepares first, at its first progress without setup."""
        if progress.setup and not self._at_work:
            self._clock_from = None
        elif self._clock_from is None:
            await self._measure()  # all is ready and waits for us
            await self.session.mark()
            self._clock_from, self._cores_from = time.monotonic(), cpu_contention.core_time()
            self._counts_before, self._seen = dict(progress.counts), None
        self._at_work |= not progress.setup
        self._told += 1
        self.progress = progress
        self.phase = progress.note or ("preparing" if progress.setup else "running")

    # Who wants it to end

    def asked(self, number: int) -> None:
        """The first signal has come. Called from another thread, so that it is said whatever the loop does."""
        first = "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name
        if not self.workload.shows_answers:  # of such a workload all that was answered is on the screen
            log.warning(
                "%s: stopping, and keeping what is finished, within %g s. Once more, and it ends at once.",
                first,
                self._grace_s,
            )
        self._interrupted = True
        self._loop.call_soon_threadsafe(self._stop, self._grace_s)

    def insist(self) -> None:
        """The second: nobody waits any more."""
        self._stop(0.0)
        self.session.hurry()

    def force(self) -> None:
        """Not even that has ended it. Called from another thread."""
        self._abandon(
            "partial", PARTIAL, "stopped at once, as it did not end by itself. What was finished before is kept."
        )

    def _stuck(self, error: WorkError) -> None:
        """A plugin that is given up blocks the loop. Called from another thread."""
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
        """A workload that waits for something, while nobody has anything of it to do. Called by the watchdog."""
        if not self._following or self.progress.setup or self.session.asked or self.session.stopping.is_set():
            return []  # what it prepares, compiled kernels say, may take minutes, and is told as the phase
        doing = "has asked for nothing and told of nothing for {age}"
        return [Held(("silent", self._told, self._active), self.workload, doing, grace=SILENT)]

    def _stop(self, grace_s: float) -> None:
        self._give_up_at = min(self._give_up_at, time.monotonic() + grace_s)
        self._keep.add(asyncio.create_task(self.session.stop()))

    # What it says

    def status(self) -> str:
        # where nothing was to do, a stop has won: whether the input is empty was perhaps not yet known
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
        """Whose the cores were while the clock ran; None where nobody tells."""
        if self._cores_from is None or self._cores_to is None:
            return None
        return self._cores_to.since(self._cores_from)

    def snapshot(self) -> Snapshot:
        """What was counted while the clock ran; what comes after it is nobody's."""
        return self._final or self.session.snapshot()

    def update(self) -> RunUpdate:
        phase = "stopping" if self.session.stopping.is_set() else self.phase
        phase = compile_status.NOTE if phase == "starting" and compile_status.is_compiling() else phase
        snapshot = self.snapshot()
        self._active = snapshot.requests, sum(snapshot.errors.values()), _busy_s(snapshot)
        for notice in (*self.backend.notices, *snapshot.notices):
            if notice not in self._noticed:
                self._noticed.add(notice)
                log.warning("%s", notice)
        elapsed_s, setup_s = self.wall_s(), self.setup_s()
        cores = report_sections.core_shares(snapshot, *self._used()) if elapsed_s else None
        return RunUpdate(
            self.progress, snapshot, elapsed_s, setup_s, phase, self.roofline, cores, text_roofline=self.text_roofline
        )

    def _used(self) -> tuple[float, CoreTime | None]:
        """For how long somebody has had the cores, and who: as of a little ago, since asking takes its time."""
        if self._clock_to is not None:
            return self.wall_s(), self.cores()
        now = time.monotonic()
        if self._seen is None or now >= self._ask_at:
            used, wall_s = cpu_contention.core_time(), self.wall_s()
            self._seen = wall_s, used.since(self._cores_from) if used and self._cores_from else None
            self._ask_at = now + max(ASK_S, ASK_SHARE * (time.monotonic() - now))
        return self._seen

    def report(self, status: str) -> dict[str, Any]:
        settings, command = self._settings, self._command
        names = {kind: _name(getattr(self, kind), settings.get(kind)) for kind in ("workload", "backend", "strategy")}
        return report.build(
            report.Run(
                **names,
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
                settings=settings,
                command=command or f"gpuinfer {names['workload']}",
            )
        )


def _name(plugin: Plugin, given: Any) -> str:
    return given if isinstance(given, str) else type(plugin).__name__.lower()


async def _close(stream: AsyncIterator[Progress]) -> None:
    """End the workload's own contexts now, its worker processes above all, and not when the collector comes by."""
    if (close := getattr(stream, "aclose", None)) is not None:
        await close()


def _busy_s(snapshot: Snapshot) -> float:
    """What all lanes have spent on anything."""
    return math.fsum(
        spent for lane in snapshot.lanes for station, spent in lane["stations"].items() if station != "idle"
    )
