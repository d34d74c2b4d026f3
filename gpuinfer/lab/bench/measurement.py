"""One run of one variant and how fast it was, and how sure a handful of repeats lets one be: medians and ratios with 95
% intervals. The speed is that of the steady part of a run, without its start and its end. Speeds are positive and
their noise multiplies, so all arithmetic is on logarithms.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, linear_regression, median, stdev
from typing import Any

from gpuinfer.api import Roofline
from gpuinfer.errors import WorkError
from gpuinfer.runtime.run import RunPlan, RunUpdate, run
from gpuinfer.runtime.run_roofline import has_roofline, roofline_of
from gpuinfer.stats import Snapshot, counted_tokens, since, summarise, t_quantile

DOUBT = 0.025  # on each side


@dataclass(frozen=True, slots=True)
class Interval:
    """A median and where it may lie, with 95 %. Both ends are None when nothing is known of the noise."""

    median: float
    low: float | None = None
    high: float | None = None

    @property
    def known(self) -> bool:
        return self.low is not None

    def holds(self, value: float) -> bool:
        """Whether the data leave this value possible. Without an interval they leave everything possible."""
        return self.low is None or self.high is None or self.low <= value <= self.high

    @property
    def ends(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def interval(values: Sequence[float]) -> Interval:
    """The median of positive values and its 95 % interval; none for fewer than two, or where one is not positive.

    Raises `ValueError` when there are no values.
    """
    if not values:
        raise ValueError("there is no median of no values")
    middle = median(values)
    if len(values) < 2 or min(values) <= 0:
        return Interval(middle)
    return Interval(middle, *(_by_student(values) if len(values) < 6 else _by_order(values)))


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Ours ÷ theirs, pair by pair: what slowed both runs of a pair cancels out."""
    pairs = [(one, other) for one, other in zip(ours, theirs, strict=True) if other > 0]
    return interval([one / other for one, other in pairs]) if pairs else Interval(math.nan)


def ratio_of_turns(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Ours ÷ theirs of two to four positive values each, measured in turns A B B A: the ratio of their geometric means.

    Student's t of two samples with one variance, on the logarithms. Two pairs alone would leave one degree of freedom,
    and an interval that says nothing; a drift is in the means of both alike, and in the variance, so that it widens it.
    """
    logs = [[math.log(value) for value in values] for values in (ours, theirs)]
    freedom = sum(map(len, logs)) - 2
    variance = sum(sum((value - fmean(values)) ** 2 for value in values) for values in logs) / freedom
    reach = t_quantile(freedom) * math.sqrt(variance * sum(1 / len(values) for values in logs))
    middle = fmean(logs[0]) - fmean(logs[1])
    return Interval(math.exp(middle), math.exp(middle - reach), math.exp(middle + reach))


def _by_student(values: Sequence[float]) -> tuple[float, float]:
    logs = [math.log(value) for value in values]
    reach = t_quantile(len(logs) - 1) * stdev(logs) / math.sqrt(len(logs))
    # The median of so few lies within one standard deviation of their mean, and `reach` is more than that.
    return math.exp(fmean(logs) - reach), math.exp(fmean(logs) + reach)


def _by_order(values: Sequence[float]) -> tuple[float, float]:
    """The outermost pair of values but as many from each end as chance allows: half of them lie below the median."""
    ordered, n, below, left_out = sorted(values), len(values), 0.0, 0
    while below + math.comb(n, left_out) / 2**n <= DOUBT:
        below += math.comb(n, left_out) / 2**n
        left_out += 1
    return ordered[left_out - 1], ordered[n - left_out]


LATENCY = "latency_p95_s"
LATENCIES = {LATENCY: "p95 latency"}
KEEPS_UP = 0.99  # of the rows that the best answers: less is a load that grows behind


def is_latency(metric: str) -> bool:
    """Whether less of it is better, and it is in seconds."""
    return metric in LATENCIES


def goodness(metric: str, value: float) -> float:
    """Such that more is better, and ratios are those of the values; 0 for a value that says nothing."""
    if not is_latency(metric):
        return value
    return 1 / value if value > 0 else 0.0


STARTING = 0.2  # of the time, left out
LOOK_S = 0.1  # between two looks at the counters
STEADY = ("output_tokens", "evaluations", "simulations")  # what to count, first choice first
LOAD = ("rows",)  # the same, of a load
OFFERED, CLIENTS = "offered_rows_per_s", "clients"  # facts of a load: from outside, or of clients that wait
PER_S = ("simulations", "evaluations", "rows", "requests")
WHOLE = ("output_tokens_per_s", "games_per_min", *(f"{name}_per_s" for name in PER_S))  # of a run from start to end


class SpeedMeter:
    """Watches one run: when it has lasted `seconds`, and how fast it was. With None the run ends by itself.

    `starting` is the share of the time that is left out.
    """

    def __init__(self, seconds: float | None, starting: float = STARTING) -> None:
        self._seconds, self._starting = seconds, starting
        self._facts: Mapping[str, float] = {}
        self._looks: list[tuple[float, dict[str, float]]] = []
        self._first = self._last = Snapshot()  # of the time that counts

    @property
    def of_load(self) -> bool:
        """Whether requests came for their own sake, as from users, and not for some work that is to be done."""
        return OFFERED in self._facts or CLIENTS in self._facts

    def enough(self, update: RunUpdate) -> bool:
        self._facts = update.progress.facts or self._facts
        if self._seconds is None or update.elapsed_s <= 0 or update.progress.setup:
            return False
        if update.elapsed_s >= self._starting * self._seconds:
            rows, tokens = update.snapshot.rows, counted_tokens(update.snapshot)
            self._first = self._first if self._looks else update.snapshot
            self._last = update.snapshot
            self._looks.append(
                (update.elapsed_s, {"evaluations": rows, **update.progress.counts, **tokens, "rows": rows})
            )
        return update.elapsed_s >= self._seconds

    def rate(self, report: Mapping[str, Any]) -> tuple[str, float]:
        """Name and value of what the run is compared by.

        The slope of the least-squares line through the counter, or the mean of that same counter over the whole run
        where too little was seen of it. Which counter depends on the run as a whole alone. For a load from outside the
        latency of what was answered in that time.
        """
        if OFFERED in self._facts:
            seen = summarise(since(self._last, self._first).latency) or report["latency_s"]
            return LATENCY, float(seen.get("p95", 0.0))
        rates = report["throughput"]
        name = next((name for name in (LOAD if self.of_load else STEADY) if rates.get(f"{name}_per_s")), None)
        if name is None or (self._seconds is None and not self.of_load):
            return rate_to_the_end(report)
        return f"{name}_per_s", self._slope(name, report)

    def served(self, report: Mapping[str, Any]) -> float:
        """Rows per second that were answered."""
        return self._slope("rows", report) if report["throughput"].get("rows_per_s") else 0.0

    def _slope(self, name: str, report: Mapping[str, Any]) -> float:
        if len({seen.get(name, 0.0) for _, seen in self._looks}) <= 2:  # it has not moved twice: no speed
            return float(report["throughput"][f"{name}_per_s"])
        times, counts = [at for at, _ in self._looks], [seen.get(name, 0.0) for _, seen in self._looks]
        return linear_regression(times, counts).slope


def in_metric(metric: str, rate: tuple[str, float], report: Mapping[str, Any]) -> tuple[str, float]:
    """The rate, or that of the whole run where it is of another metric: 0 when the run has none of this one."""
    return rate if rate[0] == metric else (metric, report["throughput"].get(metric, 0.0))


def rate_to_the_end(report: Mapping[str, Any]) -> tuple[str, float]:
    """The speed of a run from its start to its end. An empty name when it did nothing."""
    rates = report["throughput"]
    name = next((name for name in (*WHOLE, *rates) if rates.get(name)), "")
    return name, rates.get(name, 0.0)


log = logging.getLogger(__name__)


class Rooflines:
    """One for each model, device and number format. Switched off, it measures nothing."""

    def __init__(self, wanted: bool = True) -> None:
        self._wanted = wanted
        self._known: dict[str, Roofline | None] = {}

    def missing(self, plan: RunPlan) -> bool:
        """Whether asking for this plan's would have to measure."""
        return self._wanted and has_roofline(plan.backend) and _key(plan) not in self._known

    def of(self, plan: RunPlan) -> Roofline | bool:
        """What `run` takes: the roofline, or False where there is none. Raises `UsageError` for an impossible model."""
        if self.missing(plan):
            try:
                self._known[_key(plan)] = roofline_of(plan.backend)
            except WorkError as error:
                log.warning("the roofline could not be measured, and the runs go on without it: %s", error)
                self._known[_key(plan)] = None
        return self._known.get(_key(plan)) or False


def _key(plan: RunPlan) -> str:
    """Models hold mappings, which cannot be keys; what they print can. The seed only draws the weights."""
    setup, compute = plan.backend.setup, plan.backend.compute
    return repr((setup.model, tuple(setup.devices), setup.dtype, setup.deterministic, compute))


@dataclass(frozen=True)
class Variant:
    """A way to do the work: its name among the others, and how it is built anew for each run."""

    name: str
    build: Callable[[int], RunPlan]  # from a seed
    settings: Mapping[str, Any]  # those that tell it from the others, such as {"backend": "central", "workers": "2"}
    command: str  # runs it by itself
    flags: Mapping[str, Any] = field(default_factory=dict)  # that command's


Watch = Callable[[RunUpdate], None]


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run that has ended, and what it is compared by: metric and value."""

    report: dict[str, Any]
    rate: tuple[str, float]
    served: float = 0.0  # rows per second that were answered
    of_load: bool = False  # as `Meter.of_load`
    max_rows: int | None = None  # of the backend's limits, which are final now

    def counted(self) -> tuple[str, float]:
        """Metric and value. Raises `WorkError` when there was nothing to count."""
        if self.rate[1] <= 0:
            raise WorkError(
                f"nothing was answered within {self.report['wall_s']:.1f} s. "
                "Give it more time (bench --seconds, tune --budget)."
            )
        return self.rate


def measure_run(
    variant: Variant,
    seed: int,
    seconds: float | None,
    rooflines: Rooflines,
    watch: Watch = lambda update: None,
) -> MeasuredRun:
    """Run a variant once, for `seconds` or to its end. Raises whatever keeps it from running."""
    plan, meter = variant.build(seed), SpeedMeter(seconds)
    report = run(
        plan.workload,
        plan.backend,
        plan.strategy,
        settings=plan.settings,
        roofline=rooflines.of(plan),
        on_update=watch,
        until=meter.enough,
        update_s=LOOK_S,
        command=variant.command,
    )
    limits = getattr(plan.backend, "limits", None)  # a backend that names none before it starts may not have started
    return MeasuredRun(
        report, meter.rate(report), meter.served(report), meter.of_load, limits.max_rows if limits else None
    )


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__
