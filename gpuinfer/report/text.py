"""Causes of a backend with slots, whose batches are forward steps: a row takes part in many, and leaves when done.

Causes beside a model of text: rows that come slowly, or are slow to understand, to constrain, to write, to sync.
"""

from __future__ import annotations

import math

from gpuinfer.report.case import Case, Verdict
from gpuinfer.report.evidence import Evidence, station_s
from gpuinfer.report.forecast import DOUBT, Gain
from gpuinfer.report.laws import Curve

LARGE = 0.3  # of the time: worth a verdict of its own
BUSY_SHARE = 0.5  # of the time in which the model had nothing to do, at least, that a station must have been busy
ALL = 0.9  # of the cores
LEAST_ROWS = 16  # fewer do not tell how fast rows come
CURES = {
    "read": (
        "rows come slowly",
        "Give them faster: --input with a local file in the place of a pipe, or a faster program at its other end.",
    ),
    "understand": (
        "reading rows and turning prompts into tokens takes long",
        'Give prompts as tokens ({"prompt": [1, 2, 3]}), shorter ones, or share the input between several runs.',
    ),
    "constrain": (
        "schemas, patterns and grammars take long to compile",
        "Give many rows the same constraint, which is compiled once, or simpler ones.",
    ),
    "write": (
        "answers are taken slowly",
        "Write to a local file (--output FILE), or let whoever reads the output read faster.",
    ),
    "sync": (
        "the disk takes long to say that it has them (fsync)",
        "Put --output on a local disk: answers are made safe once a second, and a slow disk is waited for.",
    ),
}
"""Station → what is slow there, and what mends it."""


def idle(case: Case) -> Verdict | None:
    """The model has nothing to do: the station beside it that was busy meanwhile is why."""
    run, empty = case.run, forward_share(case.run, "idle")
    if empty < LARGE or empty < forward_share(run, "reply"):
        return None
    why, gain = f"The model had nothing to do {empty:.0%} of the time", Gain.up_to(1 / max(1 - empty, 0.01))
    station, spent = max(((name, _beside(run, name)) for name in CURES), key=lambda found: found[1])
    if spent >= BUSY_SHARE * empty:
        if station == "read" and (rows := run.requests + run.lost) < LEAST_ROWS:
            told = f"{why}, but {rows} row{'' if rows == 1 else 's'} are too few to tell how fast they come."
            return Verdict("inconclusive", station, told, "Give it more rows in one run.")
        slow, cure = CURES[station]
        told = f"{why}: {slow} (“{station}” {spent:.0%} of the time)."
        return Verdict("host-bound", station, told, cure, None, gain)
    return Verdict("host-bound", "idle", f"{why}: rows are asked and answers taken more slowly.", _all(run), None, gain)


def between(case: Case) -> Verdict | None:
    """The model's thread is busy with tokens between steps: with constraints, or with answers."""
    run = case.run
    replying, constraining = forward_share(run, "reply"), forward_share(run, "constrain")
    if replying + constraining < LARGE:
        return None
    spent, steps = replying + constraining, forward_share(run, "prefill", "forward", "sample")
    gain = Gain.up_to(1 / max(1 - spent, 0.01))
    if constraining >= replying:
        why = (
            f"{constraining:.0%} of the time went into what constraints allow, token by token; {steps:.0%} into steps."
        )
        advice = "Simpler schemas, patterns and grammars cost less; none at all costs nothing."
        return Verdict("host-bound", "constrain", why, advice, None, gain)
    why = f"{replying:.0%} of the time went into what is done with tokens between steps, {steps:.0%} into them."
    advice = "Stop strings and log-probabilities cost most here: ask for fewer of them."
    return Verdict("host-bound", "reply", why, advice, None, gain)


def forward_share(run: Evidence, *stations: str) -> float:
    """Of the forward lanes' time."""
    lanes = run.forwards
    return math.fsum(station_s(lanes, name) for name in stations) / (run.wall_s * len(lanes)) if lanes else 0.0


def _beside(run: Evidence, station: str) -> float:
    """How much of the time the lanes beside the forward were in a station, all together."""
    lanes = [lane for lane in run.lanes if lane not in run.forwards]
    return min(1.0, station_s(lanes, station) / run.wall_s)


def _all(run: Evidence) -> str:
    if run.cores_busy >= ALL * run.cores_left:
        return "All cores are at work: only more cores, or less to write for each row, make this faster."
    return "Ask for less of each row, or share the input between several runs."


LEAST_STEPS = 16  # fewer say nothing
FULL = 0.75  # of the slots, on average over the time in steps
QUEUED = 0.1  # of a row's time: waited so long for a slot, so there was no lack of rows but at the end
MORE = 2  # times the slots: what is advised
WORTH = 1.15  # what that must promise
ENOUGH = 16  # slots: with fewer rows a step is mostly reading weights, on any device
WIDE = 256  # tokens: with fewer a step is mostly reading weights, on any device
WIDER = 512  # tokens of a step, where they are too few
MOST_GAIN = 8.0  # times as fast: what steps of more tokens are ever said to bring
LONG = 0.1  # of a step's tokens: longer prompts fill one before there are many of them
HELD = 0.3  # of the time in steps: so long prompts had no room in them
FASTER_DTYPE = 2.0  # the most that bfloat16 is known to bring


def too_short(case: Case) -> Verdict | None:
    steps = sum(count for count, _ in case.run.batch_s.values())
    if steps >= LEAST_STEPS:
        return None
    why = f"The model took {steps} step{'' if steps == 1 else 's'}: too few to go by."
    return Verdict("inconclusive", "idle", why, "Give it more rows, or longer answers.")


def sampling(case: Case) -> Verdict | None:
    run, share = case.run, forward_share(case.run, "sample")
    if share < LARGE:
        return None
    steps = forward_share(run, "forward", "prefill")
    why = f"{share:.0%} of the time went into drawing tokens, {steps:.0%} into the model."
    advice = "Penalties and log-probabilities cost most here; --temperature 0 without them is cheapest."
    return Verdict("sampling-bound", "sample", why, advice, None, Gain.up_to(1 / max(1 - share, 0.01)))


def small_pieces(case: Case) -> Verdict | None:
    """Prompts go through the model in small pieces, or wait, since few tokens may go into a step."""
    run = case.run
    held, tokens = _held(run), run.options.get("-B", {}).get("step_tokens")
    if held < HELD or not tokens or tokens >= WIDE:
        return None
    why = (
        f"Steps have {tokens:,} tokens at most, and {held:.0%} of their time that left no room for all of the prompts'."
    )
    gain = Gain.up_to(min(1 / (1 - held + held * tokens / WIDER), MOST_GAIN))
    change = run.change("-B", WIDER, "step_tokens")
    return Verdict("batch cap too small", "prefill", why, "Let more tokens into a step.", change, gain)


def long_prompts(case: Case) -> Verdict | None:
    """Steps are full of a few prompts' tokens: the other slots wait for their turn, and nothing is amiss."""
    run = case.run
    if _used(run) >= FULL or not _mostly_prompts(run) or _held(run) < HELD:
        return None
    each = run.steps.get("prompt_tokens", 0) / max(run.requests, 1)
    if each < LONG * (run.options.get("-B", {}).get("step_tokens") or WIDER):
        return None
    why = (
        f"Prompts took {forward_share(run, 'prefill'):.0%} of the time, with {each:,.0f} tokens on average: a few of "
        f"them fill a step, so that {_used(run) * run.slots:,.1f} of {run.slots:,} slots had a part in one."
    )
    if _held(run, "echoing_s") >= HELD:
        why += " Log-probabilities of the prompt are wanted, which need the whole vocabulary's for each of its tokens."
        advice = "Shorter prompts cost less, and --prompt-logprobs of fewer rows; nothing else is amiss."
        return Verdict("device-saturated", "prefill", why, advice, healthy=True)
    return _saturated(run, why)


def too_few_rows(case: Case) -> Verdict | None:
    """Empty slots: fewer rows than slots, or a few long answers when all the others are done."""
    run, used = case.run, _used(case.run)
    if used >= FULL or (_held(run) >= HELD and not _mostly_prompts(run)):  # those that were there had no room in steps
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
    forward = forward_share(run, "forward")
    expected = 1 / (1 - forward + forward / faster)
    return Gain(max(1.0, expected * (1 - DOUBT)), max(expected, min(expected * (1 + DOUBT), MORE)), expected)


def model(case: Case) -> Verdict | None:
    run = case.run
    prompts, answers = forward_share(run, "prefill"), forward_share(run, "forward")
    why = (
        f"{_in_use(run)}, and the model computed {prompts + answers:.0%} of the time: {prompts:.0%} on prompts, "
        f"{answers:.0%} on answers."
    )
    return _saturated(run, why)


def _saturated(run: Evidence, why: str) -> Verdict:
    station = "prefill" if _mostly_prompts(run) else "forward"
    if run.dtype == "float32" and run.bfloat16_pays:
        change, gain = run.change("--", "bfloat16", "dtype"), Gain(1.0, FASTER_DTYPE)
        return Verdict("device-saturated", station, why, "Compute in bfloat16.", change, gain, healthy=True)
    advice = "Only a smaller model or a faster device makes this faster."
    return Verdict("device-saturated", station, why, advice, healthy=True)


def _held(run: Evidence, what: str = "held_s") -> float:
    """The share of the time in steps in which prompts had no room."""
    seconds = run.steps.get("seconds", 0.0)
    return run.steps.get(what, 0.0) / seconds if seconds else 0.0


def _mostly_prompts(run: Evidence) -> bool:
    return forward_share(run, "prefill") > forward_share(run, "forward")


def _in_use(run: Evidence) -> str:
    if _used(run) < FULL and _held(run) >= HELD:
        return f"Steps were full with the tokens of {_used(run) * run.slots:,.1f} of {run.slots:,} slots"
    return "The only slot was in use" if run.slots == 1 else f"{_used(run):.0%} of the {run.slots:,} slots were in use"


def _used(run: Evidence) -> float:
    """The share of the slots that had rows, over the time in steps."""
    spent = math.fsum(seconds for _, seconds in run.batch_s.values())
    if not spent:
        return 0.0
    return math.fsum(rows * seconds for rows, (_, seconds) in run.batch_s.items()) / (spent * run.slots)
