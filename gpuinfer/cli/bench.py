"""Run the same work in several ways, in turn, and say which wins here, how sure that is, and why."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from gpuinfer.cli import bench_ablation, bench_generators, bench_rollouts, flags, output, workload_targets
from gpuinfer.cli.comparison_end import (
    apply_winner,
    check_apply,
    check_ratio,
    comparison_flag,
    concluded,
    finished,
    refuse_records,
    report_folder,
    single,
    usual_flags,
)
from gpuinfer.cli.comparison_progress import ComparisonProgress, interruptible

if TYPE_CHECKING:
    from gpuinfer.lab.bench.measurement import Variant

DEFAULT_COMPARE = "inprocess,central"
REPEATS = 3
SECONDS = 5.0  # of one run, when no amount of work was named
LOAD_SECONDS = 3.0  # of a load: its requests are many and small, and three strategies are compared in about a minute
WARM_UP_S = 1.0
SERVE = "serve"  # the target that is no workload: a server, asked over HTTP
MORE_FLAGS = {
    bench_generators.TARGET: bench_generators.generators_flags,
    bench_rollouts.TARGET: bench_rollouts.rollouts_flags,
}
TEXT = """Run the same work in several ways, in turn, and say which wins here, how sure that is, and why.

A comma in a flag's value names several: `--workers 1,2,4`.
"""


class Bench(workload_targets.WorkloadTargets):
    """`gpuinfer bench TARGET`."""

    text = TEXT

    def own_flags(self) -> flags.Parameters:
        return bench_flags()

    def flags_for(self, target: str) -> flags.Parameters:
        return {**bench_flags(), **MORE_FLAGS.get(target, dict)()}

    def list_commands(self, ctx: typer.Context) -> list[str]:  # type: ignore[override]
        return [*super().list_commands(ctx), SERVE]

    def get_command(self, ctx: typer.Context, cmd_name: str) -> Any:  # type: ignore[override]
        from gpuinfer.cli.app import command_named

        if cmd_name == SERVE:
            return command_named(SERVE, "gpuinfer.cli.bench_serve")
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: typer.Context, args: list[str]) -> tuple[str, Any, list[str]]:  # type: ignore[override]
        if args[0] != SERVE:
            return super().resolve_command(ctx, args)
        from gpuinfer.cli import bench_serve

        return SERVE, bench_serve.command(), args[1:]

    def execute(self, target: str, values: Mapping[str, Any], own: Mapping[str, Any]) -> int:
        return execute(target, values, own)


app = typer.Typer(cls=Bench, add_completion=False, rich_markup_mode="rich", help=__doc__)


@app.callback()
def _root() -> None:
    """Run the same work in several ways, in turn, and say which wins here, how sure that is, and why.

    Without a target: the quick comparison of self-play. A comma in a flag's value names several: --workers 1,2,4.
    """


def bench_flags() -> flags.Parameters:
    length = f"{SECONDS:g}, of a load {LOAD_SECONDS:g}; with --games, until they are played"
    warmup = f"Length of a run before the first. [default: {WARM_UP_S:g}]"
    usual = usual_flags(
        ("A,B", "Backends to compare, or key=a,b; repeatable."),
        REPEATS,
        "Exit 4 when one is not at least so many times as fast as the first, by its metric.",
        seconds=comparison_flag("seconds", str | None, "S", f"Length of a run. [default: {length}]"),
        warmup=comparison_flag("warmup", str | None, "S", warmup),
    )
    apply = comparison_flag("apply", bool, "", "Write the winner's settings to gpuinfer.toml.", default=False)
    return {**usual, "apply": apply}


def execute(target: str, values: Mapping[str, Any], own: Mapping[str, Any]) -> int:
    """Compare, show, write. The exit code."""
    from gpuinfer.cli.building import merge

    check_ratio(own["fail_under"])
    common = merge(target, single(values)).common
    destination, folder = output.Destination(common.report), report_folder(own["report"])
    check_apply(own["apply"])
    if target == bench_generators.TARGET:
        if own["ablate"]:
            return finished(target, bench_ablation.execute(values, own, folder), destination, folder, own)
        if names := bench_generators.named_generators(own["compare"], values):
            return finished(target, bench_generators.execute(names, values, own, folder), destination, folder, own)
        values = bench_generators.for_backends(values, own)
    if target == bench_rollouts.TARGET:
        if not own["compare"]:
            return finished(target, bench_rollouts.execute(values, own), destination, folder, own)
        values = bench_rollouts.with_defaults(values)
    document, variants = compared(target, values, own, common)
    code = finished(target, document, destination, folder, own)
    if own["apply"]:
        apply_winner(target, document, variants)
    return code


def compared(
    target: str, values: Mapping[str, Any], own: Mapping[str, Any], common: Any
) -> tuple[dict[str, Any], list[Variant]]:
    """Backends and settings of ours, in turn: the document, and what was compared."""
    from gpuinfer.cli.variants import AMOUNTS
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.lab.bench.series import Series, SeriesPlan

    usual = LOAD_SECONDS if target in workload_targets.NAMES else SECONDS
    seconds: float | None = None if any(values.get(amount) for amount in AMOUNTS) else usual
    if own["seconds"] is not None:
        seconds = workload_targets.parse_seconds("--seconds", own["seconds"], least=0.1)
    warmup = WARM_UP_S if own["warmup"] is None else workload_targets.parse_seconds("--warmup", own["warmup"])
    series_plan = SeriesPlan(own["repeats"], seconds, warmup, common.seed, common.roofline)
    compare = own["compare"] or []
    from gpuinfer.cli.variants import variants_of

    refuse_records(target, values)
    timed = series_plan.seconds is not None
    variants = variants_of(target, values, compare, timed=timed)
    if len(variants) == 1 and not compare and values.get("backend") is None:
        variants = variants_of(target, values, [DEFAULT_COMPARE], timed=timed)
    log_to_people(common.verbose)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    progress = ComparisonProgress(f"bench {workload_targets.target_name(target)}", common)
    with interruptible():
        series = Series(variants, series_plan, progress.step)
        progress.watch(series)
        outcome = series.run()
    return concluded(target, outcome, series_plan, began), outcome.variants
