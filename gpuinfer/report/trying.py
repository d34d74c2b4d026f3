"""An advice that was tried: what was measured of it, and what is left of the verdict's advice then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpuinfer.config.change import Change

# Options that change how the same work is done, so that its speed says all: not how much there is of it, nor what.
QUICK = {
    *(
        "dtype",
        "workers",
        "games_in_flight",
        "batch_size",
        "max_rows",
        "max_wait",
        "slots",
        "step_tokens",
        "chunk_rows",
    ),
    *("threads", "in_flight", "forwards"),
}
UNCLEAR = 1.15  # times as fast: where as much is left possible, an interval around 1 does not say that nothing is won


@dataclass(frozen=True, slots=True)
class Trial:
    """How many times as fast the change was than the setting in force, both having run in turns."""

    measured: float
    low: float  # of the 95 % interval
    high: float
    seconds: float  # of a turn
    turns: int  # of both
    command: str  # that was tried

    @property
    def faster(self) -> bool:
        return self.low > 1

    @property
    def unclear(self) -> bool:
        return self.low <= 1 and self.high > UNCLEAR


def to_try(report: Mapping[str, Any]) -> Change | None:
    """The change that a finished run's advice speaks of, where trying it for some seconds says whether it helps."""
    change = report["bottleneck"].get("change")
    from_outside = "arrival" in report["bottleneck"]["bounds"]  # that load is answered as fast as it comes
    if report["status"] != "done" or change is None or change["name"] not in QUICK or from_outside:
        return None
    return Change(**change)


def after(bottleneck: Mapping[str, Any], trial: Trial) -> dict[str, Any]:
    """The report's `bottleneck` once its advice was tried: what has brought nothing is no advice any more."""
    told = {**bottleneck, "trial": asdict(trial), "not_tried": None}
    if trial.faster or trial.unclear:
        return told
    words = " ".join(Change(**bottleneck["change"]).words)
    found = "no faster" if trial.high >= 1 else f"slower, {trial.measured:.2f} times as fast"
    advice = f"Tried {words}: {found} ({trial.low:.2f} to {trial.high:.2f}). Nothing simple to change."
    return {**told, "advice": advice, "change": None, "command": None}
