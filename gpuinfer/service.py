"""How long a batch takes, as a model: by hand, or fitted to what was measured. Shared by the simulator and a stand-in."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from gpuinfer.errors import UsageError


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """τ(n) = α·n + β, with a step of `step_s` for each full `step_rows` rows beyond the first, times a jitter.

    With `points`, (rows, seconds) both rising, the straight lines between them take the place of α and β. `jitter` is
    the standard deviation of a log-normal factor of mean 1; `failures` the share of batches that fail.
    Raises `UsageError` for a model that cannot be.
    """

    alpha: float = 0.0  # seconds a row
    beta: float = 0.0  # seconds a batch
    step_rows: int | None = None
    step_s: float = 0.0
    jitter: float = 0.0
    failures: float = 0.0
    points: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        times = {"alpha": self.alpha, "beta": self.beta, "step": self.step_s, "jitter": self.jitter}
        for name, value in times.items():
            if not 0 <= value < math.inf:
                raise UsageError(f"a service model with {name} = {value:g} cannot be. Give 0 or more.")
        if not 0 <= self.failures < 1:
            raise UsageError(f"{self.failures:g} of the batches cannot fail. Give a share of 0 or more, below 1.")
        if self.step_rows is not None and self.step_rows < 1:
            raise UsageError(f"a step at every {self.step_rows} rows cannot be. Give 1 row or more.")
        if not self.seconds(1) > 0:
            raise UsageError("a batch that takes no time cannot be. Give alpha or beta, or both.")

    def seconds(self, rows: int) -> float:
        """The mean time of a batch of so many rows."""
        steps = self.step_s * ((rows - 1) // self.step_rows) if self.step_rows else 0.0
        return steps + (self._between(rows) if self.points else self.alpha * rows + self.beta)

    def capacity(self, max_rows: int) -> float:
        """The most rows per second of one lane, over batches of up to so many rows.

        Between steps and points τ is a straight line, along which n / τ(n) only rises or only falls: the most is at an
        end of one.
        """
        ends = {1, max_rows, *(int(rows) for rows, _ in self.points)}
        if self.step_rows:
            ends.update((self.step_rows, max_rows // self.step_rows * self.step_rows))
            ends.update(rows // self.step_rows * self.step_rows for rows in tuple(ends))
        return (1 - self.failures) * max(rows / self.seconds(rows) for rows in ends if 1 <= rows <= max_rows)

    def draw(self, rows: int, dice: random.Random) -> float:
        """The time of one such batch."""
        seconds = self.seconds(rows)
        if not self.jitter:
            return seconds
        sigma = math.sqrt(math.log1p(self.jitter**2))
        return seconds * dice.lognormvariate(-sigma * sigma / 2, sigma)

    def fails(self, dice: random.Random) -> bool:
        """Whether one batch fails."""
        return self.failures > 0 and dice.random() < self.failures

    def _between(self, rows: float) -> float:
        """Beyond the last point each row costs what it costs there; below the first the first two go on, never below 0."""
        first, last = self.points[0], self.points[-1]
        if rows >= last[0] or len(self.points) == 1:
            return rows * last[1] / last[0]
        index = max(1, bisect.bisect_left(self.points, (rows, math.inf)))
        (low, low_s), (high, high_s) = self.points[index - 1], self.points[index]
        return max(0.0, low_s + (rows - low) * (high_s - low_s) / (high - low))
