"""One run of one variant, and how fast it was.

The honest speed of a run that is stopped while it is in full swing: without its start, and without an end.

A run of a fixed amount of work is slow at both ends: batches are small while the last rows trickle in. A run that only
lasts for a time has no such end, and its start is left out. What is counted are evaluations where there are any: how
many of them a game takes differs little between its moves, while a finished game is a rare and sudden event. Of a load
rows are counted; one that comes from outside is judged by how long its answers took (`metric`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import linear_regression
from typing import TYPE_CHECKING, Any

from gpuinfer.api import Roofline
from gpuinfer.bench.interval import LATENCY
from gpuinfer.errors import WorkError
from gpuinfer.runtime.measuring import has_roofline, roofline_of
from gpuinfer.runtime.run import RunPlan, Update, run
from gpuinfer.stats import Snapshot, since, summarise, tokens_of

if TYPE_CHECKING:
    from gpuinfer.runtime.run import Update

STARTING = 0.2  # of the time, left out
LOOK_S = 0.1  # between two looks at the counters
STEADY = ("output_tokens", "evaluations", "simulations")  # what to count, first choice first
LOAD = ("rows",)  # the same, of a load
OFFERED, CLIENTS = "offered_rows_per_s", "clients"  # facts of a load: from outside, or of clients that wait
PER_S = ("simulations", "evaluations", "rows", "requests")
WHOLE = ("output_tokens_per_s", "games_per_min", *(f"{name}_per_s" for name in PER_S))  # of a run from start to end


class Meter:
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

    def enough(self, update: Update) -> bool:
        self._facts = update.progress.facts or self._facts
        if self._seconds is None or update.elapsed_s <= 0 or update.progress.setup:
            return False
        if update.elapsed_s >= self._starting * self._seconds:
            rows, tokens = update.snapshot.rows, tokens_of(update.snapshot)
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
        return (LATENCY, self._latency(report)) if OFFERED in self._facts else self._speed(report)

    def served(self, report: Mapping[str, Any]) -> float:
        """Rows per second that were answered."""
        return self._slope("rows", report) if report["throughput"].get("rows_per_s") else 0.0

    def _latency(self, report: Mapping[str, Any]) -> float:
        seen = summarise(since(self._last, self._first).latency) or report["latency_s"]
        return float(seen.get("p95", 0.0))

    def _speed(self, report: Mapping[str, Any]) -> tuple[str, float]:
        rates = report["throughput"]
        name = next((name for name in (LOAD if self.of_load else STEADY) if rates.get(f"{name}_per_s")), None)
        if name is None or (self._seconds is None and not self.of_load):
            return whole(report)
        return f"{name}_per_s", self._slope(name, report)

    def _slope(self, name: str, report: Mapping[str, Any]) -> float:
        if not self._grown(name):
            return float(report["throughput"][f"{name}_per_s"])
        times, counts = [at for at, _ in self._looks], [seen.get(name, 0.0) for _, seen in self._looks]
        return linear_regression(times, counts).slope

    def _grown(self, name: str) -> bool:
        """Whether this counter moved at least twice: less than that has no speed."""
        return len({seen.get(name, 0.0) for _, seen in self._looks}) > 2


def in_metric(metric: str, rate: tuple[str, float], report: Mapping[str, Any]) -> tuple[str, float]:
    """The rate, or that of the whole run where it is of another metric: 0 when the run has none of this one."""
    return rate if rate[0] == metric else (metric, report["throughput"].get(metric, 0.0))


def whole(report: Mapping[str, Any]) -> tuple[str, float]:
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


Watch = Callable[[Update], None]


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


def measure(
    variant: Variant,
    seed: int,
    seconds: float | None,
    rooflines: Rooflines,
    watch: Watch = lambda update: None,
) -> MeasuredRun:
    """Run a variant once, for `seconds` or to its end. Raises whatever keeps it from running."""
    plan, meter = variant.build(seed), Meter(seconds)
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
