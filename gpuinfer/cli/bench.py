"""Run the same work in several ways, in turn, and say which wins here, how sure that is, and why."""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gpuinfer.cli import flags, generators, output, targets
from gpuinfer.cli.problems import CHECK_FAILED, FAILED, PARTIAL
from gpuinfer.cli.progress import ComparisonProgress, interruptible
from gpuinfer.errors import UsageError

if TYPE_CHECKING:
    from gpuinfer.bench.measure import Variant
    from gpuinfer.bench.series import Course, Outcome

DEFAULT_COMPARE = "inprocess,central"
REPEATS = 3
SECONDS = 5.0  # of one run, when no amount of work was named
LOAD_SECONDS = 3.0  # of a load: its requests are many and small, and three strategies are compared in about a minute
WARM_UP_S = 1.0
PANEL = "Comparison"
TEXT = """Run the same work in several ways, in turn, and say which wins here, how sure that is, and why.

A comma in a flag's value names several: `--workers 1,2,4`.
"""


class Bench(targets.Targets):
    """`gpuinfer bench TARGET`."""

    text = TEXT

    def own_flags(self) -> flags.Parameters:
        return own_flags()

    def flags_for(self, target: str) -> flags.Parameters:
        return {**own_flags(), **(generators.more_flags() if target == generators.TARGET else {})}

    def execute(self, target: str, values: Mapping[str, Any], own: Mapping[str, Any]) -> int:
        return execute(target, values, own)


app = typer.Typer(cls=Bench, add_completion=False, rich_markup_mode="rich", help=__doc__)


@app.callback()
def _root() -> None:
    """Run the same work in several ways, in turn, and say which wins here, how sure that is, and why.

    Without a target: the quick comparison of self-play. A comma in a flag's value names several: --workers 1,2,4.
    """


def own_flags() -> flags.Parameters:
    return {
        "compare": own_flag("compare", list[str] | None, "A,B", "Backends to compare, or key=a,b; repeatable."),
        "repeats": own_flag(
            "repeats", int, "N", f"Runs of each, in turn. [default: {REPEATS}]", default=REPEATS, min=1
        ),
        "seconds": own_flag(
            "seconds",
            str | None,
            "S",
            f"Length of a run. [default: {SECONDS:g}, of a load {LOAD_SECONDS:g}; with --games, until they are played]",
        ),
        "warmup": own_flag("warmup", str | None, "S", f"Length of a run before the first. [default: {WARM_UP_S:g}]"),
        "fail_under": own_flag(
            "fail_under",
            float | None,
            "RATIO",
            "Exit 4 when one is not at least so many times as fast as the first, by its metric.",
        ),
        "report": own_flag("report", Path | None, "DIR", "Write JSON, Markdown, a page and its plots to this folder."),
        "apply": own_flag("apply", bool, "", "Write the winner's settings to gpuinfer.toml.", default=False),
    }


def own_flag(name: str, kind: Any, metavar: str, text: str, default: Any = None, **more: Any) -> inspect.Parameter:
    option = typer.Option(
        default,
        flags.flag(name),
        metavar=metavar,
        help=text.replace("[", r"\["),
        show_default=False,
        rich_help_panel=PANEL,
        **more,
    )
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=option, annotation=kind)


def execute(target: str, values: Mapping[str, Any], own: Mapping[str, Any]) -> int:
    """Compare, show, write. The exit code."""
    from gpuinfer.cli.workload import merge

    if own["fail_under"] is not None and not 0 < own["fail_under"] < math.inf:
        raise UsageError(f"--fail-under {own['fail_under']}: nothing could fail that. Give a ratio such as 0.95.")
    common = merge(target, single(values)).common
    destination, folder = output.Destination(common.report), report_folder(own["report"])
    if target == generators.TARGET:
        if names := generators.named(own["compare"], values):
            return finished(target, generators.execute(names, values, own, folder), destination, folder, own)
        values = generators.for_backends(values, own)
    document, variants = compared(target, values, own, common)
    code = finished(target, document, destination, folder, own)
    if own["apply"]:
        apply_winner(target, document, variants)
    return code


def compared(
    target: str, values: Mapping[str, Any], own: Mapping[str, Any], common: Any
) -> tuple[dict[str, Any], list[Variant]]:
    """Backends and settings of ours, in turn: the document, and what was compared."""
    from gpuinfer.bench.series import Series
    from gpuinfer.cli.workload import log_to_people

    course = _course(target, values, own, common.seed, common.roofline)
    variants = _variants(target, values, own["compare"] or [], course)
    log_to_people(common.verbose)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    progress = ComparisonProgress(f"bench {targets.called(target)}", common)
    with interruptible():
        series = Series(variants, course, progress.step)
        progress.watch(series)
        outcome = series.run()
    return concluded(target, outcome, course, began), outcome.variants


def finished(
    target: str,
    document: Mapping[str, Any],
    destination: output.Destination,
    folder: Path | None,
    own: Mapping[str, Any],
) -> int:
    """Show and write it. The exit code."""
    show(f"bench {targets.called(target)}", document, on_stderr=destination.stdout)
    destination.write(document)
    write_report(folder, document)
    return exit_code(document, own["fail_under"])


def single(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with the first of several values each, and no plugin's options: enough to read the common settings."""
    from gpuinfer.cli.variants import KINDS, parts

    several = ("backend", "strategy", "device", "dtype")
    first = {key: parts(values[key])[0] for key in several if values.get(key) and parts(values[key])}
    return {**values, **first, **dict.fromkeys(KINDS)}


def _course(target: str, values: Mapping[str, Any], own: Mapping[str, Any], seed: int, roofline: bool) -> Course:
    from gpuinfer.bench.series import Course
    from gpuinfer.cli.variants import AMOUNTS

    usual = LOAD_SECONDS if target in targets.NAMES else SECONDS
    seconds: float | None = None if any(values.get(amount) for amount in AMOUNTS) else usual
    if own["seconds"] is not None:
        seconds = targets.seconds("--seconds", own["seconds"], least=0.1)
    warmup = WARM_UP_S if own["warmup"] is None else targets.seconds("--warmup", own["warmup"])
    return Course(own["repeats"], seconds, warmup, seed, roofline)


def _variants(target: str, values: Mapping[str, Any], compare: list[str], course: Course) -> list[Variant]:
    from gpuinfer.cli.variants import expand

    refuse_records(target, values)
    timed = course.seconds is not None
    found = expand(target, values, compare, timed=timed)
    if len(found) == 1 and not compare and values.get("backend") is None:
        found = expand(target, values, [DEFAULT_COMPARE], timed=timed)
    return found


def refuse_records(target: str, values: Mapping[str, Any]) -> None:
    """The same games again and again cannot go into one folder. Raises `UsageError`."""
    from gpuinfer.cli.workload import merge

    merged = merge(target, single(values))
    if merged.common.trace is not None:
        raise UsageError(
            f"{merged.origin('trace')}: a comparison makes many runs, and a trace holds one. "
            f"Leave it out, and record `gpuinfer {target} --trace FILE`."
        )
    given = merged.table(target)
    for key in ("out", "resume"):
        if key in given and str(given[key].value).lower() not in ("none", "false", ""):
            origin = given[key].origin
            cure = (
                "Leave it out" if origin.startswith("--") else "Add --out none" if key == "out" else "Add --no-resume"
            )
            raise UsageError(f"{origin}: a comparison plays the same games many times and keeps none. {cure}.")


def concluded(target: str, outcome: Outcome, course: Course, began: str) -> dict[str, Any]:
    """The document. Raises `UsageError` when no variant could run, with the reasons."""
    from gpuinfer.bench import document
    from gpuinfer.bench.compare import compare

    if not outcome.left() and not outcome.failed and not outcome.stopped:
        reasons = [f"{name}: {reason}" for name, reason in outcome.skipped.items()]
        raise UsageError("\n".join(["none of these can run here.", *reasons[:2]]))
    return document.build(targets.called(target), outcome, compare(outcome), course, began)


def show(title: str, document: Mapping[str, Any], on_stderr: bool) -> None:
    from gpuinfer.bench import tables
    from gpuinfer.screen.display import comparison

    columns, rows = tables.brief(document)
    heading = f"{title} · {tables.about(document)}"
    comparison(heading, columns, rows, list(tables.notes(document)), on_stderr=on_stderr)


def report_folder(path: Path | None) -> Path | None:
    """Made now, so that nothing is measured for a place that cannot be written. Raises `UsageError`."""
    if path is None:
        return None
    try:
        path.mkdir(parents=True, exist_ok=True)
        (probe := path / ".writable").touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--report {path}: {error.strerror}. Give a folder that can be written to.") from error
    return path


def write_report(folder: Path | None, document: Mapping[str, Any]) -> None:
    if folder is None:
        return
    from gpuinfer.bench.pages import write

    write(folder, document)
    print(f"written: {folder / 'bench.html'}, and beside it JSON, Markdown and plots", file=sys.stderr)


def apply_winner(target: str, document: Mapping[str, Any], variants: list[Variant]) -> None:
    """Write the winner's settings, and say what was written."""
    from gpuinfer.cli.apply import apply, overruled

    winner = next((one for one in variants if one.name == document["winner"]), None)
    if winner is None or document["status"] == "partial":
        print("gpuinfer: nothing is applied, since no variant has won. Run it to its end.", file=sys.stderr)
        return
    path, written = apply(target, winner.flags)
    print(f"{path}: {', '.join(written) or 'nothing to change'}", file=sys.stderr)
    if stronger := overruled(target, winner.flags):
        print(f"gpuinfer: {', '.join(stronger)} in the environment beats {path}. Unset it.", file=sys.stderr)


def exit_code(document: Mapping[str, Any], least: float | None) -> int:
    """3 stopped, 4 wrong answers or too slow (said on standard error), 1 a variant failed after its warm-up, else 0."""
    from gpuinfer.bench.document import below, wrong

    if document["status"] == "partial":
        return PARTIAL
    if wrong(document):
        return CHECK_FAILED
    if least is not None and (slow := below(document, least)):
        print(f"gpuinfer: --fail-under {least:g} does not hold for {', '.join(slow)}.", file=sys.stderr)
        return CHECK_FAILED
    return FAILED if document["failed"] else 0
