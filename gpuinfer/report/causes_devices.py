"""Causes in how devices are shared: several models at one device (`models.device_arbiter`), or one model in stages.

A *bubble* is the time of a stage that has nothing to compute while a batch is in the pipeline (Huang et al., "GPipe",
NeurIPS 2019, section 2.3). With one batch at a time over s equal stages it is (s - 1) / s of their time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import cast

from gpuinfer.models.model_options import OF_STAGES
from gpuinfer.report import thresholds
from gpuinfer.report.document import StageLine, StagesSection
from gpuinfer.report.evidence import Evidence, busy_s, is_stage, place, station_s
from gpuinfer.report.forecast import Gain, RunCase, Verdict
from gpuinfer.stats import Snapshot


def by_side(case: RunCase) -> Verdict | None:
    """With `gate=false` models compute at once, each as if it were alone: more threads want a core than there are."""
    run = case.run
    if run.options.get("-B", {}).get("gate") is not False or len(run.models) < 2:
        return None
    if not run.on_cpu or run.runnable <= thresholds.CROWDED * run.cores:
        return None
    why = (
        f"The forwards of {' and '.join(line['name'] for line in run.models)} ran at once: {run.runnable:.1f} threads "
        f"wanted a core and there are {run.cores}"
    )
    if run.cpu_wait_s:
        why += f"; ready to run, they waited {run.waited:.0%} of their time"
    gain, change = Gain.up_to(run.runnable / run.cores), run.change("-B", "true", "gate")
    return Verdict("oversubscribed CPUs", "forward", f"{why}.", "Let the models share the device.", change, gain)


def of_stages(snapshot: Snapshot, wall_s: float) -> StagesSection | None:
    """The report's `stages`; None for a model that is not cut. Several processes with stages of their own are taken
    together.
    """
    cut, counted = snapshot.device.get("parallel"), snapshot.device.get("stages")
    lanes = [lane for lane in snapshot.lanes if is_stage(lane["name"])]
    if not cut or not counted or not lanes or wall_s <= 0:
        return None
    each: list[StageLine] = []
    for number, stage in enumerate(cut["stages"]):
        own = [lane for lane in lanes if lane["name"].rpartition(": ")[2] == f"stage {number}"]
        busy = min(1.0, busy_s(own) / (wall_s * len(own))) if own else 0.0
        each.append(cast(StageLine, {**stage, "busy_share": busy}))
    processes = len({place(lane["name"]) for lane in lanes})
    active_s = min(float(counted["active_s"]), wall_s * processes)
    could = active_s * len(each)
    return {
        "parallel": cut["mode"],
        "stages": each,
        "batches": round(counted["batches"]),
        "micro_batches": round(counted["micro_batches"]),
        "active_share": active_s / (wall_s * processes),
        "bubble_share": max(0.0, 1 - busy_s(lanes) / could) if could else 0.0,
        "fits_one": cut["fits_one"],
    }


def bubbles(case: RunCase) -> Verdict | None:
    """The stages hold the run back, and part of their time is bubbles: whole models would have none."""
    run = case.run
    if (
        not run.staged
        or run.staged["active_share"] < thresholds.STAGES_BUSY
        or run.staged["bubble_share"] < thresholds.BUBBLES
    ):
        return None
    staged, used = run.staged, [stage["busy_share"] for stage in run.staged["stages"]]
    shares = ", ".join(f"{share:.0%}" for share in used)
    why = (
        f"The {len(used)} stages were busy {shares} of the time, and {staged['bubble_share']:.0%} of what they had was "
    )
    why += "bubbles: a batch was there, and not with them."
    if staged["parallel"] == "layers":
        why += " Of layers one stage at a time computes."
    elif sum(used) < thresholds.UNEVEN_STAGES * max(used) * len(used):
        why += f" Stage {used.index(max(used))} takes longest."
    if run.efficiency:
        why += (
            f" It is {run.efficiency:.0%} of what whole models do beside one another on the same cores (the roofline)."
        )
    change = None
    if staged["fits_one"]:
        advice = f"The model fits whole: parallel=data on {_where(run)} has no bubbles, and is the better choice."
        if change := run.change("-B", "data", "parallel"):
            change = replace(change, without=OF_STAGES)
    elif staged["parallel"] == "layers":
        advice, change = "Keep several micro-batches in flight.", run.change("-B", "pipeline", "parallel")
    else:
        advice = "Have more rows outstanding, make micro-batches smaller, or cut it elsewhere (split_points)."
    gain = Gain.up_to(min(1 / (1 - staged["bubble_share"]), 1 / run.efficiency if run.efficiency else math.inf))
    return Verdict("pipeline bubbles", "forward", why, advice, change, gain)


def beside(verdict: Verdict, run: Evidence) -> Verdict:
    """The verdict, preceded by how long forwards waited for other models' where that was long, and followed by the
    advice not to cut a model that fits whole.
    """
    why, forwards = verdict.why, run.forwards
    waited = station_s(forwards, "turn") / (run.wall_s * len(forwards)) if forwards else 0.0
    if len(run.models) >= 2 and waited >= thresholds.WAITED_FOR_TURNS:
        had = " and ".join(f"{line['name']} {line['device_share']:.0%}" for line in run.models)
        turns = f"The models took turns: forwards waited {waited:.0%} of the time for theirs; of the device, {had}."
        why = f"{turns} {why}"
    if run.staged and run.staged["fits_one"] and verdict.kind != "pipeline bubbles":
        why += f" The model is cut into {len(run.staged['stages'])} stages and fits whole: parallel=data on "
        why += f"{_where(run)} is the better choice."
    return replace(verdict, why=why)


def _where(run: Evidence) -> str:
    return "the same cores" if run.on_cpu else "each of these devices"
