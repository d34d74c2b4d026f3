"""Several models at one device: at once, or in turns."""

from __future__ import annotations

from dataclasses import replace

from gpuinfer.report.case import Case, Verdict
from gpuinfer.report.crowding import CROWDED
from gpuinfer.report.evidence import Evidence, station_s
from gpuinfer.report.forecast import Gain

WAITED = 0.25  # of the forward lanes' time: so much waiting for turns is worth a sentence


def by_side(case: Case) -> Verdict | None:
    """Models compute at once on the same cores, as somebody has set it: each forward then takes longer than in its turn
    with all of them.
    """
    run = case.run
    at_once = run.options.get("-B", {}).get("gate") is False
    if not (at_once and run.on_cpu and len(run.models) > 1) or run.runnable <= CROWDED * run.cores:
        return None
    why = (
        f"The forwards of {_named(run)} ran at once: {run.runnable:.1f} threads wanted a core and there are {run.cores}"
    )
    if run.cpu_wait_s:
        why += f"; ready to run, they waited {run.waited:.0%} of their time"
    gain = Gain.up_to(run.runnable / run.cores)
    change = run.change("-B", "true", "gate")
    return Verdict("oversubscribed CPUs", "forward", f"{why}.", "Let the models take turns.", change, gain)


def in_turns(verdict: Verdict, run: Evidence) -> Verdict:
    """The verdict, and that models took turns, where that is what their forwards waited for."""
    forwards = run.forwards
    waited = station_s(forwards, "turn") / (run.wall_s * len(forwards)) if forwards else 0.0
    if len(run.models) < 2 or waited < WAITED:
        return verdict
    had = " and ".join(f"{line['name']} {line['device_share']:.0%}" for line in run.models)
    told = f"The models took turns: forwards waited {waited:.0%} of the time for theirs; of the device, {had}."
    return replace(verdict, why=f"{told} {verdict.why}")


def _named(run: Evidence) -> str:
    return " and ".join(line["name"] for line in run.models)
