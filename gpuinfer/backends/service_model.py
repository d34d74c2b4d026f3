"""How long a batch takes, as a model: by hand, or fitted to what was measured. For the simulator and a stand-in."""

from __future__ import annotations

import bisect
import math
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from gpuinfer.errors import UsageError

BEYOND = 64  # times the largest batch that was measured: up to there a fitted model goes on in a straight line
NOISE = 1e-4  # a smaller jitter is that of the numbers themselves
LEAST_S, MOST_S = 1e-9, 1e6  # of a batch of one row, and of each of its parts: a clock can still tell them apart
MOST_ROWS = 10**9  # in a batch
MOST_JITTER = 10.0


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """τ(n) = α·n + β, with a step of `step_s` for each full `step_rows` rows beyond the first, times a jitter.

    With `points`, (rows, seconds) both rising, the straight lines between them take the place of α and β. `jitter` is
    the standard deviation of a log-normal factor of mean 1; `failures` the share of batches that fail. `turn_s` and
    `turn_request_s` are what the engine itself needs for a batch, and for each of its requests.
    Raises `UsageError` for a model that cannot be.
    """

    alpha: float = 0.0  # seconds a row
    beta: float = 0.0  # seconds a batch
    step_rows: int | None = None
    step_s: float = 0.0
    jitter: float = 0.0
    failures: float = 0.0
    turn_s: float = 0.0
    turn_request_s: float = 0.0
    points: Sequence[tuple[float, float]] = ()

    def __post_init__(self) -> None:
        times = {"alpha": self.alpha, "beta": self.beta, "step": self.step_s, "jitter": self.jitter}
        times |= {"turn": self.turn_s, "turn_request": self.turn_request_s}
        for name, value in times.items():
            most = MOST_JITTER if name == "jitter" else MOST_S
            if not 0 <= value <= most:
                raise UsageError(
                    f"a service model with {name} = {value:g} cannot be. Give 0 or more, {most:g} at most."
                )
        if not 0 <= self.failures < 1:
            raise UsageError(f"{self.failures:g} of the batches cannot fail. Give a share of 0 or more, below 1.")
        if self.step_rows is not None and self.step_rows < 1:
            raise UsageError(f"a step at every {self.step_rows} rows cannot be. Give 1 row or more.")
        if not self.seconds(1) >= LEAST_S:
            raise UsageError("a batch that takes no time cannot be. Give alpha or beta, or both.")

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> ServiceModel:
        """Fitted to the batch times that a report holds (`batches.seconds`). Raises `UsageError` when it holds none."""
        try:
            times = {float(rows): float(seconds) for rows, seconds in report["batches"]["seconds"].items()}
            known = [one for one in times.items() if _can_be(*one)]
        except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
            known = []
        if not known:
            raise UsageError("this report holds no batch times. Give one of a run that had batches, or a trace.")
        return cls(points=_rising([(rows, seconds, 1.0) for rows, seconds in known]))

    @classmethod
    def of_batches(cls, batches: Iterable[tuple[int, float]], failures: float = 0.0) -> ServiceModel:
        """Fitted to the rows and seconds of batches that ran: the mean of those of about one size, four sizes for each
        doubling, and as the jitter how far each is from it. Raises `UsageError` when there is none.
        """
        ran = [one for one in batches if _can_be(*one)]
        if not ran:
            raise UsageError("there is no batch from which to learn service times. Record a run that has some.")
        alike: dict[int, list[tuple[int, float]]] = {}
        for rows, seconds in ran:
            alike.setdefault(round(4 * math.log2(rows)), []).append((rows, seconds))
        means = [(fmean(rows for rows, _ in some), fmean(s for _, s in some), len(some)) for some in alike.values()]
        model = cls(points=_rising(means))
        spread = math.sqrt(fmean((seconds / model.seconds(rows) - 1) ** 2 for rows, seconds in ran))
        return replace(model, jitter=min(spread, MOST_JITTER) if spread > NOISE else 0.0, failures=failures)

    def seconds(self, rows: int) -> float:
        """The mean time of a batch of so many rows."""
        steps = self.step_s * ((rows - 1) // self.step_rows) if self.step_rows else 0.0
        return steps + (self._between(rows) if self.points else self.alpha * rows + self.beta)

    def capacity(self, max_rows: int) -> float:
        """The most rows per second of one lane, over batches of up to so many rows of one request.

        Between steps and points τ is a straight line, along which n / τ(n) only rises or only falls: the most is at an
        end of one.
        """
        ends = {1, max_rows, *(int(rows) for rows, _ in self.points)}
        if self.step_rows:
            ends.update((self.step_rows, max_rows // self.step_rows * self.step_rows))
            ends.update(rows // self.step_rows * self.step_rows for rows in tuple(ends))
        turn = self.turn(1)
        return (1 - self.failures) * max(rows / (self.seconds(rows) + turn) for rows in ends if 1 <= rows <= max_rows)

    def draw(self, rows: int, dice: random.Random) -> float:
        """The time of one such batch."""
        seconds = self.seconds(rows)
        if not self.jitter:
            return seconds
        sigma = math.sqrt(math.log1p(self.jitter**2))
        return seconds * dice.lognormvariate(-sigma * sigma / 2, sigma)

    def turn(self, requests: int) -> float:
        """The engine's own time for a batch of so many requests: they are answered so much later."""
        return self.turn_s + self.turn_request_s * requests

    def fails(self, dice: random.Random) -> bool:
        """Whether one batch fails."""
        return self.failures > 0 and dice.random() < self.failures

    def _between(self, rows: float) -> float:
        """Beyond the last point each row costs what it costs there; below the first the line goes on, down to 0."""
        last = self.points[-1]
        if rows >= last[0] or len(self.points) == 1:
            return rows * last[1] / last[0]
        index = max(1, bisect.bisect_left(self.points, (rows, math.inf)))
        (low, low_s), (high, high_s) = self.points[index - 1], self.points[index]
        return max(0.0, low_s + (rows - low) * (high_s - low_s) / (high - low))


def _can_be(rows: float, seconds: float) -> bool:
    """Whether a batch may have been of so many rows, and have taken so long."""
    return 1 <= rows <= MOST_ROWS and LEAST_S <= seconds <= MOST_S


def _rising(means: Iterable[tuple[float, float, float]]) -> list[tuple[float, float]]:
    """Points (rows, seconds) from (rows, seconds, weight), those that fall pooled with those before them until none
    does (pool adjacent violators: Ayer et al., "An empirical distribution function for sampling with incomplete
    information", 1955). At both ends what was not measured follows the line of least squares through what was; but no
    batch takes less than its share of a larger one.
    """
    means = sorted(means)
    pools: list[list[tuple[float, float, float]]] = []
    for mean in means:
        pools.append([mean])
        while len(pools) > 1 and _mean_s(pools[-2]) >= _mean_s(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    points = [(rows, _mean_s(pool)) for pool in pools for rows in sorted({pool[0][0], pool[-1][0]})]
    total = sum(weight for *_, weight in means)  # seconds a row, by weighted least squares; 0 for one size alone
    rows_mean = sum(rows * weight for rows, _, weight in means) / total
    spread = sum(weight * (rows - rows_mean) ** 2 for rows, _, weight in means)
    slope = max(0.0, sum(weight * (rows - rows_mean) * s for rows, s, weight in means) / spread) if spread else 0.0
    (first, first_s), (last_rows, last_s) = points[0], points[-1]
    if first > 1:
        points.insert(0, (1.0, max(first_s / first, first_s - (first - 1) * slope)))
    if len(means) > 1:
        points.append((BEYOND * last_rows, last_s + (BEYOND - 1) * min(slope * last_rows, last_s)))
    return points


def _mean_s(pool: Sequence[tuple[float, float, float]]) -> float:
    return sum(seconds * weight for _, seconds, weight in pool) / sum(weight for *_, weight in pool)
