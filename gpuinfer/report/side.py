"""Several models at one device: at once, or in turns. Which is faster was looked at while they ran (`models.looks`)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuinfer.report.case import Case, Verdict
from gpuinfer.report.crowding import CROWDED
from gpuinfer.report.evidence import Evidence, station_s
from gpuinfer.report.forecast import Gain

WAITED = 0.25  # of the forward lanes' time: so much waiting for turns is worth a sentence


@dataclass(frozen=True, slots=True)
class Beside:
    """How many times as much models got done at once as in turns, all of them by their shares, and the ends of that."""

    times: float
    low: float
    high: float
    pairs: int
    time_share: float  # of the time in which several had work, that in which they ran at once

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Beside | None:
        """None where that has not been looked at. The looks are the same for all, so that their ends add up."""
        looked = [line for line in lines if line.get("at_once")]
        total = math.fsum(line["share"] for line in looked)
        if len(looked) < 2 or not total:
            return None

        def mean(what: str) -> float:
            ends = (line["share"] * math.log(line["at_once"][what]) for line in looked)
            return math.exp(math.fsum(ends) / total)

        first = looked[0]["at_once"]
        return cls(mean("times"), mean("low"), mean("high"), first["pairs"], first["time_share"])


def by_side(case: Case) -> Verdict | None:
    """Models compute at once as if each were alone, as somebody has set it, and get less done than in turns; where that
    has not been looked at, more of their threads want a core than there are.
    """
    run = case.run
    if run.options.get("-B", {}).get("gate") is not False or len(run.models) < 2:
        return None
    found, change = Beside.of(run.models), run.change("-B", "true", "gate")
    if found is not None:
        if found.high >= 1:
            return None
        why = (
            f"At once, each as if it were alone, {_named(run)} got {found.times:.2f} times as much done as in turns "
            f"({found.low:.2f} to {found.high:.2f}, {found.pairs} looks at each)."
        )
        gain = Gain(1 / found.high, 1 / found.low, 1 / found.times)
        return Verdict("oversubscribed CPUs" if run.on_cpu else "GPU-bound", "forward", why, CURE, change, gain)
    if not run.on_cpu or run.runnable <= CROWDED * run.cores:
        return None
    why = (
        f"The forwards of {_named(run)} ran at once: {run.runnable:.1f} threads wanted a core and there are {run.cores}"
    )
    if run.cpu_wait_s:
        why += f"; ready to run, they waited {run.waited:.0%} of their time"
    gain = Gain.up_to(run.runnable / run.cores)
    return Verdict("oversubscribed CPUs", "forward", f"{why}.", CURE, change, gain)


CURE = "Let the models share the device."


def in_turns(verdict: Verdict, run: Evidence) -> Verdict:
    """The verdict, and how models shared the device: what was found when both ways were looked at, and that they took
    turns, where that is what their forwards waited for.
    """
    if len(run.models) < 2:
        return verdict
    told = [*_looked(run), *_waited(run)]
    return replace(verdict, why=" ".join([*told, verdict.why])) if told else verdict


def _looked(run: Evidence) -> list[str]:
    found = Beside.of(run.models)
    if found is None or run.options.get("-B", {}).get("gate") is False:
        return []
    if found.low <= 1 <= found.high:
        known = f"Side by side {_named(run)} got as much done as in turns ({found.low:.2f} to {found.high:.2f})."
        return [known] if found.high / found.low < CLEAR else []
    faster, ends = found.times > 1, sorted((found.low, found.high))
    if not faster:
        ends = sorted(1 / end for end in ends)
    ways = ("side by side", "in turns") if faster else ("in turns", "side by side")
    times = max(found.times, 1 / found.times)
    ran = found.time_share if faster else 1 - found.time_share
    got = f"{ways[0].capitalize()} {_named(run)} got {times:.2f} times as much done as {ways[1]}"
    looks = f"({ends[0]:.2f} to {ends[1]:.2f}, {found.pairs} looks at each)"
    return [f"{got} {looks}, and so they ran for {ran:.0%} of the time in which they had work together."]


CLEAR = 1.2  # from end to end: an interval around 1 that is wider says nothing


def _waited(run: Evidence) -> list[str]:
    forwards = run.forwards
    waited = station_s(forwards, "turn") / (run.wall_s * len(forwards)) if forwards else 0.0
    if waited < WAITED:
        return []
    had = " and ".join(f"{line['name']} {line['device_share']:.0%}" for line in run.models)
    return [f"The models took turns: forwards waited {waited:.0%} of the time for theirs; of the device, {had}."]


def _named(run: Evidence) -> str:
    return " and ".join(line["name"] for line in run.models)
