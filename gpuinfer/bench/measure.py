"""One run of one variant, and how fast it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpuinfer.bench.rate import LOOK_S, Meter
from gpuinfer.bench.rooflines import Rooflines
from gpuinfer.bench.variant import Variant
from gpuinfer.errors import WorkError
from gpuinfer.run import Update, run

Watch = Callable[[Update], None]


@dataclass(frozen=True, slots=True)
class Run:
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
) -> Run:
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
    return Run(report, meter.rate(report), meter.served(report), meter.of_load, limits.max_rows if limits else None)


def reason(error: Exception) -> str:
    """What went wrong, in one line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return " ".join(lines[:3]) or type(error).__name__
