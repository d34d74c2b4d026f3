"""Find good settings for this machine: backend, workers, games in flight and batch limit, within a time budget."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import typer

from gpuinfer.cli import flags, output, workload_targets
from gpuinfer.cli.comparison_end import (
    apply_winner,
    check_apply,
    comparison_flag,
    concluded,
    refuse_records,
    show_comparison,
    single,
)
from gpuinfer.cli.comparison_progress import ComparisonProgress, interruptible
from gpuinfer.cli.problems import CHECK_FAILED, FAILED, PARTIAL
from gpuinfer.config import registry
from gpuinfer.errors import UsageError
from gpuinfer.host import machine

if TYPE_CHECKING:
    from gpuinfer.lab.bench.measurement import Variant
    from gpuinfer.lab.bench.tuning import Axis, Point, Space

BACKENDS = ("inprocess", "central")  # tried unless others are named, as far as they are installed
BUDGET_S, LEAST_S = 60.0, 10.0
SEARCHED = ("workers", "games_in_flight")  # flags that are searched unless they are given
NO_SERVER = "inprocess"


TEXT = """Find good settings for this machine: backend, workers, games in flight and batch limit, within a time budget.

A setting that is given stays as it is: `--workers 2` searches the others. `--backend a,b` names the backends to try."""


class Tune(workload_targets.WorkloadTargets):
    """`gpuinfer tune TARGET`."""

    text = TEXT

    def workloads(self) -> dict[str, str]:
        """All but the load generator: what comes from outside is not to be tuned."""
        return {target: name for target, name in super().workloads().items() if name not in workload_targets.NAMES}

    def own_flags(self) -> flags.Parameters:
        return {
            "budget": comparison_flag(
                "budget", str | None, "S", f"Time for all of it: 60s, 2m, 90. [default: {BUDGET_S:g}s]"
            ),
            "apply": comparison_flag("apply", bool, "", "Write the settings found to gpuinfer.toml.", default=False),
        }

    def execute(self, target: str, values: Mapping[str, Any], own: Mapping[str, Any]) -> int:
        return execute(target, values, own)


app = typer.Typer(cls=Tune, add_completion=False, rich_markup_mode="rich", help=__doc__)


@app.callback()
def _root() -> None:
    """Find good settings for this machine: backend, workers, games in flight and batch limit, within a time budget."""


def execute(target: str, values: Mapping[str, Any], own: Mapping[str, Any]) -> int:
    """Search, show, write. The exit code."""
    from gpuinfer.cli.building import merge
    from gpuinfer.cli.workload import log_to_people
    from gpuinfer.lab.bench.series import SeriesPlan
    from gpuinfer.lab.bench.tuning import Tuner, searched

    budget_s = (
        BUDGET_S if own["budget"] is None else workload_targets.parse_seconds("--budget", own["budget"], least=LEAST_S)
    )
    common = merge(target, single(values)).common
    destination = output.Destination(common.report)
    check_apply(own["apply"])
    refuse_records(target, values)
    log_to_people(common.verbose)
    began = datetime.now(UTC).isoformat(timespec="seconds")
    series_plan = SeriesPlan(seed=common.seed, roofline=common.roofline)
    progress = ComparisonProgress(f"tune {target}", common)
    with interruptible():
        tuner = Tuner(space(target, values), budget_s, series_plan, progress.step)
        progress.watch(tuner)
        outcome = tuner.run()
    document = concluded(target, outcome, tuner.series_plan, began) | {"search": searched(tuner, budget_s)}
    document["verdict"] += _advice(document)
    show_comparison(f"tune {target}", document, on_stderr=destination.stdout)
    destination.write(document)
    if own["apply"]:
        apply_winner(target, document, outcome.variants)
    from gpuinfer.lab.bench.bench_document import wrong_variants

    if document["status"] == "partial":
        return PARTIAL
    if wrong_variants(document):
        return CHECK_FAILED
    return FAILED if document["failed"] else 0


def space(target: str, values: Mapping[str, Any]) -> Space:
    """What may be varied: what the command line leaves open. Raises `UsageError` when no backend is there to try."""
    from gpuinfer.cli.grid import parts
    from gpuinfer.lab.bench.tuning import Space

    given = values.get("backend")
    backends = parts(given) if given else [name for name in BACKENDS if name in registry.names("backends")]
    if not backends:
        raise UsageError("--backend names no backend to try. Write --backend inprocess,central, or leave it out.")
    open_flags = {key: value for key, value in values.items() if key != "backend"}
    free = [name for name in SEARCHED if values.get(name) is None]

    def axes(backend: str, facts: Mapping[str, float]) -> list[Axis]:
        from gpuinfer.cli.variants import addressed
        from gpuinfer.config import options
        from gpuinfer.lab.bench import tuning

        given = addressed(values.get("backend_options") or [], "backends", backend)
        known = options.fields_of(registry.load("backends", backend).Options)
        return tuning.axes(
            facts,
            machine.cores(),
            [
                *free,
                *(
                    ["max_rows"]
                    if (
                        "max_rows" in known
                        and not any(word.partition("=")[0].replace("-", "_") == "max_rows" for word in given)
                    )
                    else []
                ),
            ],
        )

    def point(settings: Point) -> Variant:
        from gpuinfer.cli.variants import variant

        chosen = {("backend_options", key) if key == "max_rows" else (key, ""): one for key, one in settings.items()}
        return variant(target, open_flags, chosen, timed=True)

    return Space(backends, point, axes)


def _advice(document: Mapping[str, Any]) -> str:
    """What the winner means for someone who wonders whether to run a server."""
    winner = next((row for row in document["comparison"] if row["name"] == document["winner"]), None)
    if winner is None:
        return ""
    if not winner["ci95"]:
        return " A larger --budget tells more."
    alone = winner["settings"]["backend"] == NO_SERVER
    return " No server is needed: each process runs the model itself." if alone else ""
