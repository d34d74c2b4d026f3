"""Causes of a backend with slots, whose batches are forward steps (a row takes part in many, and leaves when done), and
causes beside the model: reading, understanding, constraining, writing, syncing rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Final

from gpuinfer.config.options import OptionChange
from gpuinfer.report import thresholds
from gpuinfer.report.causes_cpu_contention import neighbours
from gpuinfer.report.document import VerdictClass
from gpuinfer.report.evidence import Curve, Evidence, station_s
from gpuinfer.report.forecast import Gain, RunCase, Verdict
from gpuinfer.units import whole

SLOW = {
    "read": "rows come slowly",
    "understand": "reading rows and turning prompts into tokens takes long",
    "constrain": "constraints take long to compile",
    "write": "answers are taken slowly",
    "sync": "the disk takes long to say that it has them (fsync)",
}
"""Station → what is slow there."""


def _cure(run: Evidence, station: str) -> str:
    """The cure, by where rows come from and answers go."""
    given = run.options.get("--", {})
    if station == "read":
        if given.get("input") in (None, "-"):
            file = "--input with a local file in the place of a pipe" if "input" in given else "from a local file"
            return f"Give them faster: {file}, or a faster program at its other end."
        return "Give them faster: put the input on a local disk."
    if station == "understand":
        return 'Give prompts as tokens ({"prompt": [1, 2, 3]}), shorter ones, or share the input between several runs.'
    if station == "constrain":
        return "Give many rows the same constraint, which is compiled once, or simpler ones."
    if "output" not in given:
        return "Let whoever reads the answers read faster."
    if station == "sync":
        return "Put --output on a local disk: answers are made safe once a second, and a slow disk is waited for."
    if given["output"] in (None, "-"):
        return "Write to a local file (--output FILE), or let whoever reads the output read faster."
    return "Put --output on a local disk."


def idle(case: RunCase) -> Verdict | None:
    """The model is idle: the station beside it that was busy meanwhile is the cause."""
    run, empty = case.run, forward_share(case.run, "idle")
    if empty < thresholds.LARGE or empty < forward_share(run, "reply"):
        return None
    why, gain = f"The model had nothing to do {empty:.0%} of the time", Gain.up_to(1 / max(1 - empty, 0.01))
    station, spent = max(((name, _beside(run, name)) for name in SLOW), key=lambda found: found[1])
    if spent >= thresholds.BUSY_BESIDE * empty:
        if station == "read" and (rows := run.requests + run.lost) < thresholds.LEAST_ROWS:
            told = f"{why}, but {rows} row{'' if rows == 1 else 's'} are too few to tell how fast they come."
            return Verdict("inconclusive", station, told, "Give it more rows in one run.")
        told = f"{why}: {SLOW[station]} (“{station}” {spent:.0%} of the time)."
        return Verdict("host-bound", station, told, _cure(run, station), None, gain)
    return Verdict("host-bound", "idle", f"{why}: rows are asked and answers taken more slowly.", _all(run), None, gain)


def between(case: RunCase) -> Verdict | None:
    """The model's thread is busy with tokens between steps: constraints, or answers."""
    run = case.run
    replying, constraining = _undisturbed(run, "reply"), _undisturbed(run, "constrain")
    if replying + constraining < thresholds.LARGE:
        return None
    spent, steps = replying + constraining, forward_share(run, "prefill", "forward", "sample")
    gain = Gain.up_to(1 / max(1 - spent, 0.01))
    if constraining >= replying:
        why = (
            f"{constraining:.0%} of the time went into what constraints allow, token by token; {steps:.0%} into steps."
        )
        cheaper = {"constraints": "simpler constraints", "lists": "shorter lists of texts"}
        said = _used_by_prompts(run, cheaper) or cheaper["constraints"]
        advice = f"{said[0].upper()}{said[1:]} cost less; none at all costs nothing."
        return Verdict("host-bound", "constrain", why, advice, None, gain)
    why = f"{replying:.0%} of the time went into what is done with tokens between steps, {steps:.0%} into them."
    return Verdict("host-bound", "reply", why, _less_beside(run, REPLYING), _more_rows_a_step(run), gain)


FEATURES = {
    "constraints": "constraints",
    "lists": "lists of texts",
    "stop": "stop strings",
    "logprobs": "log-probabilities",
    "penalties": "penalties",
}
"""What prompts may ask for beside their tokens, as the generator counts it (`with_…` of its steps) → its name."""
REPLYING, SAMPLING = ("stop", "logprobs", "constraints"), ("penalties", "logprobs")
BLAMED = {"sample": SAMPLING, "reply": REPLYING, "constrain": ("constraints", "lists")}  # by station


def in_use(run: Evidence, feature: str) -> bool:
    """Whether any prompt used this feature."""
    return run.steps.get(f"with_{feature}", 0) > 0


def _less_beside(run: Evidence, features: Sequence[str]) -> str:
    """Advice against the features that prompts used; if none, what makes a step cost less."""
    if used := _used_by_prompts(run, {name: FEATURES[name] for name in features}):
        return f"{used[0].upper()}{used[1:]} cost most here: ask for fewer of them."
    if features is REPLYING and run.steps.get("read_as_they_grow", 0):
        return "Answers that are read while they grow cost most here: read whole ones where that does."
    return "It is the same for few rows and for many: steps of more rows make it matter less."


def _used_by_prompts(run: Evidence, called: Mapping[str, str]) -> str:
    """The features, of these, that prompts used, with the number of prompts; in words, or ""."""
    used = {name: words for name, words in called.items() if in_use(run, name)}
    return " and ".join(f"{words} (in {run.steps[f'with_{name}']:,.0f} prompts)" for name, words in used.items())


def _more_rows_a_step(run: Evidence) -> OptionChange | None:
    """Twice the slots, if no feature is to blame and there are rows for them."""
    blamed = any(in_use(run, name) for name in REPLYING) or run.steps.get("read_as_they_grow", 0)
    if "with_stop" not in run.steps or blamed or run.rows_per_s * run.wall_s < 2 * thresholds.MORE_SLOTS * run.slots:
        return None
    wanted = thresholds.MORE_SLOTS * run.slots
    return run.change("--", wanted, "batch_size") or run.change("-B", wanted, "slots")


def _undisturbed(run: Evidence, station: str) -> float:
    """The share of the forward lanes' time in a station; where other programs have the cores, of the time on a core,
    since a waiting thread may wait in any station.
    """
    share, lanes = forward_share(run, station), run.forwards
    if run.waited < thresholds.WAITED_FOR_CORES or not any(lane.get("ran") for lane in lanes):
        return share
    ran = math.fsum(lane.get("ran", {}).get(station, 0.0) for lane in lanes)
    return min(share, ran / (run.wall_s * len(lanes)))


def forward_share(run: Evidence, *stations: str) -> float:
    """The share of the forward lanes' time in these stations."""
    lanes = run.forwards
    return math.fsum(station_s(lanes, name) for name in stations) / (run.wall_s * len(lanes)) if lanes else 0.0


def _beside(run: Evidence, station: str) -> float:
    """The share of the time in which the lanes beside the forward were in a station, summed."""
    lanes = [lane for lane in run.lanes if lane not in run.forwards]
    return min(1.0, station_s(lanes, station) / run.wall_s)


def _all(run: Evidence) -> str:
    if run.cores_busy >= thresholds.ALL_CORES * run.cores_left:
        return "All cores are at work: only more cores, or less to write for each row, make this faster."
    return "Ask for less of each row, or share the input between several runs."


IDLE: Final = "idle cores"
FIRST_TOUCH: Final = "first touch"
ALONE = ("sample", "reply", "constrain", "compile", FIRST_TOUCH)  # stations in which one thread works


def too_short(case: RunCase) -> Verdict | None:
    """Too few steps or rows to judge by; checked before anything else."""
    run = case.run
    steps = sum(count for count, _ in run.batch_s.values())
    if steps < thresholds.LEAST_STEPS:
        why = f"The model took {steps} step{'' if steps == 1 else 's'}: too few to go by."
        return Verdict("inconclusive", "other", why, "Give it more rows, or longer answers.")
    taken = neighbours(run)
    rows = run.requests + run.lost + run.cancelled
    if taken is None or rows >= thresholds.LEAST_ROWS or run.wall_s >= thresholds.SHORT_S:
        return None
    why = (
        f"{rows} row{'' if rows == 1 else 's'} in {run.wall_s:.2g} s, while other programs took {taken:.1f} of "
        f"{run.cores} cores: too short and too disturbed to judge by."
    )
    return Verdict("inconclusive", "other", why, "Give it more rows in one run, or let it run alone.")


def starting(case: RunCase) -> Verdict | None:
    """Kernels are loaded or compiled when they are first needed: neither sampling nor forwards."""
    share = forward_share(case.run, "compile")
    if share < thresholds.LARGE:
        return None
    why = f"{share:.0%} of the time went into loading and compiling kernels that were needed for the first time."
    advice = "It is paid once: a later run finds them on the disk, and a longer one pays no more."
    return Verdict("cold start", "compile", why, advice, None, Gain.up_to(1 / max(1 - share, 0.01)))


def first_touch(case: RunCase) -> Verdict | None:
    """Memory is touched for the first time, and the system must map and clear it."""
    run, share = case.run, forward_share(case.run, FIRST_TOUCH)
    if share < thresholds.LARGE:
        return None
    why = (
        f"{share:.0%} of the time went into memory that was touched for the first time "
        f"({run.steps.get('faults', 0):,.0f} page faults)."
    )
    advice = "It is paid once: a longer run, or a server that stays, pays no more."
    if run.options.get("--", {}).get("context") or run.model.get("context", 0) > thresholds.SHORT_CONTEXT:
        advice += " A shorter context or fewer rows at once touch less of it."
    return Verdict("first touch", FIRST_TOUCH, why, advice, None, Gain.up_to(1 / max(1 - share, 0.01)))


def sampling(case: RunCase) -> Verdict | None:
    run, share = case.run, forward_share(case.run, "sample")
    if share < thresholds.LARGE:
        return None
    steps = forward_share(run, "forward", "prefill")
    why = f"{share:.0%} of the time went into drawing tokens, {steps:.0%} into the model."
    gain = Gain.up_to(1 / max(1 - share, 0.01))
    if any(in_use(run, name) for name in SAMPLING):
        return Verdict("sampling-bound", "sample", why, _less_beside(run, SAMPLING), None, gain)
    given = run.options.get("--", {})
    if given.get("temperature"):
        filters = (given.get("top_k") or 0) > 0 or (given.get("top_p") or 1) < 1 or (given.get("min_p") or 0) > 0
        dear = "Filters and chance cost" if filters else "Chance costs"
        advice = f"{dear} most here: --temperature 0, the likeliest token, is cheapest."
        return Verdict("sampling-bound", "sample", why, advice, None, gain)
    advice = "Nothing that was asked for makes it dear: it goes through the whole vocabulary for each token."
    return Verdict("sampling-bound", "sample", why, advice, None, gain)


def few_threads(case: RunCase) -> Verdict | None:
    """The decoder has fewer threads than cores, so that cores idle while it computes."""
    run, threads = case.run, case.run.threads
    if threads is None or threads >= run.cores or not _leaves_cores_idle(run):
        return None
    if forward_share(run, "forward", "prefill") < thresholds.LARGE:
        return None
    why = f"{_idle(run)} The decoder has {threads} thread{'' if threads == 1 else 's'} for {run.cores} cores."
    change = run.change("-B", run.cores, "threads")
    return Verdict(IDLE, "forward", why, "Let it compute on all cores.", change, Gain.up_to(run.cores / threads))


def idle_cores(case: RunCase) -> Verdict | None:
    """Cores are idle although the model has work: because of work between its steps, or within them."""
    run = case.run
    if not _leaves_cores_idle(run):
        return None
    gain = Gain.up_to(run.cores / max(run.cores - run.idle_cores, 1.0))
    computing = run.model.get("decoder_threads", run.cores)
    if computing < min(run.threads or run.cores, run.cores):
        why = f"{_idle(run)} The model's shape is shared out between {computing:,.0f} of {run.threads} threads."
        return Verdict(IDLE, "forward", why, "Report it: every shape is to be shared out between all.", None, gain)
    alone = {name: forward_share(run, name) for name in ALONE}
    station = max(alone, key=alone.__getitem__)
    if sum(alone.values()) * (run.cores - 1) >= thresholds.EXPLAINED * run.idle_cores:
        why = f"{_idle(run)} One thread alone worked {sum(alone.values()):.0%} of the time, most of it at “{station}”."
        change = _more_rows_a_step(run)
        return Verdict(IDLE, station, why, _less_beside(run, BLAMED.get(station, ())), change, gain)
    waited = run.steps.get("threads_waited_s", 0.0) / (run.wall_s * run.cores)
    why = _idle(run)
    if waited >= thresholds.EXPLAINED * run.idle_cores / run.cores:
        why += f" Threads waited for one another {waited:.0%} of the time: the parts of a step are small."
    else:
        why += " Nothing here says what its threads waited for."
    if _mostly_prompts(run):
        narrow = (run.options.get("-B", {}).get("step_tokens") or thresholds.WIDER_STEP) < thresholds.WIDER_STEP
        change = run.change("-B", thresholds.WIDER_STEP, "step_tokens") if narrow else None
        return Verdict(IDLE, "prefill", why, "Steps of more tokens have larger parts.", change, gain)
    return Verdict(IDLE, "forward", why, "Steps of more rows have larger parts.", _more_rows_a_step(run), gain)


def _leaves_cores_idle(run: Evidence) -> bool:
    return run.cores > 1 and run.idle_cores > thresholds.IDLE_CORES_TEXT * run.cores


def _idle(run: Evidence) -> str:
    return f"{run.idle_cores:.1f} of {run.cores} cores were idle."


MOST_SLOTS = 64, 1024  # that a device has by itself, the CPU and CUDA: no more rows are at once unless told to


def too_few_pages(case: RunCase) -> Verdict | None:
    """Rows wait for pages of keys and values, or give theirs back and are recomputed."""
    run = case.run
    waited, preempted, again = (run.steps.get(name, 0.0) for name in SHORTAGES)
    tokens = run.steps.get("prompt_tokens", 0.0) + run.steps.get("output_tokens", 0.0)
    rows = _rows(run)
    if max(waited, preempted) <= thresholds.SHORT_OF_PAGES * rows or (
        _used(run) >= thresholds.SLOTS_FULL and again < thresholds.COMPUTED_AGAIN * tokens
    ):
        return None
    used = f"{_used(run) * run.slots:,.1f} of {run.slots:,} slots were in use"
    why = f"Pages of keys and values ran short: {shortage(run.steps)}; {used}."
    gain = Gain.up_to(min(1 / max(_used(run), 0.01), thresholds.MOST_GAIN))
    pages, context = run.model.get("pages", 0), run.model.get("context", 0)
    if not (run.pages_given and pages and context):
        advice = "Memory has no room for more: a shorter context, or fewer rows at once, need fewer."
        return Verdict("too few pages", "idle", why, advice, None, gain)
    # Pages for as many rows of full length as there may be at once; fewer pages allow fewer slots.
    most = min(rows, MOST_SLOTS[not run.on_cpu]) if run.slots >= pages else run.slots
    wanted = most * math.ceil(context / run.model["page_positions"])
    size = wanted * run.model.get("cache_bytes", 0) / pages / 2**20
    advice = (
        f"{wanted:,} pages ({size:,.0f} MiB) are enough for {most:,} rows at once; with the option left out there are "
        "as many as all rows need, or as memory allows."
    )
    return Verdict("too few pages", "idle", why, advice, run.change("-B", wanted, "pages"), gain)


SHORTAGES = {
    "waited_rows": "rows waited for some",
    "preempted_rows": "times a row gave its own back",
    "recomputed_tokens": "tokens were computed again",
}
"""What pages that run short come to, as steps count it and the report's `pages` has it, in words."""


def shortage(counts: Mapping[str, float]) -> str:
    """What the shortage cost, in words; "" if there was none."""
    return ", ".join(f"{whole(count)} {words}" for name, words in SHORTAGES.items() if (count := counts.get(name)))


def small_pieces(case: RunCase) -> Verdict | None:
    """Prompts are processed in small pieces, or wait, since a step takes few tokens."""
    run = case.run
    held, tokens = _held(run), run.options.get("-B", {}).get("step_tokens")
    if held < thresholds.HELD or not tokens or tokens >= thresholds.WIDE_STEP:
        return None
    why = (
        f"Steps have {tokens:,} tokens at most, and {held:.0%} of their time that left no room for all of the prompts'."
    )
    gain = Gain.up_to(min(1 / (1 - held + held * tokens / thresholds.WIDER_STEP), thresholds.MOST_GAIN))
    change = run.change("-B", thresholds.WIDER_STEP, "step_tokens")
    return Verdict("batch cap too small", "prefill", why, "Let more tokens into a step.", change, gain)


def long_prompts(case: RunCase) -> Verdict | None:
    """Steps are full of a few prompts' tokens while other slots wait: nothing is wrong."""
    run = case.run
    if _used(run) >= thresholds.SLOTS_FULL or not _mostly_prompts(run) or _held(run) < thresholds.HELD:
        return None
    each = run.steps.get("prompt_tokens", 0) / max(run.requests, 1)
    if each < thresholds.LONG_PROMPT * (run.options.get("-B", {}).get("step_tokens") or thresholds.WIDER_STEP):
        return None
    why = (
        f"Prompts took {forward_share(run, 'prefill'):.0%} of the time, with {each:,.0f} tokens on average: a few of "
        f"them fill a step, so that {_used(run) * run.slots:,.1f} of {run.slots:,} slots had a part in one."
    )
    if _held(run, "echoing_s") >= thresholds.HELD:
        why += " Log-probabilities of the prompt are wanted, which need the whole vocabulary's for each of its tokens."
        advice = "Shorter prompts cost less, and their log-probabilities in fewer rows; nothing else is amiss."
        return idle_cores(case) or Verdict("device-saturated", "prefill", why, advice, healthy=True)
    return idle_cores(case) or below_the_roofline(case) or _saturated(run, why)


def too_few_rows(case: RunCase) -> Verdict | None:
    """Empty slots: fewer rows than slots, or a few long answers at the end."""
    run, used = case.run, _used(case.run)
    if used >= thresholds.SLOTS_FULL or (
        _held(run) >= thresholds.HELD and not _mostly_prompts(run)
    ):  # those that were there had no room in steps
        return None
    rows = _rows(run)
    slots = f"{used * run.slots:,.1f} of {run.slots:,} slots were in use, on average over the time in steps"
    slots += _of_the_bandwidth(run)
    kind: VerdictClass = "too few rows outstanding"
    station = "idle"
    if rows <= run.slots:
        why = f"All {rows:,} rows were under way at once: {slots}."
        advice = "Nothing needs mending: more rows in one run would share its steps."
        return Verdict(kind, station, why, advice, healthy=True)
    if run.queue_wait_s < thresholds.QUEUED * run.latency_s:
        return Verdict(kind, station, f"Rows hardly waited for a slot: {slots}.", "Ask for more rows at once.")
    if _mostly_prompts(run):  # a step is full of one prompt's tokens while the other slots wait for theirs
        return None
    if run.cancelled:  # the end, in which slots stay empty, did not come
        why = f"The run was stopped with {run.cancelled:,} rows under way or waiting: {slots}."
        return Verdict("inconclusive", station, why, "Let it go on to its end, or for longer.")
    why = f"The last answers went on when no rows were left to begin: {slots}."
    advice = "More rows in one run make the end matter less"
    advice += "; so does a smaller --max-new-tokens." if "max_new_tokens" in run.options.get("--", {}) else "."
    return Verdict(kind, station, why, advice, None, Gain.up_to(1 / used))


def more_slots(case: RunCase) -> Verdict | None:
    """The slots are full, and steps with more rows would pay, judged by smaller steps of this run."""
    run, wanted = case.run, max(thresholds.MORE_SLOTS * case.run.slots, thresholds.ENOUGH_SLOTS)
    if run.rows_per_s * run.wall_s < 2 * wanted or _mostly_prompts(run):  # it would hardly fill them, or gain by them
        return None
    gain = _gain(run, case.curve) if wanted == thresholds.MORE_SLOTS * run.slots else None
    if gain is None and run.slots < thresholds.ENOUGH_SLOTS:
        gain, because = Gain(), "a step reads all weights, however few rows it has"
    elif gain is not None and (gain.expected or 1.0) >= thresholds.WORTH_A_CHANGE:
        because = "a step of more rows takes hardly longer"
    else:
        return None
    why = f"{_in_use(run)}, and {because}{_of_the_bandwidth(run)}."
    change = run.change("--", wanted, "batch_size") or run.change("-B", wanted, "slots")
    advice = "Generate more rows at once; where memory has no room for them, with a shorter context."
    return Verdict("batch cap too small", "forward", why, advice, change, gain)


def _gain(run: Evidence, curve: Curve | None) -> Gain | None:
    """The gain of so many more slots, where steps of half as many rows and of nearly all rows were seen.

    The seconds of a step are extrapolated along the line through those two sizes; prompts gain nothing.
    """
    if curve is None or curve.points[0][0] > run.slots / 2 or curve.points[-1][0] < 0.9 * run.slots:
        return None
    half, full = curve.seconds(run.slots / 2), curve.seconds(run.slots)
    larger = full + (thresholds.MORE_SLOTS - 1) * 2 * (full - half)
    faster = thresholds.MORE_SLOTS * full / larger
    forward = forward_share(run, "forward")
    expected = 1 / (1 - forward + forward / faster)
    return Gain(
        max(1.0, expected * (1 - thresholds.REPLAY_DOUBT)),
        max(expected, min(expected * (1 + thresholds.REPLAY_DOUBT), thresholds.MORE_SLOTS)),
        expected,
    )


def memory_bandwidth(case: RunCase) -> Verdict | None:
    """Steps of answers read weights, keys and values about as fast as memory gives them."""
    run, share = case.run, _bandwidth(case.run)
    if share < thresholds.READS or _mostly_prompts(run):
        return None
    computing = forward_share(run, "forward", "prefill")
    steps = sum(count for count, _ in run.batch_s.values())  # those of answers by their share of the time
    steps_of_answers = steps * forward_share(run, "forward") / computing if computing else 0.0
    each = (run.steps["bytes"] - run.steps.get("prefill_bytes", 0.0)) / max(steps_of_answers, 1)
    why = (
        f"{_in_use(run)}, and its steps read some {each / 2**20:,.0f} MiB each, weights above all, "
        f"{_as_fast_as(share, run.text_roofline['gbytes_per_s'])}."
    )
    if run.dtype == "float32" and (change := run.change("--", "bfloat16", "dtype")):
        gain = Gain.up_to(thresholds.FASTER_DTYPE)
        return Verdict("memory bandwidth", "forward", why, "Weights of bfloat16 are half as many bytes.", change, gain)
    advice = "More rows in a step share what it reads; nothing else is amiss."
    return Verdict("memory bandwidth", "forward", why, advice, healthy=True)


def _bandwidth(run: Evidence) -> float:
    """The share of the memory bandwidth that steps of answers use; 0 if unknown."""
    gives = run.text_roofline.get("gbytes_per_s", 0.0) * 1e9
    seconds = forward_share(run, "forward") * run.wall_s * len(run.forwards)
    read = run.steps.get("bytes", 0.0) - run.steps.get("prefill_bytes", 0.0)
    return read / seconds / gives if gives and seconds else 0.0


def _of_the_bandwidth(run: Evidence) -> str:
    share = _bandwidth(run)
    return f", and a step read memory {_as_fast_as(share)}" if share >= thresholds.NOTABLE_READS else ""


def _as_fast_as(share: float, gives: float | None = None) -> str:
    """The bandwidth in words. No run reads faster than memory: a higher figure means that the
    measurement was too low.
    """
    what = "what it" if gives is None else f"the {gives:,.0f} GB/s that memory"
    return f"at {share:.0%} of {what} gives here" if share <= 1 else f"faster than {what} gave when it was measured"


def below_the_roofline(case: RunCase) -> Verdict | None:
    """The run takes far longer than its steps at least need; names the largest part of the difference."""
    run = case.run
    efficiency = run.text_roofline.get("efficiency", 1.0)
    if efficiency >= thresholds.WELL:
        return None
    lost = _lost(run)
    (station, what), share = max(lost.items(), key=lambda part: part[1])
    others = [f"{name} {part:.0%}" for (_, name), part in sorted(lost.items(), key=lambda part: -part[1])[1:3]]
    why = (
        f"The run did {efficiency:.0%} of what this machine can do with this model at "
        f"{run.text_roofline['at_rows']:,} rows. {what[0].upper()}{what[1:]} took {share:.0%} of the time"
    )
    why += "".join(f", {other}" for other in others if not other.endswith(" 0%")) + "."
    if station in BLAMED:
        advice = _less_beside(run, BLAMED[station])
    elif station in ("compile", FIRST_TOUCH):
        advice = "It is paid once: a longer run, or a server that stays, pays no more."
    elif station == "idle":
        advice = _all(run)
    else:
        advice = {
            ATTENTION: "Shorter prompts and answers have less of it; so do prompts with a beginning in common.",
            OTHERS: "Let it run alone.",
            UNUSED_CORES: "Steps of more rows have larger parts, which more threads share out.",
            SLOW_PRODUCTS: "Nothing that is set here mends it: report it with the model's config.json.",
        }.get(what, "Steps of more rows share it; where there are no more rows, nothing that is set here mends it.")
    return Verdict("below the roofline", station, why, advice, None, Gain.up_to(1 / max(efficiency, 0.01)))


ATTENTION, SLOW_PRODUCTS = "attention", "products that a library computes faster"
BETWEEN = "what lies between products within a step"
OTHERS, UNUSED_CORES = "other programs", "cores that were idle in steps"


def _lost(run: Evidence) -> dict[tuple[str, str], float]:
    """(station, description) → share of the time, of what the least time does not contain."""
    named = {
        "idle": "waiting for rows",
        "sample": "sampling",
        "constrain": "constraints",
        "reply": "Python between steps",
    }
    lost = {(name, called): forward_share(run, name) for name, called in named.items()}
    lost["compile", "loading and compiling kernels"] = forward_share(run, "compile")
    lost[FIRST_TOUCH, "first touch of memory"] = forward_share(run, FIRST_TOUCH)
    computing, best = forward_share(run, "forward", "prefill"), run.text_roofline
    least = best["least_s"] / run.wall_s
    answers = run.steps.get("flops", 0.0) - run.steps.get("prefill_flops", 0.0)
    slower = answers * (1 / best["own_gflops_per_s"] - 1 / best["gflops_per_s"]) / 1e9 / run.wall_s
    left = max(0.0, computing - least)
    share_idle = run.idle_cores / run.cores
    lost["forward", OTHERS] = min(left, computing * (run.others or 0.0) / run.cores)
    lost["forward", UNUSED_CORES] = min(left, computing * share_idle)
    lost["forward", SLOW_PRODUCTS] = min(left, max(0.0, slower))
    of_attention = run.steps.get("attention_flops", 0.0) >= thresholds.LONG_CONTEXT * run.steps.get("flops", 0.0)
    known = math.fsum(lost["forward", name] for name in (OTHERS, UNUSED_CORES, SLOW_PRODUCTS))
    lost["forward", ATTENTION if of_attention else BETWEEN] = max(0.0, left - known)
    return lost


def model(case: RunCase) -> Verdict | None:
    run = case.run
    prompts, answers = forward_share(run, "prefill"), forward_share(run, "forward")
    why = (
        f"{_in_use(run)}, and the model computed {prompts + answers:.0%} of the time: {prompts:.0%} on prompts, "
        f"{answers:.0%} on answers."
    )
    if (efficiency := run.text_roofline.get("efficiency")) is not None:
        why += f" The run did {efficiency:.0%} of what this machine can do with this model."
    return _saturated(run, why)


def _saturated(run: Evidence, why: str) -> Verdict:
    station = "prefill" if _mostly_prompts(run) else "forward"
    if run.dtype == "float32" and run.bfloat16_pays:
        change, gain = run.change("--", "bfloat16", "dtype"), Gain(1.0, thresholds.FASTER_DTYPE)
        return Verdict("device-saturated", station, why, "Compute in bfloat16.", change, gain, healthy=True)
    advice = "Only a smaller model or a faster device makes this faster."
    return Verdict("device-saturated", station, why, advice, healthy=True)


def _held(run: Evidence, what: str = "held_s") -> float:
    """The share of the steps' time in which prompts had no room."""
    seconds = run.steps.get("seconds", 0.0)
    return run.steps.get(what, 0.0) / seconds if seconds else 0.0


def _mostly_prompts(run: Evidence) -> bool:
    return forward_share(run, "prefill") > forward_share(run, "forward")


def _in_use(run: Evidence) -> str:
    if _used(run) < thresholds.SLOTS_FULL and _held(run) >= thresholds.HELD:
        return f"Steps were full with the tokens of {_used(run) * run.slots:,.1f} of {run.slots:,} slots"
    return "The only slot was in use" if run.slots == 1 else f"{_used(run):.0%} of the {run.slots:,} slots were in use"


def _rows(run: Evidence) -> int:
    """Rows answered; in a run that was stopped, also rows under way or waiting."""
    return round(run.rows_per_s * run.wall_s) + run.lost + run.cancelled


def _used(run: Evidence) -> float:
    """The share of slots in use, weighted by the steps' time."""
    spent = math.fsum(seconds for _, seconds in run.batch_s.values())
    if not spent:
        return 0.0
    return math.fsum(rows * seconds for rows, (_, seconds) in run.batch_s.items()) / (spent * run.slots)
