"""An advice is tried before it is given: the setting in force and the changed one run in turns, for some seconds each.

In turns A B B A A B …, so that a drift of the machine and its neighbours hit both alike; each turn starts anew, and its
start is left out. How sure the ratio is comes from how much the turns of one setting differ.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from gpuinfer.api import Roofline
from gpuinfer.errors import WorkError
from gpuinfer.host import event_loop
from gpuinfer.lab.bench.measurement import SpeedMeter, in_metric, ratio_of_turns
from gpuinfer.runtime.run import RunPlan, RunUpdate, execute

SHARE = 0.15  # of the run, which a trial of its advice may last at most
LEAST_S = 1.5  # of a turn: worker processes tell how they go four times a second
LONGEST_S = 5.0
PAIRS = (4, 3, 2)  # of turns, the more the better; one pair says nothing of the noise
ROUNDS = 10  # times what a request takes: a turn is no shorter
ANSWERS = 2  # times what an answer of text takes, of which the first half is left out: all rows begin at once
PLANNED = 0.85  # of the time that there is: a busy machine starts things more slowly than it did
END_S = 0.2  # to close a run
GRACE_S = 1.0  # for the workload to end by itself; there is nothing that it must keep
LOOKS = 20  # in a turn, at the counters
LOOK_S = (0.01, 0.1)  # between them, at least and at most


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """How many pairs of turns, and how long each of them is measured."""

    pairs: int
    seconds: float
    most_s: float  # that all of it may take, starts included
    about_s: float = 0.0  # that it will take
    starting: float = 0.2  # of a turn, left out


def plan_trial(report: Mapping[str, Any], start_s: float) -> TrialPlan | None:
    """The plan of a trial after this run, whose start took `start_s`; None where the run was too short for a trial."""
    answer_s = report["latency_s"].get("mean", 0.0) - report["queue_wait_s"].get("mean", 0.0)
    text = bool(report["batches"]["slots"])
    least_s = max(LEAST_S, answer_s * (ANSWERS if text else ROUNDS))
    most_s = SHARE * report["wall_s"]
    for pairs in PAIRS:
        seconds = PLANNED * most_s / (2 * pairs) - start_s - END_S
        if seconds >= least_s:
            seconds = min(seconds, max(least_s, LONGEST_S))
            return TrialPlan(pairs, seconds, most_s, 2 * pairs * (start_s + seconds + END_S), 0.5 if text else 0.2)
    return None


class AdviceTrial:
    """Runs the turns. `watch` gets the number of finished turns, many times a turn."""

    def __init__(
        self,
        present: Callable[[], RunPlan],
        changed: Callable[[], RunPlan],
        trial_plan: TrialPlan,
        roofline: Roofline | None = None,
        watch: Callable[[int], None] = lambda done: None,
    ) -> None:
        self._builds, self._plan = (present, changed), trial_plan
        self._roofline, self._watch = roofline, watch
        self._metric = ""
        self._deadline = time.monotonic() + trial_plan.most_s
        self._over = self._interrupted = False  # a turn, by its time or by the user
        self._rates: tuple[list[float], list[float]] = ([], [])

    @property
    def done(self) -> int:
        """How many turns."""
        return len(self._rates[0]) + len(self._rates[1])

    @property
    def pairs(self) -> int:
        """How many pairs of them."""
        return min(map(len, self._rates))

    def run(self) -> tuple[float, float, float]:
        """How many times as fast the changed one is, and the ends of the 95 % interval.

        Raises `WorkError` when that cannot be told in time, whatever keeps one of them from running, and
        `KeyboardInterrupt` when the user will not wait.
        """
        for pair in range(self._plan.pairs):
            try:
                self._take(pair)
            except TimeoutError:
                if pair < min(PAIRS):
                    raise WorkError("starting anew for each turn took too long") from None
                break
        present, changed = (rates[: self.pairs] for rates in self._rates)
        found = ratio_of_turns(changed, present)
        low, high = found.ends or (0.0, math.inf)  # of two pairs and more there is an interval
        return found.median, low, high

    def _take(self, pair: int) -> None:
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            self._rates[which].append(self._turn(self._builds[which]))

    def _turn(self, build: Callable[[], RunPlan]) -> float:
        """Its rate. Raises `TimeoutError` when no time was left for it."""
        plan, meter = build(), SpeedMeter(self._plan.seconds, self._plan.starting)
        try:
            report = event_loop.run(asyncio.wait_for(self._execute(plan, meter), self._left_s()))
        except WorkError:
            if self._interrupted:
                raise KeyboardInterrupt from None
            if not self._left_s():
                raise TimeoutError from None
            raise
        if self._interrupted or report["status"] == "partial":
            _end_processes()  # those that are left of a run that was over before it was looked at
            raise KeyboardInterrupt
        if failed := report["errors"]["failed"]:
            raise WorkError(f"{failed} requests failed")
        name, rate = meter.rate(report)
        self._metric = self._metric or name
        found = in_metric(self._metric, (name, rate), report)[1]
        if found <= 0:
            raise WorkError("nothing was answered in a turn")
        return found

    async def _execute(self, plan: RunPlan, meter: SpeedMeter) -> dict[str, Any]:
        least, most = LOOK_S
        late = asyncio.get_running_loop().call_later(self._left_s(), _end_processes)
        try:
            self._over = False

            def enough(update: RunUpdate) -> bool:
                self._over = self._over or meter.enough(update)
                return self._over

            return await execute(
                plan.workload,
                plan.backend,
                plan.strategy,
                settings=plan.settings,
                roofline=self._roofline or False,
                on_update=self._look,
                until=enough,
                update_s=min(most, max(least, self._plan.seconds / LOOKS)),
                grace_s=GRACE_S,
            )
        finally:
            late.cancel()

    def _look(self, update: RunUpdate) -> None:
        """A run that stops before its time was interrupted."""
        if update.phase == "stopping" and not self._over:
            self._interrupted = True
            _end_processes()
        self._watch(self.done)

    def _left_s(self) -> float:
        return max(0.0, self._deadline - time.monotonic())


def _end_processes() -> None:
    """At once, and not when they are done with what they are at: there is nothing that they must keep."""
    for child in multiprocessing.active_children():
        child.kill()
