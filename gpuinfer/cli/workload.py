"""Any workload as a command: its options become flags, then settings → build → run → show."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import typer
from pydantic import BaseModel

from gpuinfer.cli import beside, flags, output
from gpuinfer.cli.building import build, merge
from gpuinfer.cli.flags import anew
from gpuinfer.cli.problems import FAILED, PARTIAL
from gpuinfer.cli.trial import EndOfRun
from gpuinfer.config import registry, settings
from gpuinfer.config.options import check
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.terminal import show_status

if TYPE_CHECKING:
    from gpuinfer.api import Workload
    from gpuinfer.runtime.run import RunPlan
    from gpuinfer.trace.merge import Merged

Own = TypeVar("Own", bound=BaseModel)

EXIT_CODES = {"done": 0, "failed": FAILED, "partial": PARTIAL}


def command(name: str) -> Any:
    """The command of an installed workload. Raises `PluginError` when it cannot be loaded."""
    plugin = registry.load("workloads", name)
    parameters = {**flags.of(plugin.Options, f"workload '{name}'"), **flags.common(plugin.max_failures)}

    def call(**values: Any) -> None:
        raise typer.Exit(execute(name, values))

    return made(name, parameters, (inspect.getdoc(plugin) or "") + beside.mentioned(name), call)


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
    log_to_people(common.verbose)
    from gpuinfer.screen.display import Display

    title = f"{name} · {common.backend} · {common.strategy}"
    stdout_taken = destination.stdout or writes_stdout
    display = Display(
        title,
        live=common.live,
        quiet=common.quiet,
        brief=plan.workload.shows_answers,
        report_on_stdout=stdout_taken,
    )
    allowed = plan.workload.max_failures if common.max_failures is None else common.max_failures
    ending = EndOfRun(plan.workload, merged, display, destination)
    with display, _failed_report(destination, plan.workload):
        report = _run(plan, common.roofline, ending, allowed, anew(name, values, plan.workload))
    if report["status"] == "failed":
        _say_failures(report["failures"])
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
    yield from output.places(plan.workload.options, written=plan.workload.writes_to)
    yield from output.places(plan.backend.options, "-B ")
    yield from output.places(plan.strategy.options, "-S ")


def _say_failures(failures: Mapping[str, Any]) -> None:
    share = f"{failures['count']:,} of {failures['of']:,} failed ({failures['share']:.1%})"
    why = f"{share}, and --max-failures allows {failures['allowed']:g}. What the first was told stands above."
    print(f"gpuinfer: {why}", file=sys.stderr)


def _run(plan: RunPlan, roofline: bool, ending: EndOfRun, max_failures: float, command: str) -> dict[str, Any]:
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
    )


def _say_recorded(trace: Merged) -> None:
    lost = f"; {trace.incomplete} of its engines ended before all was written" if trace.incomplete else ""
    print(f"trace: {trace.path} ({trace.requests} requests{lost})", file=sys.stderr)


@contextlib.contextmanager
def _failed_report(destination: output.Destination, workload: Workload) -> Iterator[None]:
    """A failed run's report is worth reading too: it travels with the error, which also says where the run is kept."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, WorkError) and "--resume" not in str(error) and (place := _goes_on_in(workload)):
            kept = f"What was finished is kept in {place}: the same command with --resume goes on."
            error.args = (f"{error}\n{kept}",)
        if (report := getattr(error, "report", None)) is not None:
            destination.write_failed(report, error)
        raise


def _goes_on_in(workload: Workload) -> str | None:
    """The file or folder with what a run with `--resume` goes on with; None where there is none."""
    if "resume" not in workload.goes_on_by:
        return None
    places = (str(getattr(workload.options, name) or "") for name in workload.writes_to)
    return next((place for place in places if os.path.isfile(place) or os.path.isdir(place)), None)


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


def begin(name: str, own: type[Own], values: Mapping[str, Any]) -> tuple[settings.Settings, output.Destination, Own]:
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
