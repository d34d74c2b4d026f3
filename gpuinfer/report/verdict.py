"""The verdict: the first cause that recognises the run, in a meaningful order.

First whether the numbers add up; then whether anything is left to gain; then the bounds, from parts that are busy all
the time, and that only their own cure can move, to the case in which no part is busy: waiting for one another.

`judge` names what holds a run back, with the evidence and the change that would help; `after` updates the verdict once
the advice was tried.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from gpuinfer.config.options import OptionChange
from gpuinfer.report import (
    causes_cluster,
    causes_cpu_contention,
    causes_devices,
    causes_diffusion,
    causes_rollouts,
    causes_rows,
    causes_text,
    thresholds,
)
from gpuinfer.report.document import BottleneckSection, ChangeSection, GainSection
from gpuinfer.report.evidence import Evidence
from gpuinfer.report.forecast import RunCase, Verdict

CAUSES: Sequence[Callable[[RunCase], Verdict | None]] = (
    causes_rows.numbers_do_not_add_up,
    causes_rows.at_the_roofline,
    causes_rows.for_arrivals,
    causes_devices.by_side,
    causes_cpu_contention.too_many_threads,
    causes_devices.bubbles,
    causes_cpu_contention.others_have_the_cores,
    causes_cpu_contention.small_batches,
    causes_rows.forwards,
    causes_rows.one_worker,
    causes_rows.all_workers,
    causes_rows.all_cores,
    causes_rows.for_the_timer,
    causes_rows.for_clients,
    causes_rows.for_one_another,
    causes_rows.for_nobody_known,
)
GENERATION: Sequence[Callable[[RunCase], Verdict | None]] = (
    causes_text.too_short,
    causes_rows.numbers_do_not_add_up,
    causes_rows.for_arrivals,
    causes_rollouts.slow_trainer,
    causes_devices.by_side,
    causes_devices.bubbles,
    causes_cpu_contention.others_have_the_cores,
    causes_rollouts.slow_environment,
    causes_rollouts.few_groups,
    causes_text.idle,
    causes_text.starting,
    causes_text.first_touch,
    causes_text.between,
    causes_text.sampling,
    causes_text.few_threads,
    causes_text.too_few_pages,
    causes_text.small_pieces,
    causes_text.long_prompts,
    causes_text.too_few_rows,
    causes_diffusion.recomputation,
    causes_diffusion.few_tokens,
    causes_text.more_slots,
    causes_text.memory_bandwidth,
    causes_text.idle_cores,
    causes_text.below_the_roofline,
    causes_text.model,
)  # for backends with slots: their batches are forward steps, so none of the laws above speaks of them
NOTHING = Verdict("inconclusive", "idle", "Nothing was measured.", "Let the run go on for longer.")

NOTHING_ASKED = Verdict("inconclusive", "idle", "Nothing was asked.", "Let the load last longer, or raise its rate.")

NOTHING_TO_DO = Verdict("inconclusive", "idle", "There was nothing to do.", "Give it something to do.")


def judge(run: Evidence) -> BottleneckSection:
    """The report's `bottleneck`: class, evidence, bounds in rows/s, advice and its gain as a factor."""
    of_nodes = causes_cluster.dearest(run)
    if of_nodes is not None and not (of_nodes.change and run.in_force(of_nodes.change)):
        return _section(of_nodes, run, {})
    if not (run.wall_s > 0 and run.lanes):
        return _section(NOTHING, run, {})
    if run.total == 0 and not (run.requests or run.lost or run.rows_per_s):
        return _section(NOTHING_TO_DO, run, {})
    if {"offered_rows_per_s", "clients"} & run.facts.keys() and not (run.requests or run.lost or run.rows_per_s):
        return _section(NOTHING_ASKED, run, {})
    case = RunCase.of(run)
    causes = GENERATION if run.slots else CAUSES
    verdict = None
    for cause in causes:
        found = cause(case)
        if found and not (found.change and run.in_force(found.change)):  # else that is done: another cause is at work
            verdict = found
            break
    verdict = causes_cpu_contention.beside_others(verdict or causes_rows.no_cause_fits(case), run)
    verdict = causes_devices.beside(verdict, run)
    offered = run.facts.get("offered_rows_per_s", 0.0)  # a load that is higher than what was answered
    if verdict.kind != "arrival-bound" and run.rows_per_s < thresholds.KEEPS_UP * offered:
        lost = f"{offered:,.0f} rows/s arrived and only {run.rows_per_s:,.0f} were answered."
        verdict = replace(verdict, why=f"{lost} {verdict.why}", healthy=False)
    verdict = causes_cluster.of_the_middle(verdict, run)
    return _section(verdict, run, dict(case.bounds))


def _section(verdict: Verdict, run: Evidence, bounds: dict[str, float]) -> BottleneckSection:
    measured, change = run.wall_s > 0 and bool(run.lanes), verdict.change
    return {
        "class": verdict.kind,
        "healthy": verdict.healthy,
        "station": verdict.station,
        "share": run.share(verdict.station) if measured else 0.0,
        "why": verdict.why,
        "advice": verdict.advice,
        "change": cast(ChangeSection, change.plain()) if change else None,
        "command": change.in_command(run.command) if change else None,
        "gain": cast(GainSection, asdict(verdict.gain)),
        "trial": None,
        "not_tried": None,
        "bounds": bounds,
        "unexplained": run.share("other") if measured else 0.0,
    }


# Options that change how the same work is done, so that its speed says all: not how much there is of it, nor what.
QUICK = {
    *("dtype", "workers", "games_in_flight", "groups_in_flight", "batch_size", "max_rows", "max_wait", "slots"),
    *("step_tokens", "chunk_rows", "threads", "in_flight", "parallel", "gate"),
}


@dataclass(frozen=True, slots=True)
class TriedAdvice:
    """How many times as fast the advised setting was as the one in force, both run in turns."""

    measured: float
    low: float  # of the 95 % interval
    high: float
    seconds: float  # of a turn
    turns: int  # of both
    command: str  # that was tried

    @property
    def faster(self) -> bool:
        return self.low > 1

    @property
    def unclear(self) -> bool:
        return self.low <= 1 and self.high > thresholds.UNCLEAR_TRIAL


def to_try(report: Mapping[str, Any]) -> OptionChange | None:
    """The change that a finished run advises, if trying it for some seconds shows whether it helps."""
    change = report["bottleneck"].get("change")
    from_outside = "arrival" in report["bottleneck"]["bounds"]  # that load is answered as fast as it comes
    if report["status"] != "done" or change is None or change["name"] not in QUICK or from_outside:
        return None
    return OptionChange(**change)


def after(bottleneck: Mapping[str, Any], trial: TriedAdvice) -> dict[str, Any]:
    """The report's `bottleneck` once its advice was tried: advice that brought nothing is withdrawn."""
    told = {**bottleneck, "trial": asdict(trial), "not_tried": None}
    if trial.faster or trial.unclear:
        return told
    words = " ".join(OptionChange(**bottleneck["change"]).words)
    found = "no faster" if trial.high >= 1 else f"slower, {trial.measured:.2f} times as fast"
    advice = f"Tried {words}: {found} ({trial.low:.2f} to {trial.high:.2f}). Nothing simple to change."
    return {**told, "advice": advice, "change": None, "command": None}
