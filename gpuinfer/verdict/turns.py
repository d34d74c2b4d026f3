"""Search and model share the same cores: what one of them could save, the other would have.

A lane that is busy then says little, since it counts the time in which another has its core. What counts is whose the
work is: a saving in one part gains as Amdahl (1967) has it, 1 / (1 - f + f / s).
"""

from __future__ import annotations

import math

from gpuinfer.evidence import busy_s
from gpuinfer.verdict.bounds import ROOMY, cap, outstanding
from gpuinfer.verdict.busy import cap_too_small
from gpuinfer.verdict.case import Case, Verdict
from gpuinfer.verdict.forecast import Gain
from gpuinfer.verdict.outstanding import more_rows

AT_WORK = 0.8  # of the cores that are left to us
WORTH = 1.15  # what larger batches must promise
ALWAYS = 0.5  # of the batches cut for a cap: then it is one, whatever else may be known
SMALL = 16  # rows: batches that nearly any model does better than, where it was seen with no others
DOUBT = 0.5  # of what larger batches promise: on shared cores it is Amdahl's bound, and no measurement


def small_batches(case: Case) -> Verdict | None:
    """Batches are small, and the model would take less of the cores with larger ones."""
    run, curve = case.run, case.curve
    if not run.on_cpu or not run.work or not run.forwards or curve is None or run.rows_mean <= 0:
        return None
    if run.cores_busy < AT_WORK * run.cores_left:
        return None
    if math.isfinite(cap(run)) and run.cut_by("full", "cap") >= ALWAYS:
        return _for_a_cap(case, curve.best())
    rows = curve.enough()
    gain = _gain(case, rows)
    return more_rows(case, rows, _promised(gain)) if gain >= WORTH else None


def _for_a_cap(case: Case, best: float) -> Verdict | None:
    run, gain = case.run, _gain(case, best)
    if gain >= WORTH:
        return cap_too_small(case, best, _promised(gain))
    if run.rows_mean <= SMALL and best <= ROOMY * cap(run):  # nobody has seen larger ones
        return cap_too_small(case, min(outstanding(run) / len(run.forwards), SMALL * cap(run)), Gain())
    return None


def _gain(case: Case, rows: float) -> float:
    """Of batches of so many rows, if the time that the forwards save is the searches' and theirs."""
    run = case.run
    forwards = busy_s(run.forwards) / (busy_s(run.forwards) + busy_s(run.work))
    return 1 / (1 - forwards + forwards / max(case.faster(rows), 1.0)) if rows > run.rows_usual else 1.0


def _promised(gain: float) -> Gain:
    return Gain(1 + (gain - 1) * (1 - DOUBT), gain)
