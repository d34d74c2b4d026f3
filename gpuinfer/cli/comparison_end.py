"""The end of a comparison: its document shown and written, its winner applied to gpuinfer.toml, its exit code."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from gpuinfer.cli import flags, output, workload_targets
from gpuinfer.cli.building import merge, option_flags, plain_flags
from gpuinfer.cli.flags import SHOWN_ONLY
from gpuinfer.cli.problems import CHECK_FAILED, FAILED, PARTIAL
from gpuinfer.config import registry, settings
from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.extras import require_extra

if TYPE_CHECKING:
    from gpuinfer.lab.bench.measurement import Variant
    from gpuinfer.lab.bench.series import SeriesOutcome, SeriesPlan

PANEL = "Comparison"


def comparison_flag(
    name: str, kind: Any, metavar: str, text: str, default: Any = None, **more: Any
) -> inspect.Parameter:
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


def usual_flags(compare: tuple[str, str], repeats: int, fail_under: str, **more: inspect.Parameter) -> flags.Parameters:
    """Those that each comparison has, and `more` among them: `compare` and `fail_under` say what they mean there."""
    return {
        "compare": comparison_flag("compare", list[str] | None, *compare),
        "repeats": repeats_flag(repeats),
        **more,
        "fail_under": comparison_flag("fail_under", float | None, "RATIO", fail_under),
        "report": comparison_flag(
            "report", Path | None, "DIR", "Write JSON, Markdown, a page and its plots to this folder."
        ),
    }


def repeats_flag(repeats: int) -> inspect.Parameter:
    text = f"Runs of each, in turn. [default: {repeats}]"
    return comparison_flag("repeats", int, "N", text, default=repeats, min=1)


def check_ratio(least: float | None) -> None:
    """Raises `UsageError` for a --fail-under that nothing could fail."""
    if least is not None and not 0 < least < float("inf"):
        raise UsageError(f"--fail-under {least}: nothing could fail that. Give a ratio such as 0.95.")


def finished(
    target: str,
    document: Mapping[str, Any],
    destination: output.Destination,
    folder: Path | None,
    own: Mapping[str, Any],
) -> int:
    """Show and write it. The exit code."""
    show_comparison(f"bench {workload_targets.target_name(target)}", document, on_stderr=destination.stdout)
    destination.write(document)
    write_report(folder, document)
    return comparison_exit_code(document, own["fail_under"])


def single(values: Mapping[str, Any]) -> dict[str, Any]:
    """The flags with the first of several values each, and no plugin's options: enough to read the common settings."""
    from gpuinfer.cli.grid import parts
    from gpuinfer.cli.variants import KINDS, SINGLE

    common = {key: values.get(key) for key in flags.common_flags() if key not in (*SINGLE, *KINDS)}
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
    if merged.common.profile is not None:
        raise UsageError(
            f"{merged.origin('profile')}: a comparison makes many runs, and a folder of profiles holds one. "
            f"Leave it out, and profile `gpuinfer {target} --profile DIR`."
        )
    given = merged.table(target)
    for key in ("out", "resume"):
        if key in given and str(given[key].value).lower() not in ("none", "false", ""):
            origin = given[key].origin
            cure = (
                "Leave it out" if origin.startswith("--") else "Add --out none" if key == "out" else "Add --no-resume"
            )
            raise UsageError(f"{origin}: a comparison plays the same games many times and keeps none. {cure}.")


def concluded(target: str, outcome: SeriesOutcome, series_plan: SeriesPlan, began: str) -> dict[str, Any]:
    """The document. Raises `UsageError` when no variant could run, with the reasons."""
    from gpuinfer.lab.bench import bench_document
    from gpuinfer.lab.bench.comparison import compare_variants

    if not outcome.left() and not outcome.failed and not outcome.stopped:
        reasons = [f"{name}: {reason}" for name, reason in outcome.skipped.items()]
        raise UsageError("\n".join(["none of these can run here.", *reasons[:2]]))
    return bench_document.bench_document(
        workload_targets.target_name(target), outcome, compare_variants(outcome), series_plan, began
    )


def show_comparison(title: str, document: Mapping[str, Any], on_stderr: bool) -> None:
    """The table and its notes on the terminal."""
    from gpuinfer.cli.screen.display import show_page
    from gpuinfer.lab.bench.bench_tables import bench_page

    page = bench_page(document)
    show_page(page, f"{title} · {page.about}", on_stderr=on_stderr)


def report_folder(path: Path | None) -> Path | None:
    """Made now, so that nothing is measured for what cannot be drawn or written. Raises `UsageError`."""
    if path is None:
        return None
    require_extra("plots", "--report")
    try:
        path.mkdir(parents=True, exist_ok=True)
        (probe := path / ".writable").touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(f"--report {path}: {error.strerror}. Give a folder that can be written to.") from error
    return path


def logs_folder(report: Path | None, scratch: Path) -> Path:
    """The folder of the children's logs, readable for the user alone: in that of the report where there is one."""
    logs = (report or scratch) / "logs"
    logs.mkdir(exist_ok=True, mode=0o700)
    return logs


def printer(quiet: bool, clear: Callable[[str], None] = lambda text: None) -> Callable[[str], None]:
    """Prints lines on standard error unless `quiet`, after `clear("")` has taken a status line away."""

    def print_line(line: str) -> None:
        clear("")
        if not quiet:
            print(line, file=sys.stderr, flush=True)

    return print_line


def write_report(folder: Path | None, document: Mapping[str, Any]) -> None:
    if folder is None:
        return
    from gpuinfer.lab.bench.bench_tables import bench_page

    bench_page(document).write(folder, "bench", document, "Make room there, or give another --report.")
    print(f"written: {folder / 'bench.html'}, and beside it JSON, Markdown and plots", file=sys.stderr)


def check_apply(wanted: bool) -> None:
    """Raises `UsageError`, before anything is measured, where `--apply` could not write the settings file."""
    if wanted:
        require_extra("tune", "--apply")


def apply_winner(target: str, document: Mapping[str, Any], variants: list[Variant]) -> None:
    """Write the winner's settings, and say what was written."""

    winner = next((one for one in variants if one.name == document["winner"]), None)
    if winner is None or document["status"] == "partial":
        print("gpuinfer: nothing is applied, since no variant has won. Run it to its end.", file=sys.stderr)
        return
    path, written = apply_settings(target, winner.flags)
    print(f"{path}: {', '.join(written) or 'nothing to change'}", file=sys.stderr)
    if stronger := overruled(target, winner.flags):
        print(f"gpuinfer: {', '.join(stronger)} in the environment beats {path}. Unset it.", file=sys.stderr)


def comparison_exit_code(document: Mapping[str, Any], least: float | None) -> int:
    """3 stopped, 4 wrong answers or too slow (on standard error), 1 a variant failed after its warm-up, else 0."""
    from gpuinfer.lab.bench.bench_document import variants_below, wrong_variants

    if document["status"] == "partial":
        return PARTIAL
    if wrong_variants(document):
        return CHECK_FAILED
    if least is not None and (slow := variants_below(document, least)):
        print(f"gpuinfer: --fail-under {least:g} does not hold for {', '.join(slow)}.", file=sys.stderr)
        return CHECK_FAILED
    return FAILED if document["failed"] else 0


def apply_settings(target: str, flags: Mapping[str, Any]) -> tuple[Path, list[str]]:
    """Put what these flags say into the settings file; all else in it stays, comments too. The file, and what it says.

    Raises `WorkError` when it cannot be written.
    """
    import tomlkit

    merged = merge(target, flags)
    path = merged.file or settings.FILE
    document = tomlkit.parse(path.read_text("utf-8") if path.exists() else "")
    written = []
    for keys in _keys(target, flags, merged.common):
        value = _in_force(merged, keys)
        table: Any = document
        for key in keys[:-1]:
            table = table.setdefault(key, tomlkit.table())
        table[keys[-1]] = value
        written.append(f"{'.'.join(keys)} = {tomlkit.item(value).as_string()}")
    try:
        output.replace_file(path.resolve(), tomlkit.dumps(document))
    except OSError as error:
        raise WorkError(
            f"{path} could not be written: {error.strerror}. Give the flags on the command line."
        ) from error
    return path, written


def overruled(target: str, flags: Mapping[str, Any]) -> list[str]:
    """The environment variables that have the last word on what `apply` writes for these flags."""
    common, bare = merge(target, flags).common, settings.load(config=flags.get("config"))
    origins = (bare.origin(".".join(keys)) for keys in _keys(target, flags, common))
    return [origin for origin in origins if origin.startswith(settings.PREFIX)]


def _keys(target: str, flags: Mapping[str, Any], common: settings.Common) -> Iterator[list[str]]:
    """The settings that these flags are about."""
    for name in {**plain_flags(target, flags), **option_flags(flags, common)}:
        if name not in SHOWN_ONLY:
            yield name.split(".")


def _in_force(merged: settings.Settings, keys: list[str]) -> Any:
    """A setting's value as TOML can hold it."""
    if len(keys) == 1:
        values = merged.common
    else:
        kind, name = ("workloads", keys[0]) if len(keys) == 2 else (keys[0], keys[1])
        plugin = registry.load(kind, name)
        values = plugin.Options(**merged.options(kind, name, plugin))
    value = values.model_dump(mode="json", by_alias=True)[keys[-1]]
    return "none" if value is None else value  # TOML has no null; settings read the word
