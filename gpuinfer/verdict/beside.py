"""Causes beside a model of text: rows that come slowly, or are slow to understand, to constrain, to write, to sync."""

from __future__ import annotations

import math

from gpuinfer.evidence import Evidence, station_s
from gpuinfer.verdict.case import Case, Verdict
from gpuinfer.verdict.forecast import Gain

LARGE = 0.3  # of the time: worth a verdict of its own
MOST = 0.5  # of the time in which the model had nothing to do, at least, that a station must have been busy
ALL = 0.9  # of the cores
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
    if spent >= MOST * empty:
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
