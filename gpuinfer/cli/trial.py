"""The end of a run: its advice is tried beside the setting in force, for those who have the time."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpuinfer.cli.building import around, setup_of
from gpuinfer.cli.output import Destination
from gpuinfer.cli.progress import interruptible
from gpuinfer.config.change import Change
from gpuinfer.config.options import Given
from gpuinfer.config.settings import Common, Settings, table_name
from gpuinfer.errors import UsageError

if TYPE_CHECKING:
    from gpuinfer.api import Roofline, Workload
    from gpuinfer.bench.trial import TrialCourse
    from gpuinfer.runtime.run import RunPlan, Update
    from gpuinfer.screen.display import Display

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

    def look(self, update: Update) -> None:
        self._starting.look(update)
        self._display.update(update)

    def write(self, report: Mapping[str, Any]) -> None:
        self._destination.write(report)

    def show(self, report: dict[str, Any]) -> None:
        """Before the backend is closed, which may take long."""
        self._ahead = ahead(report, self._workload, self._merged, self._starting.seconds(report))
        self._display.final(report, self._ahead.course.about_s if self._ahead else None)
        (self._destination.keep if self._ahead else self._destination.write)(report)

    def after(self, report: dict[str, Any]) -> None:
        """Once everything is closed: try the advice, if there is one to try."""
        if self._ahead is not None:
            found = tried(report, self._ahead, self._display)
            self._display.tried(found)
            self._destination.write(found)


class Starting:
    """How long a run took to begin, without its roofline: so long does each turn of a trial."""

    def __init__(self) -> None:
        self._roofline_s = self._seen_s = 0.0

    def look(self, update: Update) -> None:
        if update.elapsed_s == 0 and update.phase == "measuring the roofline":
            self._roofline_s += update.setup_s - self._seen_s
        self._seen_s = update.setup_s

    def seconds(self, report: Mapping[str, Any]) -> float:
        return max(0.0, float(report["setup_s"]) - self._roofline_s)


@dataclass(frozen=True)
class Ahead:
    """A trial that is about to be made: how the work is built for each turn, and for how long it is to run."""

    change: Change
    present: Callable[[], RunPlan]
    changed: Callable[[], RunPlan]
    course: TrialCourse


def wanted(common: Common) -> bool:
    """Whether there is anybody who waits for it, or somebody has asked for it."""
    return common.trial if common.trial is not None else _watched() and not common.quiet


def _watched() -> bool:
    return sys.stdout.isatty() and sys.stderr.isatty()


def ahead(report: dict[str, Any], workload: Workload, merged: Settings, start_s: float) -> Ahead | None:
    """The trial of this run's advice; None where there is none, and the report then says why."""
    from gpuinfer.bench.measure import reason
    from gpuinfer.bench.trial import course_for
    from gpuinfer.report.judging import to_try

    change = to_try(report)
    if change is None or not wanted(merged.common):
        return None
    course = course_for(report, start_s)
    if course is None:
        report["bottleneck"]["not_tried"] = TOO_SHORT
        return None
    name, present, settings = report["workload"], _recording_nothing(merged), _with(merged, change)
    changes = {change.name: change.value} if change.flag == "--" and change.name in _options(workload) else {}
    found = Ahead(
        change, lambda: _built(name, workload, present, {}), lambda: _built(name, workload, settings, changes), course
    )
    try:
        found.present(), found.changed()
    except Exception as error:  # noqa: BLE001 (what a plugin raises here must not harm the run's report)
        report["bottleneck"]["not_tried"] = reason(error).rstrip(".")
        return None
    return found


def _options(workload: Workload) -> Mapping[str, Any]:
    return type(workload).Options.model_fields


def _built(name: str, workload: Workload, settings: Settings, changes: Mapping[str, Any]) -> RunPlan:
    copy = workload.trial(setup_of(settings.common), **changes)
    if copy is None:
        raise UsageError(NO_TRIAL)
    return around(name, copy, settings)


def _recording_nothing(merged: Settings) -> Settings:
    return replace(merged, common=merged.common.model_copy(update={"trace": None}))


def _with(merged: Settings, change: Change) -> Settings:
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
    changed = {f"{table}.{change.name}": Given(change.value, " ".join(change.words))}
    return replace(settings, given={**kept, **changed})


def tried(report: dict[str, Any], trial: Ahead, display: Display) -> dict[str, Any]:
    """The report once its advice was tried. Nothing that happens meanwhile harms it."""
    from gpuinfer.bench.measure import reason
    from gpuinfer.bench.trial import Turns
    from gpuinfer.report.judging import TriedAdvice, after

    course, bottleneck = trial.course, report["bottleneck"]
    try:
        with interruptible(), _silent(), display.trying(" ".join(trial.change.words), 2 * course.pairs) as watch:
            turns = Turns(trial.present, trial.changed, course, _roofline(report), watch)
            found = turns.run()
    except KeyboardInterrupt:
        return {**report, "bottleneck": {**bottleneck, "not_tried": SKIPPED}}
    except Exception as error:  # noqa: BLE001 (an advice that cannot be followed here: a prediction is all there is)
        return {**report, "bottleneck": {**bottleneck, "not_tried": reason(error).rstrip(".")}}
    measured = TriedAdvice(*found, course.seconds, 2 * turns.pairs, str(bottleneck["command"]))
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
