"""Causes in the cores: too few for our own threads, or other programs have them.

Search and model share the cores: what one saves, the other gets. A busy lane then says little, since it counts the time
in which another lane has its core. What counts is whose the work is: a saving in one part gains as Amdahl (1967) has
it, 1 / (1 - f + f / s).
"""

from __future__ import annotations

import math
from dataclasses import replace

from gpuinfer.report import thresholds
from gpuinfer.report.causes_rows import cap_too_small, more_rows
from gpuinfer.report.evidence import Evidence, busy_s, cap, outstanding
from gpuinfer.report.forecast import Gain, RunCase, Verdict

YIELDS = (
    "device-saturated",
    "search-bound",
    "client-bound",
    "too few rows outstanding",  # of games that are all in flight, say
    "host-bound",
    "below the roofline",
    "inconclusive",
)
"""Classes that neighbours alone can make, where no change of ours would mend them."""


def too_many_threads(case: RunCase) -> Verdict | None:
    """More of our threads want a core than there are cores, by a setting. Threads that only take turns, such as a
    worker's search and its forward, lose nothing: as many cores are at work.
    """
    run = case.run
    if (
        not run.on_cpu
        or run.runnable <= thresholds.CROWDED * run.cores
        or run.cores_busy < thresholds.OURS_LEAST * run.cores
    ):
        return None
    lanes, forwards = busy_s(run.lanes) / run.wall_s, len(run.forwards)
    most = max(1, run.cores // max(forwards, 1))
    # Forwards with more threads than cores, by their option; where that is unknown, the threads must be seen at work,
    # since an event loop that waits its turn is none of them.
    many = run.cores_busy - lanes >= thresholds.OURS_LEAST * run.cores if run.threads is None else run.threads > most
    workers = run.facts.get("workers", len(run.work))
    if forwards and many and run.runnable - lanes >= thresholds.HIDDEN_THREADS * run.cores:
        advice, change = "Use fewer threads in each forward.", run.change("-B", most, "threads")
    elif workers > run.cores and busy_s(run.work) / run.wall_s > thresholds.CROWDED * run.cores:
        advice, change = "Use no more workers than there are cores.", run.change("--", run.cores, "workers")
    else:
        return None
    why = f"{run.runnable:.1f} threads wanted a core at once and there are {run.cores}, so they took turns"
    if run.cpu_wait_s:
        why += f": ready to run, they waited {run.waited:.0%} of their time"
    gain = Gain.up_to(min(run.runnable / run.cores, 1 / run.efficiency if run.efficiency else run.runnable))
    return Verdict("oversubscribed CPUs", run.largest(), why + ".", advice, change, gain)


def others_have_the_cores(case: RunCase) -> Verdict | None:
    """This run's threads wait for cores that other programs have, where the system does not report other programs."""
    run = case.run
    if run.others is not None or not run.on_cpu:
        return None
    if run.runnable <= thresholds.CROWDED * run.cores or run.cores_busy >= thresholds.OURS_LEAST * run.cores:
        return None
    why = (
        f"{run.runnable:.1f} threads wanted a core at once, and this run had {run.cores_busy:.1f} of {run.cores}: "
        "other programs had the rest."
    )
    return _let_alone(run, why, run.cores / run.cores_busy if run.cores_busy else 1.0)


def beside_others(verdict: Verdict, run: Evidence) -> Verdict:
    """The verdict, with the other programs that it must be read beside. They are the verdict if there is no other, or
    none that a change of this run would mend.
    """
    taken = neighbours(run)
    unknown = verdict.kind == "inconclusive" and verdict.station == "other"  # nothing follows from such numbers
    if taken is None or unknown or verdict.kind in ("arrival-bound", "oversubscribed CPUs"):
        return verdict
    beside = f"Other programs took {taken:.1f} of {run.cores} cores."
    mended = verdict.change is not None or verdict.gain != Gain()
    if verdict.healthy or (verdict.kind in YIELDS and not mended):
        why = f"{beside} Ready to run, threads of this run waited {run.waited:.0%} of their time. Beside that: "
        return _let_alone(run, why + verdict.why, run.cores / max(run.cores - taken, 0.1 * run.cores))
    return replace(verdict, why=f"{beside} {verdict.why}")


def neighbours(run: Evidence) -> float | None:
    """The cores that other programs took while our threads waited for one; None if our threads missed none."""
    taken = run.others or 0.0
    missed = (
        run.waited >= thresholds.WAITED_FOR_CORES and run.cores_busy + taken >= thresholds.CORES_AT_WORK * run.cores
    )
    return taken if taken >= thresholds.TAKEN * run.cores and missed else None


ALONE = "Let it run alone."


def _let_alone(run: Evidence, why: str, high: float) -> Verdict:
    left = int(run.cores_busy if run.others is None else run.cores - run.others)  # whole ones: a thread takes one
    threads = run.threads is None or run.threads > left
    ours = [
        *(["thread"] if run.forwards and threads else []),
        *(["worker"] if run.facts.get("workers", len(run.work)) > left else []),
    ]
    fewer = " and ".join(f"{left} {name}{'' if left == 1 else 's'}" for name in ours)
    cores = "1 core is" if left == 1 else f"{left} cores are"
    advice = f"Let it run alone, or with {fewer}: {cores} left." if ours and left else ALONE
    most = min(high, 1 / run.efficiency if run.efficiency else high)
    return Verdict("oversubscribed CPUs", run.largest(), why, advice, None, Gain.up_to(most))


def small_batches(case: RunCase) -> Verdict | None:
    """Batches are small, and the model would take less of the cores with larger ones."""
    run, curve = case.run, case.curve
    if not run.on_cpu or not run.work or not run.forwards or curve is None or run.rows_mean <= 0:
        return None
    if run.cores_busy < thresholds.OURS_AT_WORK * run.cores_left:
        return None
    if math.isfinite(cap(run)) and run.cut_by("full", "cap") >= thresholds.PLAINLY_CAPPED:
        best = curve.best()
        gain = _gain(case, best)
        if gain >= thresholds.WORTH_A_CHANGE:
            return cap_too_small(case, best, _promised(gain))
        if run.rows_mean <= thresholds.SMALL_BATCH and best <= thresholds.ROOMY * cap(run):  # no larger ones were seen
            most = min(outstanding(run) / len(run.forwards), thresholds.SMALL_BATCH * cap(run))
            return cap_too_small(case, most, Gain())
        return None
    rows = curve.enough()
    gain = _gain(case, rows)
    return more_rows(case, rows, _promised(gain)) if gain >= thresholds.WORTH_A_CHANGE else None


def _gain(case: RunCase, rows: float) -> float:
    """The gain of batches of so many rows, if searches and forwards share the time that forwards save."""
    run = case.run
    forwards = busy_s(run.answering) / (busy_s(run.answering) + busy_s(run.work))
    return 1 / (1 - forwards + forwards / max(case.faster(rows), 1.0)) if rows > run.rows_usual else 1.0


def _promised(gain: float) -> Gain:
    return Gain(1 + (gain - 1) * (1 - thresholds.AMDAHL_DOUBT), gain)
