"""Causes in how devices are shared: several models at one device (`models.device_arbiter`), or one model in stages.

A *bubble* is the time of a stage that has nothing to compute while a batch is in the pipeline (Huang et al., "GPipe",
NeurIPS 2019, section 2.3). With one batch at a time over s equal stages it is (s - 1) / s of their time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, cast

from gpuinfer.models.model_options import OF_STAGES
from gpuinfer.report import thresholds
from gpuinfer.report.document import StageLine, StagesSection
from gpuinfer.report.evidence import Evidence, Lane, busy_s, is_stage, place, station_s
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
        f"The forwards of {_named(run)} ran at once: {run.runnable:.1f} threads wanted a core and there are {run.cores}"
    )
    if run.cpu_wait_s:
        why += f"; ready to run, they waited {run.waited:.0%} of their time"
    gain, change = Gain.up_to(run.runnable / run.cores), run.change("-B", "true", "gate")
    return Verdict("oversubscribed CPUs", "forward", f"{why}.", "Let the models share the device.", change, gain)


def in_turns(verdict: Verdict, run: Evidence) -> Verdict:
    """The verdict, preceded by how long forwards waited for other models' where that was long."""
    forwards = run.forwards
    waited = station_s(forwards, "turn") / (run.wall_s * len(forwards)) if forwards else 0.0
    if len(run.models) < 2 or waited < thresholds.WAITED_FOR_TURNS:
        return verdict
    had = " and ".join(f"{line['name']} {line['device_share']:.0%}" for line in run.models)
    turns = f"The models took turns: forwards waited {waited:.0%} of the time for theirs; of the device, {had}."
    return replace(verdict, why=f"{turns} {verdict.why}")


def _named(run: Evidence) -> str:
    return " and ".join(line["name"] for line in run.models)


BUBBLES_TOLD: Final = "pipeline bubbles"  # the verdict's class


def of_stages(snapshot: Snapshot, wall_s: float) -> StagesSection | None:
    """The report's `stages`; None for a model that is not cut. Several processes with stages of their own are taken
    together.
    """
    cut, counted = snapshot.device.get("parallel"), snapshot.device.get("stages")
    lanes = [lane for lane in snapshot.lanes if is_stage(lane["name"])]
    if not cut or not counted or not lanes or wall_s <= 0:
        return None
    each = [
        cast(StageLine, {**stage, "busy_share": _busy(_of_number(lanes, number), wall_s)})
        for number, stage in enumerate(cut["stages"])
    ]
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


def _of_number(lanes: Sequence[Lane], number: int) -> list[Lane]:
    return [lane for lane in lanes if lane["name"].rpartition(": ")[2] == f"stage {number}"]


def _busy(lanes: Sequence[Lane], wall_s: float) -> float:
    return min(1.0, busy_s(lanes) / (wall_s * len(lanes))) if lanes else 0.0


def bubbles(case: RunCase) -> Verdict | None:
    """The stages hold the run back, and part of their time is bubbles: whole models would have none."""
    run = case.run
    if (
        not run.staged
        or run.staged["active_share"] < thresholds.STAGES_BUSY
        or run.staged["bubble_share"] < thresholds.BUBBLES
    ):
        return None
    gain = Gain.up_to(min(1 / (1 - run.staged["bubble_share"]), 1 / run.efficiency if run.efficiency else math.inf))
    advice, value = _advice(run, run.staged)
    change = run.change("-B", value, "parallel") if value else None
    if change and value == "data":
        change = replace(change, without=OF_STAGES)
    return Verdict(BUBBLES_TOLD, "forward", _why(run, run.staged), advice, change, gain)


def beside(verdict: Verdict, run: Evidence) -> Verdict:
    """The verdict, with the advice not to cut a model that fits whole."""
    if not run.staged or not run.staged["fits_one"] or verdict.kind == BUBBLES_TOLD:
        return verdict
    told = f"The model is cut into {len(run.staged['stages'])} stages and fits whole: parallel=data on {_where(run)} "
    return replace(verdict, why=f"{verdict.why} {told}is the better choice.")


def _where(run: Evidence) -> str:
    return "the same cores" if run.on_cpu else "each of these devices"


def _why(run: Evidence, staged: Mapping[str, Any]) -> str:
    used = [stage["busy_share"] for stage in staged["stages"]]
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
    return why


def _advice(run: Evidence, staged: Mapping[str, Any]) -> tuple[str, str | None]:
    """The advice, and the value of `parallel` in it."""
    if staged["fits_one"]:
        return f"The model fits whole: parallel=data on {_where(run)} has no bubbles, and is the better choice.", "data"
    if staged["parallel"] == "layers":
        return "Keep several micro-batches in flight.", "pipeline"
    return "Have more rows outstanding, make micro-batches smaller, or cut it elsewhere (split_points).", None
