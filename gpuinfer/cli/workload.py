"""Any workload as a command: its options become flags, then settings → build → run → show.

At the end its advice is tried beside the setting in force, where there is time.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from pydantic import BaseModel

from gpuinfer.cli import flags, output, subcommands
from gpuinfer.cli.building import around, build, merge, setup_of
from gpuinfer.cli.comparison_progress import interruptible
from gpuinfer.cli.flags import anew
from gpuinfer.cli.output import Destination
from gpuinfer.cli.problems import FAILED, PARTIAL
from gpuinfer.config import registry, settings
from gpuinfer.config.options import GivenValue, OptionChange, check
from gpuinfer.config.settings import Common, Settings, table_name
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.terminal import show_status

if TYPE_CHECKING:
    from gpuinfer.api import Roofline, Workload
    from gpuinfer.cli.screen.display import Display
    from gpuinfer.engine.trace_merge import Merged
    from gpuinfer.lab.bench.advice_trial import TrialPlan
    from gpuinfer.runtime.run import RunPlan, RunUpdate
    from gpuinfer.runtime.tracking import Tracking

TOO_SHORT = "the run was too short"
NO_TRIAL = "the workload has no trial of such a run"
SKIPPED = "it was skipped"
TABLES = {"-B": "backends", "-S": "strategies"}


class EndOfRun:
    """How a run is shown to its end: its report as soon as there is one, and then what its advice brings."""

    def __init__(self, workload: Workload, merged: Settings, display: Display, destination: Destination) -> None:
        self._workload, self._merged = workload, merged
        self._display, self._destination = display, destination
        self._starting = Starting()
        self._ahead: Ahead | None = None

    def look(self, update: RunUpdate) -> None:
        self._starting.look(update)
        self._display.update(update)

    def write(self, report: Mapping[str, Any]) -> None:
        self._destination.write(report)

    def show(self, report: dict[str, Any]) -> None:
        """Before the backend is closed, which may take long."""
        self._ahead = trial_ahead(report, self._workload, self._merged, self._starting.seconds(report))
        self._display.final(report, self._ahead.trial_plan.about_s if self._ahead else None)
        (self._destination.keep if self._ahead else self._destination.write)(report)

    def after(self, report: dict[str, Any]) -> None:
        """Once everything is closed: try the advice, if there is one to try."""
        if self._ahead is not None:
            found = trial_report(report, self._ahead, self._display)
            self._display.tried(found)
            self._destination.write(found)


class Starting:
    """How long a run took to begin, without its roofline: so long does each turn of a trial."""

    def __init__(self) -> None:
        self._roofline_s = self._seen_s = 0.0

    def look(self, update: RunUpdate) -> None:
        if update.elapsed_s == 0 and update.phase == "measuring the roofline":
            self._roofline_s += update.setup_s - self._seen_s
        self._seen_s = update.setup_s

    def seconds(self, report: Mapping[str, Any]) -> float:
        return max(0.0, float(report["setup_s"]) - self._roofline_s)


@dataclass(frozen=True)
class Ahead:
    """A trial that is about to be made: how the work is built for each turn, and for how long it is to run."""

    change: OptionChange
    present: Callable[[], RunPlan]
    changed: Callable[[], RunPlan]
    trial_plan: TrialPlan


def wants_trial(common: Common) -> bool:
    """Whether there is anybody who waits for it, or somebody has asked for it."""
    return common.trial if common.trial is not None else _watched() and not common.quiet


def _watched() -> bool:
    return sys.stdout.isatty() and sys.stderr.isatty()


def trial_ahead(report: dict[str, Any], workload: Workload, merged: Settings, start_s: float) -> Ahead | None:
    """The trial of this run's advice; None where there is none, and the report then says why."""
    from gpuinfer.lab.bench.advice_trial import plan_trial
    from gpuinfer.lab.bench.measurement import reason
    from gpuinfer.report.verdict import to_try

    change = to_try(report)
    if change is None or not wants_trial(merged.common):
        return None
    trial_plan = plan_trial(report, start_s)
    if trial_plan is None:
        report["bottleneck"]["not_tried"] = TOO_SHORT
        return None
    name, present, settings = report["workload"], _recording_nothing(merged), _with(merged, change)
    changes = (
        {change.name: change.value}
        if change.flag == "--" and change.name in type(workload).Options.model_fields
        else {}
    )
    found = Ahead(
        change,
        lambda: _built(name, workload, present, {}),
        lambda: _built(name, workload, settings, changes),
        trial_plan,
    )
    try:
        found.present(), found.changed()
    except Exception as error:  # noqa: BLE001 (what a plugin raises here must not harm the run's report)
        report["bottleneck"]["not_tried"] = reason(error).rstrip(".")
        return None
    return found


def _built(name: str, workload: Workload, settings: Settings, changes: Mapping[str, Any]) -> RunPlan:
    copy = workload.trial(setup_of(settings.common), **changes)
    if copy is None:
        raise UsageError(NO_TRIAL)
    return around(name, copy, settings)


def _recording_nothing(merged: Settings) -> Settings:
    return replace(merged, common=merged.common.model_copy(update={"trace": None, "profile": None}))


def _with(merged: Settings, change: OptionChange) -> Settings:
    """The settings with a change of the backend, of the strategy or of what every command has."""
    settings = _recording_nothing(merged)
    if change.flag == "--":
        known = {change.name: change.value} if change.name in Common.model_fields else {}
        return replace(settings, common=settings.common.model_copy(update=known))
    kind = TABLES[change.flag]
    plugin = merged.common.backend if kind == "backends" else merged.common.strategy
    table = table_name(kind, plugin)
    gone = {f"{table}.{name}" for name in change.without}
    kept = {key: given for key, given in settings.given.items() if key not in gone}
    changed = {f"{table}.{change.name}": GivenValue(change.value, " ".join(change.words))}
    return replace(settings, given={**kept, **changed})


def trial_report(report: dict[str, Any], trial: Ahead, display: Display) -> dict[str, Any]:
    """The report once its advice was tried. Nothing that happens meanwhile harms it."""
    from gpuinfer.lab.bench.advice_trial import AdviceTrial
    from gpuinfer.lab.bench.measurement import reason
    from gpuinfer.report.verdict import TriedAdvice, after

    trial_plan, bottleneck = trial.trial_plan, report["bottleneck"]
    try:
        with interruptible(), _silent(), display.trying(" ".join(trial.change.words), 2 * trial_plan.pairs) as watch:
            turns = AdviceTrial(trial.present, trial.changed, trial_plan, _roofline(report), watch)
            found = turns.run()
    except KeyboardInterrupt:
        return {**report, "bottleneck": {**bottleneck, "not_tried": SKIPPED}}
    except Exception as error:  # noqa: BLE001 (an advice that cannot be followed here: a prediction is all there is)
        return {**report, "bottleneck": {**bottleneck, "not_tried": reason(error).rstrip(".")}}
    measured = TriedAdvice(*found, trial_plan.seconds, 2 * turns.pairs, str(bottleneck["command"]))
    return {**report, "bottleneck": after(bottleneck, measured)}


def _roofline(report: Mapping[str, Any]) -> Roofline | None:
    """What the run had measured: some workloads size their blocks by it."""
    from gpuinfer.api import Roofline

    found = report["roofline"]
    if not found or "rows_per_s" not in found:  # of a model of text, which no block is sized by
        return None
    return Roofline(found["rows_per_s"], found["at_rows"], found["arrangement"])


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    """What the runs of a trial have to say is no matter of the run that is over."""
    log = logging.getLogger("gpuinfer")
    before = log.level
    log.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        log.setLevel(before)


Own = TypeVar("Own", bound=BaseModel)

EXIT_CODES = {"done": 0, "failed": FAILED, "partial": PARTIAL}


def command(name: str) -> Any:
    """The command of an installed workload. Raises `PluginError` when it cannot be loaded."""
    plugin = registry.load("workloads", name)
    parameters = {**flags.of(plugin.Options, f"workload '{name}'"), **flags.common_flags(plugin.max_failures)}

    def call(**values: Any) -> None:
        raise typer.Exit(execute(name, values))

    return made(name, parameters, (inspect.getdoc(plugin) or "") + subcommands.mentioned(name), call)


def made(name: str, parameters: flags.Parameters, text: str, call: Callable[..., None]) -> Any:
    """The command of `flags.app`, ready to be called."""
    return typer.main.get_command(flags.app(name, parameters, text, call))


def execute(name: str, values: Mapping[str, Any]) -> int:
    """Run a workload with what its flags say (None: not given). The exit code."""
    merged = merge(name, values)
    common = merged.common
    destination = output.Destination(common.report)
    check_trace(common)
    plan = build(name, merged)
    writes_stdout = plan.workload.writes_stdout
    if writes_stdout and destination.stdout:
        raise UsageError(f"{name} and --json - both write to standard output. Give one of them a file.")
    output.refuse_shared({"--json": common.report, "--trace": common.trace}, _named(plan, merged))
    if common.profile is not None:
        try:
            Path(common.profile).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--profile {common.profile}: {error.strerror}. Name a folder to write to.") from None
    log_to_people(common.verbose)
    began = time.time()
    from gpuinfer.cli.screen.display import Display

    title = f"{name} · {common.backend} · {common.strategy}"
    stdout_taken = destination.stdout or writes_stdout
    display = Display(
        title,
        live=common.live,
        quiet=common.quiet,
        brief=plan.workload.shows_answers,
        answers=plan.workload.writes_answers,
        report_on_stdout=stdout_taken,
    )
    allowed = plan.workload.max_failures if common.max_failures is None else common.max_failures
    ending = EndOfRun(plan.workload, merged, display, destination)
    tracking = open_tracking(name, common, plan.settings)
    with display, tracking, _failed_report(destination, plan.workload):
        report = _run(plan, common.roofline, ending, allowed, anew(name, values, plan.workload), tracking)
        tracking.finish_with(report)
    if common.profile is not None:
        _say_profiled(Path(common.profile), began)
    if report["status"] == "failed":
        failures = report["failures"]
        share = f"{failures['count']:,} of {failures['of']:,} failed ({failures['share']:.1%})"
        why = f"{share}, and --max-failures allows {failures['allowed']:g}. What the first was told stands above."
        print(f"gpuinfer: {why}", file=sys.stderr)
    ending.after(report)
    return EXIT_CODES.get(report["status"], FAILED)


def check_trace(common: settings.Common) -> None:
    """Before links are followed: where standard output leads to is no place for it. Raises `UsageError`."""
    if common.trace is not None and (common.trace == "-" or common.trace.startswith(("/dev/std", "/dev/fd/"))):
        raise UsageError(f"--trace {common.trace}: a trace is put together at the end, in a file. Name one.")


def _named(plan: RunPlan, merged: settings.Settings) -> Iterator[output.Named]:
    """The files and folders that a run reads, and those that its workload writes."""
    if merged.file is not None:
        yield "--config", merged.file
    yield from output.named_places(plan.workload.options, written=plan.workload.writes_to)
    yield from output.named_places(plan.backend.options, "-B ")
    yield from output.named_places(plan.strategy.options, "-S ")


def open_tracking(name: str, common: Common, shown: Mapping[str, Any]) -> Tracking:
    """The trackers of `--track`, which say on standard error where they are to be seen. Raises `UsageError`."""
    from gpuinfer.runtime.tracking import Tracking

    def say(where: str) -> None:
        if not common.quiet:
            print(f"track: {where}", file=sys.stderr)

    return Tracking(common.track, name, shown, say)


def _run(
    plan: RunPlan, roofline: bool, ending: EndOfRun, max_failures: float, command: str, tracking: Tracking
) -> dict[str, Any]:
    from gpuinfer.runtime.run import run

    return run(
        plan.workload,
        plan.backend,
        plan.strategy,
        settings=plan.settings,
        roofline=roofline,
        on_update=ending.look,
        command=command,
        on_trace=_say_recorded,
        on_report=ending.show,
        on_abandon=ending.write,
        max_failures=max_failures,
        on_figures=tracking.log if tracking.wanted else None,
    )


def _say_recorded(trace: Merged) -> None:
    lost = f"; {trace.incomplete} of its engines ended before all was written" if trace.incomplete else ""
    print(f"trace: {trace.path} ({trace.requests} requests{lost})", file=sys.stderr)


def _say_profiled(folder: Path, began: float) -> None:
    """Which processes have written a profile since then."""
    from gpuinfer.engine.profiler import SUFFIX

    made = sorted(path for path in folder.glob(f"*{SUFFIX}") if path.stat().st_mtime >= began)
    listed = ", ".join(path.name for path in made) or "no process was at work, and none was written"
    print(f"profile: {folder}: {listed}", file=sys.stderr)


@contextlib.contextmanager
def _failed_report(destination: output.Destination, workload: Workload) -> Iterator[None]:
    """A failed run's report is worth reading too: it travels with the error, which also says where the run is kept."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, WorkError) and "--resume" not in str(error) and "resume" in workload.goes_on_by:
            places = (str(getattr(workload.options, name) or "") for name in workload.writes_to)
            if place := next((place for place in places if os.path.isfile(place) or os.path.isdir(place)), None):
                kept = f"What was finished is kept in {place}: the same command with --resume goes on."
                error.args = (f"{error}\n{kept}",)
        if (report := getattr(error, "report", None)) is not None:
            destination.write_failed(report, error)
        raise


class _ToPeople(logging.Handler):
    """Looks standard error up anew for each message: the live view puts itself in its place to stay whole."""

    def emit(self, record: logging.LogRecord) -> None:
        show_status("")
        print(self.format(record) if self.formatter else f"gpuinfer: {record.getMessage()}", file=sys.stderr)


def log_to_people(verbose: int, form: logging.Formatter | None = None) -> None:
    """`form`: of the lines, in place of plain words."""
    log = logging.getLogger("gpuinfer")
    log.setLevel({0: logging.WARNING, 1: logging.INFO}.get(verbose, logging.DEBUG))
    handler = _ToPeople()
    handler.setFormatter(form)
    log.handlers = [handler]


def begin_run(
    name: str, own: type[Own], values: Mapping[str, Any]
) -> tuple[settings.Settings, output.Destination, Own]:
    """How a command without a workload begins: its settings, its report's place, its own options. What is logged from
    now on reaches people. Raises `UsageError` for what cannot be, before any work is done.
    """
    merged = merge(name, values)
    destination = output.Destination(merged.common.report)
    options = own(**check(own, merged.table(name), name))
    log_to_people(merged.common.verbose)
    return merged, destination, options


def progress_lines(name: str, quiet: bool) -> Callable[[str], None]:
    """Says on standard error how far that command has come; nothing when it is quiet."""
    if quiet:
        return lambda line: None
    return lambda line: print(f"{name} · {line}", file=sys.stderr, flush=True)
