"""The end of a comparison: its document shown and written, its winner applied, its exit code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gpuinfer.cli import flags, output, targets
from gpuinfer.cli.problems import CHECK_FAILED, FAILED, PARTIAL
from gpuinfer.errors import UsageError

if TYPE_CHECKING:
    from gpuinfer.bench.measure import Variant
    from gpuinfer.bench.series import Course, Outcome

PANEL = "Comparison"


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
    from gpuinfer.cli.variants import KINDS, SINGLE, parts

    common = {key: values.get(key) for key in flags.common() if key not in (*SINGLE, *KINDS)}
    first = {key: parts(given)[0] for key, given in common.items() if isinstance(given, str) and parts(given)}
    return {**values, **first, **dict.fromkeys(KINDS)}


def refuse_records(target: str, values: Mapping[str, Any]) -> None:
    """The same games again and again cannot go into one folder. Raises `UsageError`."""
    from gpuinfer.cli.building import merge

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
