"""Finds good settings for this machine within a time: trials of a few seconds each, then a race of the best of them.

Half of the time goes into trials, one run each, by the bracketed search below. What a single short run says is
not to be trusted, so the finalists then run in turn until the time is up, and are compared like the variants of a
bench: the defaults, and the best of each backend that is not far behind. Where the noise does not tell two apart, the
one that asks less of the user comes first: the defaults, then no server.

A bracketed search for good settings, by a few noisy measurements.

One setting after the other (Hooke and Jeeves, "Direct search", 1961), each on a ladder of doublings: upwards while it
pays, else downwards while it pays, until the best rung has a worse one on either side (bracketing: Press et al.,
"Numerical Recipes", 3rd edition, 2007, section 10.1). That finds the best where speed has a single peak along each
ladder, which is so for batches, workers and games in flight: too few starve the model, too many leave the caches.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpuinfer.lab.bench import parity
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.measurement import (
    MeasuredRun,
    Rooflines,
    Variant,
    Watch,
    goodness,
    in_metric,
    measure_run,
    reason,
)
from gpuinfer.lab.bench.series import Measured, RunKind, Series, SeriesOutcome, SeriesPlan, SeriesStep, Show, unseen
from gpuinfer.runtime.run import RunUpdate

WORTH = 1.03  # a gain below this is noise, and the smaller or the default setting stays

Point = Mapping[str, str]
"""Settings by axis; an axis that is not named has the default."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One setting: its rungs in ascending order, and the rung that its default stands nearest to."""

    name: str
    rungs: Sequence[str]
    start: int


def ladder(name: str, least: int, most: int, start: int) -> Axis:
    """Doublings from `least` up, the last one `most`; it starts at the rung nearest to `start` by ratio."""
    rungs = [least]
    while rungs[-1] * 2 < most:
        rungs.append(rungs[-1] * 2)
    if most > rungs[-1]:
        rungs.append(most)
    nearest = min(range(len(rungs)), key=lambda index: max(rungs[index] / start, start / rungs[index]))
    return Axis(name, [str(rung) for rung in rungs], nearest)


def climb_ladder(point: Point, axes: Sequence[Axis], rate: Callable[[Point], float | None]) -> Point:
    """The best point found from `point` on. `rate` measures one; None: it cannot run, or there is no time left."""
    top = rate(point)
    if top is None:
        return point
    for axis in axes:
        point, top = along(axis, point, top, rate)
    return point


def along(axis: Axis, point: Point, top: float, rate: Callable[[Point], float | None]) -> tuple[Point, float]:
    """The best point on one ladder, and its rate. The default counts as the rung at which it stands."""
    for step in (1, -1):
        index, moved = axis.start + step, False
        while 0 <= index < len(axis.rungs):
            there = {**point, axis.name: axis.rungs[index]}
            found = rate(there)
            if found is None or found <= WORTH * top:
                break
            point, top, moved, index = there, found, True, index + step
        if moved:
            break
    return point, top


TRIALS = 0.5  # of the budget; the rest is the race's
SHORTEST_S, LONGEST_S = 1.0, 5.0  # of a trial
RUNS_IN_A_BUDGET = 30  # of which most go into starting and stopping
CHECK_S = 4.0  # kept back for the winner's answers
LEAST_ROUNDS = 3
MOST_REPEATS = 9  # of the race
FAR_BEHIND = 0.7  # of the best trial: no finalist
GAMES_FACTOR = 8  # how far games in flight may be from their default, each way


@dataclass(frozen=True, slots=True)
class Trial:
    """One point, run once."""

    variant: Variant
    run: MeasuredRun | None  # None: it cannot run
    reason: str | None = None
    facts: Mapping[str, float] = field(default_factory=dict)  # what the workload said of itself, and `max_rows`

    @property
    def rate(self) -> float | None:
        return goodness(*self.run.rate) if self.run else None


@dataclass
class Space:
    """What may be varied. `variant` builds a point; axes are named as it knows them."""

    backends: Sequence[str]
    variant: Callable[[Point], Variant]
    axes: Callable[[str, Mapping[str, float]], list[Axis]]  # of a backend, from what its first trial said


class Tuner:
    """One search. `run` returns the race's outcome; `trials` are all points that were tried, in that order."""

    def __init__(self, space: Space, budget_s: float, series_plan: SeriesPlan, show: Show = unseen) -> None:
        self.trials: dict[str, Trial] = {}  # by the variant's name
        self.series_plan = SeriesPlan(
            MOST_REPEATS,
            min(LONGEST_S, max(SHORTEST_S, budget_s / RUNS_IN_A_BUDGET)),
            None,
            series_plan.seed,
            series_plan.roofline,
            parity=False,
        )
        self._space, self._show = space, show
        self._budget_s, self._ends = budget_s, time.monotonic() + budget_s
        self._rooflines = Rooflines(series_plan.roofline)
        self._took: list[float] = []
        self._metric: str | None = None  # of the first trial, and so of all
        self._series: Series | None = None
        self._starts: list[Point] = [{"backend": name} for name in space.backends]

    @property
    def outcome(self) -> SeriesOutcome:
        """Of the race, as far as it has come."""
        return self._series.outcome if self._series else SeriesOutcome([])

    def run(self) -> SeriesOutcome:
        stopped = False
        try:
            for start in self._starts:
                self._try(start, always=True)
            for start in sorted(self._starts, key=lambda one: -(self._tried(one).rate or 0.0)):
                trial = self._tried(start)
                if trial.rate is not None:
                    climb_ladder(start, self._space.axes(start["backend"], trial.facts), self._rate)
            finalists = self._best()
        except KeyboardInterrupt:
            finalists, stopped = self._best(), True
        known = [self._known(one) for one in finalists[:1]]
        self._series = Series(finalists, self.series_plan, self._show, self._rooflines, self._ends - CHECK_S, known)
        outcome = self._series.outcome
        outcome.skipped |= {one.variant.name: str(one.reason) for one in self.trials.values() if one.rate is None}
        outcome.stopped = stopped
        if not stopped:
            self._series.run()
            self._verify(outcome)
        return outcome

    def _known(self, first: Variant) -> Measured:
        """The trial of the first backend as it is, which counts in the race: whatever it brought, it would be there.

        Any other finalist is one because its trial went well, perhaps by chance.
        """
        run = self.trials[first.name].run
        if run is None:
            raise ValueError("a finalist has been tried")
        return Measured.of(first, 0, self.series_plan.seed, run)

    def _verify(self, outcome: SeriesOutcome) -> None:
        """Check the winner's answers; one that is wrong wins no longer, and the next is checked."""
        try:
            while (winner := compare_variants(outcome).winner) is not None and winner.name not in outcome.parity:
                plan = winner.variant.build(self.series_plan.seed)
                if not parity.applies(plan):
                    return
                try:
                    with self._show(SeriesStep(winner.variant, RunKind.PARITY, left_s=CHECK_S)) as watch:
                        found = parity.check_parity(plan, watch)
                except Exception as error:  # noqa: BLE001 (whatever a plugin raises, the others may still be right)
                    outcome.failed[winner.variant.name] = f"{RunKind.PARITY}: {reason(error)}"
                else:
                    if found is not None:
                        outcome.parity[winner.variant.name] = found
        except KeyboardInterrupt:
            outcome.stopped = True

    def _best(self) -> list[Variant]:
        """The backends as they are, as far as they are not far behind, and the best point of each."""
        by_backend: dict[str, list[Trial]] = {}
        for trial in self.trials.values():
            if trial.rate:
                by_backend.setdefault(str(trial.variant.settings["backend"]), []).append(trial)
        best = max((one.rate or 0.0 for one in self.trials.values()), default=0.0)
        tops = [max(trials, key=lambda one: one.rate or 0.0) for trials in by_backend.values()]
        tops = [top for top in tops if (top.rate or 0.0) >= FAR_BEHIND * best]
        firsts = [trials[0] for trials in list(by_backend.values())[:1]]
        named = {one.variant.name: one.variant for one in (*firsts, *tops)}
        return list(named.values())

    def _rate(self, point: Point) -> float | None:
        self._try(point)
        found = self.trials.get(self._space.variant(point).name)
        return found.rate if found else None

    def _tried(self, point: Point) -> Trial:
        return self.trials[self._space.variant(point).name]

    def _try(self, point: Point, always: bool = False) -> None:
        variant = self._space.variant(point)
        left_s = self._ends - time.monotonic()
        rounds_s = LEAST_ROUNDS * len(self._space.backends) * self._expected_s() + CHECK_S
        in_time = self._expected_s() <= left_s - max((1 - TRIALS) * self._budget_s, rounds_s)
        if variant.name in self.trials or not (always or in_time):
            return
        self.trials[variant.name] = self._trial(variant, left_s)

    def _trial(self, variant: Variant, left_s: float) -> Trial:
        facts: dict[str, float] = {}
        try:
            if self._rooflines.missing(variant.build(self.series_plan.seed)):
                with self._show(SeriesStep(variant, RunKind.ROOFLINE, left_s=left_s)):
                    self._rooflines.of(variant.build(self.series_plan.seed))

            def keep(update: RunUpdate, watch: Watch) -> None:
                facts.update(update.progress.facts)
                watch(update)

            began, series_plan = time.monotonic(), self.series_plan
            with self._show(SeriesStep(variant, RunKind.TRIAL, left_s=left_s)) as watch:
                run = measure_run(
                    variant, series_plan.seed, series_plan.seconds, self._rooflines, lambda update: keep(update, watch)
                )
            self._took.append(time.monotonic() - began)
            if run.report["status"] == "partial":
                raise KeyboardInterrupt
            if run.max_rows is not None:
                facts["max_rows"] = run.max_rows
            self._metric = self._metric or run.counted()[0]
            run = replace(run, rate=in_metric(self._metric, run.rate, run.report))
            run.counted()
        except Exception as error:  # noqa: BLE001 (whatever a plugin raises, the others are tried)
            return Trial(variant, None, reason(error))
        return Trial(variant, run, None, facts)

    def _expected_s(self) -> float:
        """The longest of the last few, since larger settings take longer to start."""
        return max(self._took[-3:], default=0.0)


def axes(facts: Mapping[str, float], cores: int, free: Sequence[str]) -> list[Axis]:
    """The ladders for self-play and its like, as far as the settings are `free` and the trial with the defaults, whose
    `facts` these are, knows them.
    """
    found = []
    if "workers" in free and facts.get("workers") and cores > 1:
        found.append(ladder("workers", 1, cores, int(facts["workers"])))
    games = int(facts.get("games_in_flight", 0))
    if "games_in_flight" in free and games:
        found.append(ladder("games_in_flight", max(1, games // GAMES_FACTOR), games * GAMES_FACTOR, games))
    if "max_rows" in free and (max_rows := int(facts.get("max_rows", 0))):
        found.append(ladder("max_rows", max(1, max_rows // 8), max_rows * 2, max_rows))
    return found


def searched(tuner: Tuner, budget_s: float) -> dict[str, Any]:
    """The trials, for the document."""
    tried = [{"name": one.variant.name, "rate": one.rate, "reason": one.reason} for one in tuner.trials.values()]
    return {"budget_s": budget_s, "tried": tried}
