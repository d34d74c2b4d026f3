"""Why a step of the trainer took longer than its training: what kept it, with the arithmetic.

The argument. A step lasts wait + training + loading of the new weights, so only the first and the last are to be
saved. Rollouts come one batch a step. Were a part x of the time that they take away, they would come in (1 - x) of the
step, and the trainer would wait x of the step less: a part of the rollouts' time explains as much of the wait as it is
itself, and no more than there is. What no such part explains is a matter of how many groups are played at once: as many
as the engine has room for (then it is what it can do), as few as the run asks for, or as few as the buffer allows: a
buffer of depth d starves when a step's rollouts take longer than d times the trainer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from msgspec import Struct

from gpuinfer.rollouts.steps import StepRecord
from gpuinfer.units import short

Kind = Literal[
    "healthy",
    "starvation",
    "reference pass",
    "adapter load",
    "cold start",
    "constraint",
    "engine saturated",
    "too little concurrency",
    "environment slow",
]
LEAST = 0.1  # of a step, lost: less is no stall
ORDINARY = 0.15  # of the rollouts' time: a part that is less is not what keeps them
FULL = 0.85  # of the slots: with so many rows asked for, the engine has what it can take
DEEPEST = 16  # batches: older rollouts than that teach little
GATED = 0.15  # of the step: groups were kept back for so long
OF_THE_FIRST = ("cold start", "adapter load")  # kinds that the first step of a run can have
OF_CROWDS = ("starvation", "too little concurrency")  # those that the last of a run cannot
MOST = 1e9  # seconds: more is no time that a step takes


class Stall(Struct, frozen=True, kw_only=True):
    """What kept one step, if anything did. `shares` are parts of the step, by kind: what each of them cost."""

    kind: Kind
    share: float  # of the step: what this kind cost; of a healthy one 0
    why: str  # the arithmetic, with numbers
    advice: str
    shares: Mapping[Kind, float]

    def plain(self) -> dict[str, Any]:
        """As it stands in the step's line."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def stall_of(step: StepRecord, depth: float) -> Stall:
    """`depth`: batches that may be played ahead of the trainer, by the buffer or by the bound on staleness.

    It never raises, whatever the numbers; shares are between 0 and 1 and sum to 1 at most. The first step of a run
    waits for the first rollouts whatever is done: only what was started for it can be its stall. At the end of a run
    the last groups are alone: how few are played at once is no stall then.
    """
    case = _Case(step, depth)
    shares = {kind: share for kind, share in case.shares().items() if case.may_be(kind)}
    kind = max(shares, key=lambda name: shares[name], default=None)
    if kind is None or math.fsum(shares.values()) < LEAST:
        return Stall(kind="healthy", share=0.0, why=case.healthy(), advice="", shares=shares)
    why, advice = SAID[kind](case)
    return Stall(kind=kind, share=shares[kind], why=why, advice=advice, shares=shares)


class _Case:
    """A step's numbers, each of them one that it can be."""

    def __init__(self, step: StepRecord, depth: float) -> None:
        self.step, self.depth = step, max(0.0, _sound(depth))
        self.wall_s = max(_sound(step.wall_s), 1e-9)
        self.load_s = min(_sound(step.adapter_load_s), self.wall_s)
        self.wait_s = min(_sound(step.wait_s), self.wall_s - self.load_s)
        self.cold_s = min(_sound(step.cold_start_s), self.wait_s)
        self.train_s, self.rollout_s = _sound(step.train_s), _sound(step.step_rollout_s)
        self.offered = _sound(step.offered) if step.slots > 0 else 0.0
        self.first = _sound(step.at_s) <= self.wall_s * 1.01
        self.last = _sound(step.tail_s) > 0

    def may_be(self, kind: Kind) -> bool:
        """Whether this kind can be what kept the step."""
        return kind in OF_THE_FIRST if self.first else not (self.last and kind in OF_CROWDS)

    def parts(self) -> dict[Kind, float]:
        """Parts of the rollouts' time: a group's in its reference pass, a game's in its environment, the engine's in
        constraints. They sum to 1 at most.
        """
        step = self.step
        reference = _part(step.reference_share)
        environment = _part(step.environment_s / self.wall_s if step.environment_s else 0.0) * (1 - reference)
        constraint = _part(step.constraint_s / self.wall_s if step.constraint_s else 0.0) * (1 - reference)
        total = max(1.0, reference + environment + constraint)
        return {
            "reference pass": reference / total,
            "environment slow": environment / total,
            "constraint": constraint / total,
        }

    def shares(self) -> dict[Kind, float]:
        """What each kind cost of the step; those that cost nothing are left out."""
        left = (self.wait_s - self.cold_s) / self.wall_s
        parts = {kind: part for kind, part in self.parts().items() if part >= ORDINARY}
        scale = min(1.0, left / total) if (total := math.fsum(parts.values())) else 0.0
        found: dict[Kind, float] = {kind: part * scale for kind, part in parts.items()}
        found["adapter load"], found["cold start"] = self.load_s / self.wall_s, self.cold_s / self.wall_s
        found[self.crowd()] = max(0.0, left - math.fsum(parts.values()) * scale)
        most = max(1.0, math.fsum(found.values()))  # of rounding
        return {kind: share / most for kind, share in found.items() if share > 0}

    def crowd(self) -> Kind:
        """What of the wait has no part of the rollouts' time to blame."""
        if self.offered >= FULL:
            return "engine saturated"
        if not self.step.slots or _sound(self.step.gated_s) >= GATED * self.wall_s:
            return "starvation"
        return "too little concurrency"

    def healthy(self) -> str:
        if self.first and self.wait_s >= LEAST * self.wall_s:
            return f"The first step waits for the first rollouts: {self.waited()}."
        if self.last and self.wait_s >= LEAST * self.wall_s:
            return f"No more groups were left to be begun: {self.waited()}."
        return f"The trainer was at work {self.train_s / self.wall_s:.0%} of the step: {self.waited()}."

    def waited(self) -> str:
        return f"the trainer waited {short(self.wait_s)} of {short(self.wall_s)}"


def _starvation(case: _Case) -> tuple[str, str]:
    rollout_s, train_s, depth = case.rollout_s, case.train_s, case.depth
    allowed = f"{depth:g} × {short(train_s)} = {short(depth * train_s)}"
    if rollout_s > depth * train_s:
        why = (
            f"A step's rollouts took {short(rollout_s)} and its training {short(train_s)}; a buffer of depth {depth:g} "
            f"starves when rollouts take longer than {allowed}: {case.waited()}."
        )
    else:
        why = f"Groups were kept back for {short(_sound(case.step.gated_s))} of {short(case.wall_s)}: {case.waited()}."
    if rollout_s > DEEPEST * train_s:
        return why, "No buffer hides that: give the trainer larger batches (--batch-groups), or games that are shorter."
    wanted = max(math.ceil(rollout_s / max(train_s, 1e-9)), math.floor(min(depth, DEEPEST)) + 1)
    groups = wanted * max(1, case.step.groups)
    return why, f"Let {wanted} batches be played ahead: --buffer-depth {groups}, and no smaller --max-staleness."


def _reference(case: _Case) -> tuple[str, str]:
    part = case.parts()["reference pass"]
    why = (
        f"A group spent {part:.0%} of its time in its reference pass, which was under way for "
        f"{short(_sound(case.step.reference_s))} of {short(case.wall_s)}: {case.waited()}."
    )
    return why, "Let it go beside play, --reference deferred, or take a smaller --ref-model."


def _load(case: _Case) -> tuple[str, str]:
    why = (
        f"New weights took {short(case.load_s)} of {short(case.wall_s)} until they were in force, "
        f"{case.load_s / case.wall_s:.0%} of the step; training took {short(case.train_s)}."
    )
    return why, "Train on more groups at a time (--batch-groups), and hand over an adapter on a local disk."


def _cold(case: _Case) -> tuple[str, str]:
    why = (
        f"An engine that was just started gave its first token after {short(case.cold_s)}, "
        f"{case.cold_s / case.wall_s:.0%} of the step: {case.waited()}."
    )
    return why, "It is paid once, by longer runs the less; where engines are replaced again and again, see why."


def _constraint(case: _Case) -> tuple[str, str]:
    why = (
        f"{short(_sound(case.step.constraint_s))} of {short(case.wall_s)} went into constraints, compiling them and "
        f"cutting the choice down: {case.waited()}."
    )
    return why, "Lists of what is legal cost least, patterns and grammars more; --no-constrain shows what they cost."


def _saturated(case: _Case) -> tuple[str, str]:
    step = case.step
    why = (
        f"Rows were asked for {case.offered:.1f} times as many as the {step.slots:,} slots, and the engine was in its "
        f"steps for {short(_sound(step.inference_s))} of {short(case.wall_s)}: {case.waited()}."
    )
    return why, "Another engine (--backend fleet -B replicas=2), more slots (--batch-size), or fewer tokens a game."


def _concurrency(case: _Case) -> tuple[str, str]:
    step, offered = case.step, case.offered
    why = f"Only {offered * step.slots:,.1f} rows were asked for at once, of {step.slots:,} slots: {case.waited()}."
    if offered <= 0.0 or step.running <= 0:
        return why, "Play more groups at once: --groups-in-flight."
    wanted = min(math.ceil(step.running / offered), step.running + step.slots)
    return why, f"Play more groups at once: --groups-in-flight {max(wanted, step.running + 1)}."


def _environment(case: _Case) -> tuple[str, str]:
    part = case.parts()["environment slow"]
    why = f"Games were in their environment, and asked for nothing, {part:.0%} of their time: {case.waited()}."
    return why, "Make its calls quicker, or play more groups at once, --groups-in-flight, so that others ask meanwhile."


SAID: Mapping[str, Any] = {
    "starvation": _starvation,
    "reference pass": _reference,
    "adapter load": _load,
    "cold start": _cold,
    "constraint": _constraint,
    "engine saturated": _saturated,
    "too little concurrency": _concurrency,
    "environment slow": _environment,
}


def _sound(value: float) -> float:
    """A number of seconds, or of anything else that cannot be negative; 0 for what is no number."""
    return min(max(0.0, value), MOST) if value == value else 0.0


def _part(value: float) -> float:
    return min(_sound(value), 1.0)
