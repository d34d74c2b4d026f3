"""How long a loop's steps take, by kind, and what all of its iterations will come to."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from gpuinfer.lab.loop.loop_runner import KINDS, Kind, LoopPlan, LoopStep, done_report, step_seconds
from gpuinfer.lab.presenter import Table
from gpuinfer.units import duration

LATEST = 3  # steps of a kind: the next is expected to take their mean, as games change while the network learns
LABELS: Mapping[Kind, str] = {"games": "self-play", "training": "training", "gate": "gate", "match": "match"}


class LoopTimes:
    """Seconds of a plan's steps; one that is not done is expected to take as long as the latest of its kind."""

    def __init__(self, plan: LoopPlan) -> None:
        self._plan = plan
        self._kinds: dict[Path, Kind] = {}  # of all steps, by their reports
        self._took: dict[Path, float] = {}  # of those that are done, in the order in which they ended
        for step in plan.steps():
            self._kinds[step.report] = step.kind
            if (report := done_report(step.report)) is not None:
                self._took[step.report] = step_seconds(report)

    def ended(self, step: LoopStep, seconds: float) -> None:
        """A step was done in so many seconds."""
        self._took[step.report] = seconds

    def seconds_left(self) -> float | None:
        """Of all steps that have not ended; None before one of each kind has."""
        expected = self._expected()
        left = [kind for report, kind in self._kinds.items() if report not in self._took]
        if any(kind not in expected for kind in left):
            return None
        return sum(expected[kind] for kind in left)

    def _expected(self) -> dict[Kind, float]:
        """Seconds of the next step of each kind, as far as that is known."""
        found: dict[Kind, float] = {}
        for kind in KINDS:
            if took := [seconds for report, seconds in self._took.items() if self._kinds.get(report) == kind]:
                found[kind] = fmean(took[-LATEST:])
        if "games" in found:  # games of a match are about as long as those of self-play
            a_game = found["games"] / self._plan.games
            found = {"match": a_game * self._plan.evaluation_games, "gate": a_game * self._plan.gate_games, **found}
        return found

    def document(self) -> dict[str, Any] | None:
        """Of all iterations of the plan: `seconds`, of which `done_s` are over; by kind its steps, seconds of one
        (`step_s`), of an iteration on average (`iteration_s`), of all (`seconds`) and the share of the whole; and
        `projection`, which says it in words. None before one step of each kind has ended.
        """
        left = self.seconds_left()
        if left is None or not self._took:
            return None
        expected, done = self._expected(), sum(self._took.values())
        kinds: dict[str, dict[str, float | int]] = {}
        for kind in KINDS:
            all_of_it = [self._took.get(report, expected[kind]) for report, one in self._kinds.items() if one == kind]
            if all_of_it:
                seconds = sum(all_of_it)
                kinds[kind] = {
                    "steps": len(all_of_it),
                    "step_s": expected[kind],
                    "iteration_s": seconds / self._plan.iterations,
                    "seconds": seconds,
                    "share": seconds / (done + left) if done + left else 0.0,
                }
        return {
            "iterations": self._plan.iterations,
            "iteration_s": (done + left) / self._plan.iterations,
            "seconds": done + left,
            "done_s": done,
            "kinds": kinds,
            "projection": projection_words(self._plan.iterations, done + left, kinds),
        }


def projection_words(iterations: int, seconds: float, kinds: Mapping[str, Mapping[str, float]]) -> str:
    """Such as `500 iterations: 3.7 days, of which self-play 81 %`: the kind that takes most is named."""
    most = max(kinds, key=lambda kind: kinds[kind]["share"])
    label = next(label for kind, label in LABELS.items() if kind == most)
    plural = "s" if iterations > 1 else ""
    share = 100 * kinds[most]["share"]
    return f"{iterations} iteration{plural}: {duration(seconds)}, of which {label} {share:.0f} %"


def times_line(time: Mapping[str, Any]) -> str:
    """An iteration in one line, from a loop's `time`: `self-play 42 s (81 %), training 8 s (19 %)`."""
    kinds = [
        f"{label} {duration(time['kinds'][kind]['iteration_s'])} ({100 * time['kinds'][kind]['share']:.0f} %)"
        for kind, label in LABELS.items()
        if kind in time["kinds"]
    ]
    return ", ".join(kinds)


def times_table(time: Mapping[str, Any]) -> Table:
    """A row a kind of step, from a loop's `time`."""
    columns = ("step", "each", "an iteration", "share", f"all {time['iterations']} iterations")
    rows = [
        (
            label,
            duration(one["step_s"]),
            duration(one["iteration_s"]),
            f"{100 * one['share']:.0f} %",
            duration(one["seconds"]),
        )
        for kind, label in LABELS.items()
        if (one := time["kinds"].get(kind)) is not None
    ]
    rows.append(("all", "", duration(time["iteration_s"]), "100 %", duration(time["seconds"])))
    return Table(columns, rows, title=f"Time of {time['projection']}")
