"""A run as the causes look at it: its numbers, the bounds that follow from them, and what can be predicted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gpuinfer.config.change import Change
from gpuinfer.report.evidence import Evidence
from gpuinfer.report.forecast import Gain, forecast, systems_of
from gpuinfer.report.laws import BINDS, Curve, bounds, curve_of
from gpuinfer.report.replay import System


@dataclass(frozen=True, slots=True)
class Case:
    """The run, its bounds in rows/s by what limits them, its curve, and its queues for a replay; what is known."""

    run: Evidence
    bounds: Mapping[str, float]
    curve: Curve | None
    systems: Sequence[System]

    @classmethod
    def of(cls, run: Evidence) -> Case:
        curve = curve_of(run)
        if run.slots:  # rows per second of steps are no rows per second of answers: a row takes many steps
            return cls(run, {}, curve, ())
        return cls(run, bounds(run, curve), curve, systems_of(run, curve))

    def binds(self, limit: str) -> bool:
        """Whether the run has come so close to this bound that no other change can help much."""
        return self.reached(limit) >= BINDS

    def reached(self, limit: str) -> float:
        """How much of a bound the run has reached; 0 where the bound is not known."""
        bound = self.bounds.get(limit, 0.0)
        return self.run.rows_per_s / bound if bound else 0.0

    def faster(self, rows: float) -> float:
        """How many times as fast the model is with batches of so many rows as with the run's own."""
        usual = self.run.rows_usual
        return self.curve.rate(rows) / self.curve.rate(usual) if self.curve and usual else 1.0

    def gain_of(
        self, change: Callable[[Sequence[System]], Sequence[System]], most: float = math.inf, *, anchored: bool = True
    ) -> Gain:
        return forecast(self.run, self.systems, change, most, anchored=anchored)


@dataclass(frozen=True, slots=True)
class Verdict:
    """One sentence of evidence, one of advice, and what following it should bring."""

    kind: str
    station: str
    why: str
    advice: str
    change: Change | None = None  # that the advice speaks of
    gain: Gain = field(default_factory=Gain)
    healthy: bool = False  # nothing to mend: the run does what it can, or what is asked of it
