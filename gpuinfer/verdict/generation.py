"""Causes of a backend with slots, whose batches are forward steps: a row takes part in many, and leaves when done."""

from __future__ import annotations

import math

from gpuinfer.evidence import Evidence, station_s
from gpuinfer.verdict.case import Case, Verdict
from gpuinfer.verdict.curve import Curve
from gpuinfer.verdict.forecast import DOUBT, Gain

LEAST_STEPS = 16  # fewer say nothing
LARGE = 0.3  # of the time: worth a verdict of its own
ALL = 0.9  # of the cores
FULL = 0.75  # of the slots, on average over the time in steps
QUEUED = 0.1  # of a row's time: waited so long for a slot, so there was no lack of rows but at the end
MORE = 2  # times the slots: what is advised
WORTH = 1.15  # what that must promise
ENOUGH = 16  # slots: with fewer rows a step is mostly reading weights, on any device
FASTER_DTYPE = 2.0  # the most that bfloat16 is known to bring


def too_short(case: Case) -> Verdict | None:
    steps = sum(count for count, _ in case.run.batch_s.values())
    if steps >= LEAST_STEPS:
        return None
    why = f"The model took {steps} step{'' if steps == 1 else 's'}: too few to go by."
    return Verdict("inconclusive", "idle", why, "Give it more rows, or longer answers.")


def host(case: Case) -> Verdict | None:
    """The model waits for what is around it: rows do not come, or its thread is busy with answers."""
    run = case.run
    idle, reply = _share(run, "idle"), _share(run, "reply")
    if idle + reply < LARGE:
        return None
    gain = Gain.up_to(1 / max(1 - idle - reply, 0.01))
    if reply >= idle:
        steps = 1 - idle - reply
        why = f"{reply:.0%} of the time went into what is done with tokens between steps, {steps:.0%} into them."
        advice = "Stop strings, constraints and log-probabilities cost most here: ask for fewer of them."
        return Verdict("host-bound", "reply", why, advice, None, gain)
    why = f"The model had nothing to do {idle:.0%} of the time: rows are read and answers written more slowly."
    return Verdict("host-bound", "idle", why, _for_the_host(run), None, gain)


def _for_the_host(run: Evidence) -> str:
    if run.cores_busy >= ALL * run.cores:
        return "All cores are at work: only more cores, or less to write for each row, make this faster."
    return "Ask for less of each row, or share the input between several runs."


def sampling(case: Case) -> Verdict | None:
    run, share = case.run, _share(case.run, "sample")
    if share < LARGE:
        return None
    why = f"{share:.0%} of the time went into drawing tokens, {_share(run, 'forward', 'prefill'):.0%} into the model."
    advice = "Penalties, log-probabilities and constraints cost most here; --temperature 0 without them is cheapest."
    return Verdict("sampling-bound", "sample", why, advice, None, Gain.up_to(1 / max(1 - share, 0.01)))


def too_few_rows(case: Case) -> Verdict | None:
    """Empty slots: fewer rows than slots, or a few long answers when all the others are done."""
    run, used = case.run, _used(case.run)
    if used >= FULL:
        return None
    rows = round(run.rows_per_s * run.wall_s) + run.lost
    slots = f"{used * run.slots:,.1f} of {run.slots:,} slots were in use, on average over the time in steps"
    kind, station = "too few rows outstanding", "idle"
    if rows <= run.slots:
        why = f"All {rows:,} rows were under way at once: {slots}."
        advice = "Nothing needs mending: more rows in one run would share its steps."
        return Verdict(kind, station, why, advice, healthy=True)
    if run.queue_wait_s < QUEUED * run.latency_s:
        return Verdict(kind, station, f"Rows hardly waited for a slot: {slots}.", "Ask for more rows at once.")
    if _mostly_prompts(run):  # a step is full of one prompt's tokens while the other slots wait for theirs
        return None
    why = f"The last answers went on when no rows were left to begin: {slots}."
    advice = "More rows in one run make the end matter less; so does a smaller --max-new-tokens."
    return Verdict(kind, station, why, advice, None, Gain.up_to(1 / used))


def more_slots(case: Case) -> Verdict | None:
    """The slots are full and steps with more rows would be worth it, by what smaller ones took in this very run."""
    run, wanted = case.run, max(MORE * case.run.slots, ENOUGH)
    if run.rows_per_s * run.wall_s < 2 * wanted or _mostly_prompts(run):  # it would hardly fill them, or gain by them
        return None
    gain = _gain(run, case.curve) if wanted == MORE * run.slots else None
    if gain is None and run.slots < ENOUGH:
        gain, because = Gain(), "a step reads all weights, however few rows it has"
    elif gain is not None and (gain.expected or 1.0) >= WORTH:
        because = "a step of more rows takes hardly longer"
    else:
        return None
    why = f"{_in_use(run)}, and {because}."
    change = run.change("--", wanted, "batch_size") or run.change("-B", wanted, "slots")
    advice = "Generate more rows at once; where memory has no room for them, with a shorter context."
    return Verdict("batch cap too small", "forward", why, advice, change, gain)


def _gain(run: Evidence, curve: Curve | None) -> Gain | None:
    """Of so many more slots, where steps of half as many rows as now and of nearly all of them were seen.

    The seconds of a step are taken to go on along the line through those two sizes; prompts gain nothing.
    """
    if curve is None or curve.points[0][0] > run.slots / 2 or curve.points[-1][0] < 0.9 * run.slots:
        return None
    half, full = curve.seconds(run.slots / 2), curve.seconds(run.slots)
    larger = full + (MORE - 1) * 2 * (full - half)
    faster = MORE * full / larger
    forward = _share(run, "forward")
    expected = 1 / (1 - forward + forward / faster)
    return Gain(max(1.0, expected * (1 - DOUBT)), max(expected, min(expected * (1 + DOUBT), MORE)), expected)


def model(case: Case) -> Verdict | None:
    run = case.run
    prompts, answers = _share(run, "prefill"), _share(run, "forward")
    why = (
        f"{_in_use(run)}, and the model computed {prompts + answers:.0%} of the time: {prompts:.0%} on prompts, "
        f"{answers:.0%} on answers."
    )
    station = "prefill" if _mostly_prompts(run) else "forward"
    if run.dtype == "float32" and run.bfloat16_pays:
        change, gain = run.change("--", "bfloat16", "dtype"), Gain(1.0, FASTER_DTYPE)
        return Verdict("device-saturated", station, why, "Compute in bfloat16.", change, gain, healthy=True)
    advice = "Only a smaller model or a faster device makes this faster."
    return Verdict("device-saturated", station, why, advice, healthy=True)


def _mostly_prompts(run: Evidence) -> bool:
    return _share(run, "prefill") > _share(run, "forward")


def _share(run: Evidence, *stations: str) -> float:
    """Of the forward lanes' time."""
    lanes = run.forwards
    return math.fsum(station_s(lanes, name) for name in stations) / (run.wall_s * len(lanes)) if lanes else 0.0


def _in_use(run: Evidence) -> str:
    return "The only slot was in use" if run.slots == 1 else f"{_used(run):.0%} of the {run.slots:,} slots were in use"


def _used(run: Evidence) -> float:
    """The share of the slots that had rows, over the time in steps."""
    spent = math.fsum(seconds for _, seconds in run.batch_s.values())
    if not spent:
        return 0.0
    return math.fsum(rows * seconds for rows, (_, seconds) in run.batch_s.items()) / (spent * run.slots)
