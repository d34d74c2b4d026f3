"""The record of one training step, a line of `--steps FILE`, and why the step took longer than its training."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

import msgspec
from msgspec import Struct

from gpuinfer.errors import UsageError, WorkError
from gpuinfer.host.journal import AppendFile, cut_torn, whole_lines
from gpuinfer.units import short


class Handed(Struct, frozen=True, kw_only=True):
    """Weights that a trainer has handed over, as they were passed to the backend."""

    version: int
    weights: str
    adapter: str | None = None


class StepRecord(Struct, frozen=True, kw_only=True):
    """Times in seconds. A step lasts from the end of the one before it (of the first: from the run's start) until its
    weights are in force. What the engine did in that time is counted to it, for whichever batch it was.
    """

    step: int  # from 0
    version: int  # of the trainer's weights when it took the batch
    version_after: int = 0  # of those that came of it
    weights: Handed | None = None  # in force at its end; None: those of the start
    at_s: float  # when it ended, since the run began
    wall_s: float
    wait_s: float = 0.0  # the trainer waited for rollouts, or to be heard
    train_s: float = 0.0  # from the batch to the trainer's word that it is done; or less, where it says so
    absent_s: float = 0.0  # no trainer asked for anything, and none was at work
    adapter_load_s: float = 0.0  # until the new weights were in force

    # The batch
    groups: int = 0
    games: int = 0
    numbers: tuple[int, ...] = ()  # of its groups
    tokens_per_game: float = 0.0  # drawn
    tokens_per_call: float = 0.0
    staleness_mean: float = 0.0  # versions between a group's oldest trainable token and `version`
    staleness_max: int = 0
    step_rollout_s: float = 0.0  # from the start of its first group until its last one was ready
    kl: float | None = None  # k3 from the reference, for each token; None: no reference was computed
    kl_k1: float | None = None
    kl_coefficient: float | None = None  # after the step
    ratio_mean: float | None = None  # trainer / sampler, where the trainer reported its own
    ratio_max: float | None = None
    effective: float | None = None  # sample size, as a share
    metrics: Mapping[str, float] = {}  # the trainer's own

    # The buffer
    buffer_before: int = 0  # groups that waited when the trainer asked
    buffer_after: int = 0  # and when the step ended
    running: int = 0  # groups under way at the end
    dropped: int = 0  # as too old, in this step
    tail_s: float = 0.0  # no more groups were there to be begun

    # The engine, in this time
    input_tokens: int = 0
    output_tokens: int = 0
    calls: int = 0  # answers that came
    slots: int = 0  # 0: not known
    inference_s: float = 0.0  # in forward steps; of several engines, or a far one, their mean
    tokens_per_s_wall: float = 0.0  # output
    tokens_per_s_inference: float = 0.0
    occupancy: float = 0.0  # rows in forward steps over slots, the mean over the time that steps ran
    busy: float = 0.0  # rows in forward steps over slots, the mean over all of the step
    offered: float = 0.0  # rows asked for over slots, the mean over all of the step; over 1: some waited for a slot
    offered_working: float = 0.0  # the same over the time in which any group was under way
    working_s: float = 0.0  # any group was under way
    gated_s: float = 0.0  # a group could have been begun, but the capacity rule did not admit it
    reference_s: float = 0.0  # a reference pass was under way
    reference_share: float = 0.0  # of the time from a group's start until it was ready, in its pass; the batch's mean
    constraint_s: float = 0.0  # spent on constraints: compiling them, and cutting the choice down
    environment_s: float = 0.0  # the mean game's time in its environment: the step's length, times that share of games
    cold_start_s: float = 0.0  # before the first answer's first token of an engine that was just started

    verdict: Mapping[str, Any] | None = None


NO_FIGURES = ("step", "at_s", "slots")


def figures_of(step: StepRecord) -> dict[str, float]:
    """A step's numbers for trackers, as `trainer/wait_s`, and the trainer's own, as `trainer/metric_loss`."""
    fields = msgspec.structs.asdict(step)
    numbers = {name: one for name, one in fields.items() if isinstance(one, int | float) and name not in NO_FIGURES}
    numbers |= {f"metric_{name}": one for name, one in step.metrics.items()}
    return {f"trainer/{name}": float(one) for name, one in numbers.items()}


class StepsFile:
    """Writes each step as it ends: one line, whole, in one call, so that it can be followed.

    With `resume` the lines that are there stay, but for one that was half written, and are read into `before`; else the
    file is written anew. Raises `UsageError` where it cannot be written, or gone on with.
    """

    def __init__(self, path: str | Path, *, resume: bool = False) -> None:
        self.path = Path(path)
        self.before: list[StepRecord] = []
        try:
            self._file = AppendFile(self.path, empty=not resume)
            if resume:
                self.before = list(read_steps(self.path))
                cut_torn(self.path)
        except OSError as error:
            raise UsageError(f"--steps {path} cannot be written ({error.strerror}). Name another file.") from None

    def add(self, record: StepRecord) -> None:
        """Raises `WorkError` when the disk takes no more."""
        try:
            self._file.append(msgspec.json.encode(record) + b"\n")
        except OSError as error:
            raise WorkError(f"--steps {self.path} cannot be written: {error.strerror}. Free some space.") from None

    def close(self) -> None:
        self._file.close()


def read_steps(path: str | Path) -> Iterator[StepRecord]:
    """The steps of a file, without one that is only half there. Raises `UsageError` for a line that is no step."""
    decoder = msgspec.json.Decoder(StepRecord)
    for number, line in enumerate(whole_lines(Path(path)), 1):
        try:
            yield decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise UsageError(f"line {number} of {path} is no step ({error}). Give --steps another file.") from None


StallCause = Literal[
    "starvation",
    "reference pass",
    "adapter load",
    "cold start",
    "constraint",
    "engine saturated",
    "too little concurrency",
    "environment slow",
]
StallKind = Literal["healthy", StallCause]
STALL_CAUSES: tuple[StallCause, ...] = get_args(StallCause)
LEAST_STALL = 0.1  # of a step, lost: less is no stall
ORDINARY = 0.15  # of the rollouts' time: a part that is less is not what keeps them
FULL = 0.85  # of the slots: with so many rows asked for, the engine has what it can take
DEEPEST = 16  # batches: older rollouts than that teach little
GATED = 0.15  # of the step: groups were kept back for so long
OF_THE_FIRST = ("cold start", "adapter load")  # kinds that the first step of a run can have
OF_CROWDS = ("starvation", "too little concurrency")  # those that the last of a run cannot
MOST_SECONDS = 1e9  # seconds: more is no time that a step takes


class Stall(Struct, frozen=True, kw_only=True):
    """What delayed one step, if anything did. `shares`: the part of the step that each kind cost."""

    kind: StallKind
    share: float  # of the step: what this kind cost; of a healthy one 0
    why: str  # the arithmetic, with numbers
    advice: str
    shares: Mapping[StallKind, float]

    def plain(self) -> dict[str, Any]:
        """For the line of the step."""
        found: dict[str, Any] = msgspec.to_builtins(self)
        return found


def stall_of(step: StepRecord, depth: float) -> Stall:
    """`depth`: batches that may be played ahead of the trainer, by the buffer or by the bound on staleness.

    It never raises, whatever the numbers; shares are between 0 and 1 and sum to 1 at most. The first step of a run
    waits for the first rollouts whatever is done: only what was started for it can be its stall. At the end of a run
    the last groups are alone: how few are played at once is no stall then.
    """
    case = _Case(step, depth)
    shares = {
        kind: share
        for kind, share in case.shares().items()
        if (kind in OF_THE_FIRST if case.first else not (case.last and kind in OF_CROWDS))
    }
    kind = max(shares, key=lambda name: shares[name], default=None)
    if kind is None or math.fsum(shares.values()) < LEAST_STALL:
        why = f"The trainer was at work {case.train_s / case.wall_s:.0%} of the step: {case.waited()}."
        if case.wait_s >= LEAST_STALL * case.wall_s and case.first:
            why = f"The first step waits for the first rollouts: {case.waited()}."
        elif case.wait_s >= LEAST_STALL * case.wall_s and case.last:
            why = f"No more groups were left to be begun: {case.waited()}."
        return Stall(kind="healthy", share=0.0, why=why, advice="", shares=shares)
    why, advice = _text(kind, case)
    return Stall(kind=kind, share=shares[kind], why=why, advice=advice, shares=shares)


class _Case:
    """The numbers of a step, forced into their ranges."""

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

    def parts(self) -> dict[StallKind, float]:
        """Parts of the rollouts' time: a group's in its reference pass, a game's in its environment, the engine's in
        constraints. They sum to 1 at most.
        """
        step = self.step
        reference = min(_sound(step.reference_share), 1.0)
        environment, constraint = (
            min(_sound(seconds / self.wall_s if seconds else 0.0), 1.0) * (1 - reference)
            for seconds in (step.environment_s, step.constraint_s)
        )
        total = max(1.0, reference + environment + constraint)
        return {
            "reference pass": reference / total,
            "environment slow": environment / total,
            "constraint": constraint / total,
        }

    def shares(self) -> dict[StallKind, float]:
        """What each kind cost of the step; those that cost nothing are left out."""
        left = (self.wait_s - self.cold_s) / self.wall_s
        parts = {kind: part for kind, part in self.parts().items() if part >= ORDINARY}
        scale = min(1.0, left / total) if (total := math.fsum(parts.values())) else 0.0
        found: dict[StallKind, float] = {kind: part * scale for kind, part in parts.items()}
        found["adapter load"], found["cold start"] = self.load_s / self.wall_s, self.cold_s / self.wall_s
        found[self.crowd()] = max(0.0, left - math.fsum(parts.values()) * scale)
        most = max(1.0, math.fsum(found.values()))  # of rounding
        return {kind: share / most for kind, share in found.items() if share > 0}

    def crowd(self) -> StallKind:
        """What of the wait has no part of the rollouts' time to blame."""
        if self.offered >= FULL:
            return "engine saturated"
        if not self.step.slots or _sound(self.step.gated_s) >= GATED * self.wall_s:
            return "starvation"
        return "too little concurrency"

    def waited(self) -> str:
        return f"the trainer waited {short(self.wait_s)} of {short(self.wall_s)}"


def _text(kind: StallKind, case: _Case) -> tuple[str, str]:
    """Why the step took longer, with the numbers, and the advice."""
    step, wall, waited = case.step, short(case.wall_s), case.waited()
    match kind:
        case "starvation":
            return _starvation_text(case)
        case "reference pass":
            part, under_way = case.parts()["reference pass"], short(_sound(step.reference_s))
            return (
                f"A group spent {part:.0%} of its time in its reference pass, which was under way for {under_way} of "
                f"{wall}: {waited}.",
                "Let it go beside play, --reference deferred, or take a smaller --ref-model.",
            )
        case "adapter load":
            return (
                f"New weights took {short(case.load_s)} of {wall} until they were in force, "
                f"{case.load_s / case.wall_s:.0%} of the step; training took {short(case.train_s)}.",
                "Train on more groups at a time (--batch-groups), and hand over an adapter on a local disk.",
            )
        case "cold start":
            return (
                f"An engine that was just started gave its first token after {short(case.cold_s)}, "
                f"{case.cold_s / case.wall_s:.0%} of the step: {waited}.",
                "It is paid once, by longer runs the less; where engines are replaced again and again, see why.",
            )
        case "constraint":
            return (
                f"{short(_sound(step.constraint_s))} of {wall} went into constraints, compiling them and cutting the "
                f"choice down: {waited}.",
                "Lists of what is legal cost least, patterns and grammars more; --no-constrain shows what they cost.",
            )
        case "engine saturated":
            return (
                f"Rows were asked for {case.offered:.1f} times as many as the {step.slots:,} slots, and the engine was "
                f"in its steps for {short(_sound(step.inference_s))} of {wall}: {waited}.",
                "Another engine (--backend fleet -B replicas=2), more slots (--batch-size), or fewer tokens a game.",
            )
        case "too little concurrency":
            rows = case.offered * step.slots
            why = f"Only {rows:,.1f} rows were asked for at once, of {step.slots:,} slots: {waited}."
            if case.offered <= 0.0 or step.running <= 0:
                return why, "Play more groups at once: --groups-in-flight."
            wanted = min(math.ceil(step.running / case.offered), step.running + step.slots)
            return why, f"Play more groups at once: --groups-in-flight {max(wanted, step.running + 1)}."
    part = case.parts()["environment slow"]
    return (
        f"Games were in their environment, and asked for nothing, {part:.0%} of their time: {waited}.",
        "Make its calls quicker, or play more groups at once, --groups-in-flight, so that others ask meanwhile.",
    )


def _starvation_text(case: _Case) -> tuple[str, str]:
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


def _sound(value: float) -> float:
    """The value, at least 0; 0 for NaN."""
    return min(max(0.0, value), MOST_SECONDS) if value == value else 0.0
