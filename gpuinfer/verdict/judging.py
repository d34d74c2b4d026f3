"""The verdict: the first cause that recognises the run, in an order that is the argument.

First whether the numbers add up; then whether anything is left to gain; then the bounds, from the parts that are busy
all the time, and that nothing but their own cure can move, to what is left when no part is: waiting for one another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

from gpuinfer.evidence import Evidence
from gpuinfer.verdict import busy, generation, waits
from gpuinfer.verdict.case import Case, Verdict

CAUSES: Sequence[Callable[[Case], Verdict | None]] = (
    busy.numbers_do_not_add_up,
    busy.at_the_roofline,
    waits.for_arrivals,
    busy.too_many_threads,
    busy.others_have_the_cores,
    busy.forwards,
    busy.one_worker,
    busy.all_workers,
    busy.all_cores,
    waits.for_the_timer,
    waits.for_clients,
    waits.for_one_another,
    waits.for_nobody_known,
)
GENERATION: Sequence[Callable[[Case], Verdict | None]] = (
    generation.too_short,
    busy.numbers_do_not_add_up,
    waits.for_arrivals,
    busy.others_have_the_cores,
    generation.host,
    generation.sampling,
    generation.too_few_rows,
    generation.more_slots,
    generation.model,
)  # for backends with slots: their batches are forward steps, so none of the laws above speaks of them
NOTHING = Verdict("inconclusive", "idle", "Nothing was measured.", "Let the run go on for longer.")

NOTHING_ASKED = Verdict("inconclusive", "idle", "Nothing was asked.", "Let the load last longer, or raise its rate.")


def judge(run: Evidence) -> dict[str, Any]:
    """What the report says: the class, its evidence, the bounds in rows/s, the advice and its gain as a factor."""
    if not (run.wall_s > 0 and run.lanes):
        return _told(NOTHING, {}, 0.0, 0.0)
    if {"offered_rows_per_s", "clients"} & run.facts.keys() and not (run.requests or run.lost or run.rows_per_s):
        return _told(NOTHING_ASKED, {}, 0.0, 0.0)
    case = Case.of(run)
    verdict = next(
        (found for cause in (GENERATION if run.slots else CAUSES) if (found := cause(case))), None
    ) or waits.no_cause_fits(case)
    return _told(_beside(verdict, run), dict(case.bounds), run.share(verdict.station), run.share("other"))


def _beside(verdict: Verdict, run: Evidence) -> Verdict:
    """The verdict, and what it must be seen beside: a load that is more than is answered."""
    offered = run.facts.get("offered_rows_per_s", 0.0)
    if verdict.kind == "arrival-bound" or run.rows_per_s >= waits.KEEPS_UP * offered:
        return verdict
    beside = f"{offered:,.0f} rows/s arrived and only {run.rows_per_s:,.0f} were answered."
    return replace(verdict, why=f"{beside} {verdict.why}", healthy=False)


def _told(verdict: Verdict, bounds: dict[str, float], share: float, unexplained: float) -> dict[str, Any]:
    return {
        "class": verdict.kind,
        "healthy": verdict.healthy,
        "station": verdict.station,
        "share": share,
        "why": verdict.why,
        "advice": verdict.advice,
        "command": verdict.command,
        "gain": asdict(verdict.gain),
        "bounds": bounds,
        "unexplained": unexplained,
    }
