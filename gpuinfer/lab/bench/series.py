"""All runs of a comparison, one after the other: warm-ups and checks, then the repeats in turn, A B A B …

In turn, because a machine changes while one measures: what slows one repeat slows every variant's, and the ratios
within a repeat stay true. Each repeat has a seed of its own, the same for every variant.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from enum import StrEnum
from statistics import fmean
from typing import Any

from gpuinfer.lab.bench import parity
from gpuinfer.lab.bench.measurement import MeasuredRun, Rooflines, Variant, Watch, measure_run, reason
from gpuinfer.lab.bench.parity import Parity

log = logging.getLogger(__name__)

FIRST_GUESS_S = 4.0  # what a step takes beyond its measuring, before any has been seen


class RunKind(StrEnum):
    """What a step does."""

    ROOFLINE = "measuring the bare model"
    WARM_UP = "warming up"
    PARITY = "checking the answers"
    REPEAT = "repeat"
    TRIAL = "trying"


@dataclass(frozen=True, slots=True)
class SeriesStep:
    """What is about to be done, for those who watch."""

    variant: Variant
    kind: RunKind
    repeat: int = 0
    repeats: int = 0
    left_s: float = 0.0  # until all is done, about

    @property
    def doing(self) -> str:
        return f"repeat {self.repeat + 1} of {self.repeats}" if self.kind is RunKind.REPEAT else self.kind.value


@dataclass(frozen=True, slots=True)
class Measured:
    """One run of one variant."""

    variant: str
    repeat: int
    seed: int
    metric: str
    rate: float  # the metric's value
    report: dict[str, Any]
    served: float = 0.0  # rows per second that were answered
    of_load: bool = False  # whether requests came for their own sake

    @classmethod
    def of(cls, variant: Variant, repeat: int, seed: int, run: MeasuredRun) -> Measured:
        """Raises `WorkError` when the run brought nothing to count."""
        return cls(variant.name, repeat, seed, *run.counted(), run.report, run.served, run.of_load)


@dataclass
class SeriesOutcome:
    """What a series has brought so far."""

    variants: list[Variant]
    runs: list[Measured] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)  # could not begin here, by name, with the reason
    failed: dict[str, str] = field(default_factory=dict)  # had begun
    parity: dict[str, Parity] = field(default_factory=dict)
    stopped: bool = False  # by the user

    def left(self) -> list[Variant]:
        return [one for one in self.variants if one.name not in self.skipped and one.name not in self.failed]


@dataclass(frozen=True, slots=True)
class SeriesPlan:
    """How often and for how long."""

    repeats: int = 3
    seconds: float | None = 5.0  # of one run; None: it plays to its end
    warmup_s: float | None = 1.0  # None: no run before the first
    seed: int = 0  # of the first repeat; the next ones count up
    roofline: bool = True
    parity: bool = True  # check the answers before the first repeat


Show = Callable[[SeriesStep], AbstractContextManager[Watch]]
"""A context around each step; yields what takes the step's updates."""


@contextlib.contextmanager
def unseen(step: SeriesStep) -> Iterator[Watch]:
    yield lambda update: None


class Series:
    """Runs every variant as the plan says. A variant that cannot run is skipped and harms no other.

    No round of repeats but the very first begins when it would end after `deadline`, a time on the monotonic clock.
    `known` are runs that need not be repeated.
    """

    def __init__(
        self,
        variants: Sequence[Variant],
        series_plan: SeriesPlan,
        show: Show = unseen,
        rooflines: Rooflines | None = None,
        deadline: float = math.inf,
        known: Sequence[Measured] = (),
    ) -> None:
        self.outcome = SeriesOutcome(list(variants), list(known))
        self._known = {(one.variant, one.repeat) for one in known}
        self.series_plan, self._show, self._deadline = series_plan, show, deadline
        self._rooflines = rooflines or Rooflines(series_plan.roofline)
        self._took: dict[RunKind, list[float]] = {}

    def run(self) -> SeriesOutcome:
        """All steps, or those until the user stops it: Ctrl-C, SIGTERM."""
        steps = list(self._steps())
        try:
            for index, step in enumerate(steps):
                begins = step.kind is RunKind.REPEAT and step.repeat > 0 and step.variant is self.outcome.variants[0]
                round_s = len(self.outcome.left()) * self._expected_s(RunKind.REPEAT)
                late = begins and time.monotonic() + round_s > self._deadline
                if self.outcome.stopped or late:
                    break
                if step.variant in self.outcome.left():
                    self._take(step, self._left_s(steps[index:]))
        except KeyboardInterrupt:
            self.outcome.stopped = True
        return self.outcome

    def _steps(self) -> Iterator[SeriesStep]:
        """The bare models before anything else has warmed the machine up."""
        wanted = {RunKind.WARM_UP: self._warms_up, RunKind.PARITY: self.series_plan.parity}
        first = [kind for kind, yes in wanted.items() if yes]
        yield from (SeriesStep(variant, RunKind.ROOFLINE) for variant in self.outcome.variants)
        for variant in self.outcome.variants:
            yield from (SeriesStep(variant, kind) for kind in first)
        for repeat in range(self.series_plan.repeats):
            for variant in self.outcome.variants:
                if (variant.name, repeat) not in self._known:
                    yield SeriesStep(variant, RunKind.REPEAT, repeat, self.series_plan.repeats)

    @property
    def _warms_up(self) -> bool:
        return self.series_plan.warmup_s is not None

    def _take(self, step: SeriesStep, left_s: float) -> None:
        if not self._due(step):
            return
        began = time.monotonic()
        try:
            with self._show(replace(step, left_s=left_s)) as watch:
                {RunKind.ROOFLINE: self._roofline, RunKind.PARITY: self._check}.get(step.kind, self._measure)(
                    step, watch
                )
        except Exception as error:  # noqa: BLE001 (whatever a plugin raises, the others are compared)
            log.debug("%s", "".join(traceback.format_exception(error)))
            self._note(step, error)
        self._took.setdefault(step.kind, []).append(time.monotonic() - began)

    def _due(self, step: SeriesStep) -> bool:
        """Whether there is anything to do: one roofline serves many variants, and not every workload asks a model."""
        if step.kind not in (RunKind.ROOFLINE, RunKind.PARITY):
            return True
        try:
            plan = step.variant.build(self.series_plan.seed)
        except Exception as error:  # noqa: BLE001 (an unknown name, an option that the plugin refuses)
            self.outcome.skipped[step.variant.name] = reason(error)
            return False
        return self._rooflines.missing(plan) if step.kind is RunKind.ROOFLINE else parity.applies(plan)

    def _roofline(self, step: SeriesStep, watch: Watch) -> None:
        self._rooflines.of(step.variant.build(self.series_plan.seed))

    def _check(self, step: SeriesStep, watch: Watch) -> None:
        found = parity.check_parity(step.variant.build(self.series_plan.seed), watch)
        if found is not None:
            self.outcome.parity[step.variant.name] = found

    def _measure(self, step: SeriesStep, watch: Watch) -> None:
        warming, seed = step.kind is RunKind.WARM_UP, self.series_plan.seed + step.repeat
        found = measure_run(
            step.variant,
            seed,
            self.series_plan.warmup_s if warming else self.series_plan.seconds,
            self._rooflines,
            watch,
        )
        if found.report["status"] == "partial":
            self.outcome.stopped = True
        elif not warming:
            self.outcome.runs.append(Measured.of(step.variant, step.repeat, seed, found))

    def _note(self, step: SeriesStep, error: Exception) -> None:
        """A variant that has finished a run is able to start on this machine."""
        if step.kind is RunKind.REPEAT or (step.kind is RunKind.PARITY and self._warms_up):
            self.outcome.failed[step.variant.name] = f"{step.doing}: {reason(error)}"
        else:
            self.outcome.skipped[step.variant.name] = reason(error)

    def _left_s(self, steps: Sequence[SeriesStep]) -> float:
        left = self.outcome.left()
        expected_s = sum(self._expected_s(step.kind) for step in steps if step.variant in left)
        return min(expected_s, max(0.0, self._deadline - time.monotonic()))

    def _expected_s(self, kind: RunKind) -> float:
        if kind is RunKind.ROOFLINE:
            return 0.0  # over before anyone asks
        measuring = (self.series_plan.warmup_s if kind is RunKind.WARM_UP else self.series_plan.seconds) or 0.0
        guess = FIRST_GUESS_S + (measuring if kind is not RunKind.PARITY else 0.0)
        return fmean(self._took[kind]) if kind in self._took else guess
