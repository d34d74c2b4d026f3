"""Simulate the strategies on a virtual clock, for capacity planning: throughput, latency, batches, replicas."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gpuinfer.cli import flags, output, subcommands
from gpuinfer.cli.comparison_progress import interruptible
from gpuinfer.cli.problems import CHECK_FAILED, PARTIAL
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.extras import require_extra
from gpuinfer.host.files import no_folder

if TYPE_CHECKING:
    from gpuinfer.cli.simulation_options import Scenario
    from gpuinfer.config.settings import Common
    from gpuinfer.lab.presenter import Page
    from gpuinfer.lab.simulate import SimulationOutcome

COMMON = ("strategy", "strategy_options", "seed", "max_queue_rows", "json", "trace", "quiet", "verbose", "config")
SUFFIXES = (".png", ".svg")
TEXT = """Simulate the strategies on a virtual clock, for capacity planning.

The load: `--rate 2000`, `--clients 64`, or a recorded one, `--replay FILE`.

The backend: `--alpha 50us --beta 2ms` (n rows take n·alpha + beta), or one
that was measured, `--service FILE`, from a report or a trace.

Several settings: `--sweep max_wait=0,1ms,5ms`.

How many replicas: `--solve replicas --target 50ms`.
"""


def _app() -> typer.Typer:
    from gpuinfer.cli.simulation_options import NAME, SimulationOptions

    sweep = typer.Option(
        None,
        "--sweep",
        metavar="KEY=A,B",
        help="Simulate each value of a flag, of a strategy's option, or of `strategy`; repeatable.",
        show_default=False,
    )
    one = inspect.Parameter("sweep", inspect.Parameter.KEYWORD_ONLY, default=sweep, annotation=list[str] | None)
    text = TEXT + subcommands.mentioned(NAME)
    return flags.command(NAME, {**flags.of(SimulationOptions, NAME), "sweep": one}, COMMON, text, execute)


def execute(values: Mapping[str, Any]) -> int:
    """Simulate, show, write. The exit code: 4 when no number of replicas meets the target, 3 when stopped, else 0."""
    from gpuinfer.cli import simulation_options
    from gpuinfer.cli.flags import spelled
    from gpuinfer.cli.screen.display import show_page
    from gpuinfer.cli.workload import log_to_people

    values = dict(values)
    swept = values.pop("sweep") or []
    common = simulation_options.common_settings(values)
    destination = output.Destination(common.report)
    log_to_people(common.verbose)
    cases = [simulation_options.case(flags, labels) for flags, labels in simulation_options.grid(swept, values)]
    _check_files(cases, common)
    command = spelled(simulation_options.NAME, {**values, "sweep": swept or None})
    whole = True
    with interruptible():
        if cases[0].options.solve:
            document, page = _solved(cases[0], common, command)
        else:
            document, page, whole = _simulated(cases, common, command)
    show_page(page, on_stderr=destination.stdout)
    destination.write(document)
    _draw(cases[0].options.plot, page)
    if not whole:
        return PARTIAL
    return CHECK_FAILED if document["solve"] and document["solve"]["replicas"] is None else 0


def _check_files(cases: Sequence[Scenario], common: Common) -> None:
    """Refuse, before anything is simulated, what could not be written after it."""
    from gpuinfer.cli.workload import check_trace

    options = cases[0].options
    if len(cases) > 1 and options.solve:
        raise UsageError("--sweep and --solve both say what to vary. Leave one of them out.")
    if common.trace is not None and (len(cases) > 1 or options.solve):
        raise UsageError("--trace records one simulation. Leave it out, or --sweep and --solve.")
    check_trace(common)
    written = {"--json": common.report, "--trace": common.trace, "--plot": options.plot}
    output.refuse_shared(written, output.named_places(options.model_copy(update={"plot": None})))
    if (plot := options.plot) is None:
        return
    require_extra("plots", f"--plot {plot}")
    if plot.suffix.lower() not in SUFFIXES:
        raise UsageError(f"--plot {plot}: this is drawn as PNG or SVG. Give a file such as {plot.stem or 'p'}.png.")
    folder = plot.parent
    if not folder.is_dir():
        raise no_folder("--plot", plot)
    if plot.is_dir() or not os.access(plot if plot.exists() else folder, os.W_OK):
        raise UsageError(f"--plot {plot} cannot be written. Give a file in a folder of yours.")


def _simulated(cases: Sequence[Scenario], common: Common, command: str) -> tuple[dict[str, Any], Page, bool]:
    """The document and its page, and whether every setting came to be simulated before the user stopped it."""
    from gpuinfer.lab.simulate import simulation_tables

    runs: list[dict[str, Any]] = []
    for number, case in enumerate(cases, 1):
        try:
            outcome = _run(case, common.trace)
        except KeyboardInterrupt:
            if not runs:
                raise
            _say(f"stopped; {len(runs)} of {len(cases)} settings are simulated", quiet=False)
            break
        runs.append(simulation_tables.run_figures(case.labels, case.strategy, outcome, case.target_s))
        if len(cases) > 1:
            _say(f"{number} of {len(cases)} · {simulation_tables.settings_label(case.labels)}", common.quiet)
    document = simulation_tables.simulation_document(command, common.seed, runs, None)
    title, varied = (f"{len(runs)} settings", [*cases[0].labels]) if len(cases) > 1 else (cases[0].title, [])
    page = simulation_tables.simulation_page(f"simulate · {title}", document, varied, _beyond(cases))
    return document, page, len(runs) == len(cases)


def _run(case: Scenario, trace: str | None) -> SimulationOutcome:
    """Simulate, and record what happens when a trace was asked for."""
    if trace is None:
        return case.simulate()
    from gpuinfer.engine.trace_merge import Merged, recording
    from gpuinfer.engine.trace_recorder import Recorder

    def say(merged: Merged) -> None:
        print(f"trace: {merged.path} ({merged.requests} requests)", file=sys.stderr)

    path = Path(os.path.realpath(trace))
    recorders: list[Recorder] = []

    def another() -> Recorder:
        recorders.append(Recorder(path, case.limits, case.strategy))
        return recorders[-1]

    with recording(str(path), say):
        try:
            return case.simulate(recorder=another)
        finally:
            for one in recorders:
                one.close()


def _solved(case: Scenario, common: Common, command: str) -> tuple[dict[str, Any], Page]:
    from gpuinfer.lab.simulate import simulation_tables
    from gpuinfer.lab.simulate.outcome import solve

    def outcome(replicas: int) -> SimulationOutcome:
        _say(f"simulating {replicas} replica{'s' if replicas > 1 else ''} …", common.quiet)
        return case.simulate(replicas)

    assert case.target_s is not None
    service = case.fitted.service
    solution = solve(
        outcome,
        case.target_s,
        alone_s=service.seconds(case.arrivals.mix.rows[0]) + service.turn(1),
        offered=case.arrivals.rows_per_s,
        capacity=service.capacity(case.limits.max_rows) * case.limits.in_flight,
    )
    runs = [
        simulation_tables.run_figures({"replicas": str(trial.replicas)}, case.strategy, trial.outcome, case.target_s)
        for trial in solution.tried
    ]
    document = simulation_tables.simulation_document(command, common.seed, runs, solution)
    title = f"simulate · {case.title.rpartition(' · ')[0]} · how many replicas?"
    return document, simulation_tables.simulation_page(title, document, ["replicas"], _beyond([case]))


def _beyond(cases: Sequence[Scenario]) -> list[tuple[str, str]]:
    """A word of caution where a fitted service model says more than was measured."""
    largest = cases[0].fitted.largest
    most = max(case.limits.max_rows for case in cases)
    if largest is None or largest >= most:
        return []
    return [("notice", f"batches of over {largest} rows were not measured: their times follow a straight line")]


def _draw(path: Path | None, page: Page) -> None:
    if path is None:
        return
    if not page.plots:
        print(f"plot: nothing was simulated, so there is no {path}", file=sys.stderr)
        return
    from gpuinfer.report import plotting

    try:
        path.write_bytes(plotting.image(page.plots["simulation"].figure(), path.suffix.lower().removeprefix(".")))
    except OSError as error:
        raise WorkError(f"the plot could not be written to {path}: {error.strerror}. Make room there.") from error
    print(f"plot: {path}", file=sys.stderr)


def _say(line: str, quiet: bool) -> None:
    if not quiet:
        print(line, file=sys.stderr, flush=True)


app = _app()
