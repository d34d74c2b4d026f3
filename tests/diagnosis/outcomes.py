"""What came of one seed of one cause, and the tables over many."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from plants import PLANTS
from real import REAL

STRONG = 0.20  # of the throughput, lost to the plant
CLOSE = 0.10  # of what was measured
NOTHING, NOTHING_REAL = "nothing", "nothing, in real commands"
NO_ALARM = "nothing to mend"


@dataclass(frozen=True)
class Outcome:
    """One seed of one plant: the verdicts, and rows a second. Evidence is kept plain, as `keeping` has it."""

    name: str
    seed: int
    told: Mapping[str, Any]
    rate: float
    base: Mapping[str, Any]  # the verdict without the plant
    without: float  # the plant
    after: float = 0.0  # what was advised; 0 where nothing was
    evidence: Mapping[str, Any] = field(default_factory=dict)
    base_evidence: Mapping[str, Any] = field(default_factory=dict)
    machine: str = ""

    @property
    def right(self) -> bool:
        """The class, and the station where one is asked for."""
        wanted = expected(self.name)
        return bool(said(self.told, wanted[1] is not None) == (wanted if wanted[1] else (wanted[0], None)))

    @property
    def strength(self) -> float:
        return 1 - self.rate / self.without

    @property
    def counts(self) -> bool:
        """Whether the plant cost enough; slow arrivals and long prompts cost nothing: they are what is asked for."""
        return self.strength >= STRONG

    @property
    def ratio(self) -> float | None:
        """Predicted ÷ measured throughput after the advised change."""
        expected = self.told["gain"]["expected"]
        return self.rate * expected / self.after if self.after and expected else None


def expected(name: str) -> tuple[str, str | None]:
    return (REAL[name].expected, REAL[name].station) if name in REAL else (PLANTS[name].expected, None)


def said(told: Mapping[str, Any], with_station: bool) -> tuple[str, str | None]:
    return told["class"], told["station"] if with_station else None


def strong(outcomes: Sequence[Outcome], name: str) -> list[Outcome]:
    """The runs of one plant in which it cost enough to be counted."""
    return [one for one in outcomes if one.name == name and one.counts]


def healthy_verdicts(outcomes: Sequence[Outcome]) -> list[Mapping[str, Any]]:
    """Of the sleeping runs that nothing was planted into."""
    return [one.base for one in outcomes if one.name in PLANTS and PLANTS[one.name].base_is_healthy]


def table(outcomes: Sequence[Outcome]) -> str:
    """The confusion matrix and the predictions, in Markdown, for each kind of machine."""
    parts = []
    for machine in dict.fromkeys(one.machine for one in outcomes):
        here = [one for one in outcomes if one.machine == machine]
        parts += [f"On {machine}:" if machine else "", "", *matrix(here), "", *predictions(here), ""]
    return "\n".join(parts)


def matrix(outcomes: Sequence[Outcome]) -> list[str]:
    """A row for what was planted, a column for what was said. Of runs that nothing was planted into: any alarm."""
    rows = {name: Counter(_column(one) for one in strong(outcomes, name)) for name in (*PLANTS, *REAL)}
    rows[NOTHING] = Counter(_alarm(told) for told in healthy_verdicts(outcomes))
    rows[NOTHING_REAL] = Counter(_alarm(one.base) for one in outcomes if one.name in REAL)
    rows = {name: counts for name, counts in rows.items() if counts}
    seen = dict.fromkeys(kind for row in rows.values() for kind in row)
    columns = [*(kind for kind in seen if kind != NO_ALARM), NO_ALARM]
    lines = [_row("planted ↓ said →", "runs", *columns), _row("---", *["---:"] * (len(columns) + 1))]
    for name, counts in rows.items():
        lines.append(_row(name, sum(counts.values()), *(counts.get(kind) or "·" for kind in columns)))
    return lines


def _column(one: Outcome) -> str:
    kind, station = said(one.told, expected(one.name)[1] is not None)
    return f"{kind} ({station})" if station else kind


def _alarm(told: Mapping[str, Any]) -> str:
    return NO_ALARM if told["healthy"] else str(told["class"])


def predictions(outcomes: Sequence[Outcome]) -> list[str]:
    """How near the throughput after the advised change came to what had been predicted."""
    lines = [_row("planted", "predicted ÷ measured, after the advised change"), _row("---", "---")]
    for name in (*PLANTS, *REAL):
        counted = strong(outcomes, name)
        if counted:
            lines.append(_row(name, _spread(sorted(one.ratio for one in counted if one.ratio is not None))))
    ratios = sorted(one.ratio for one in outcomes if one.counts and one.ratio is not None)
    return [*lines, _row("all", _spread(ratios))]


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _spread(ratios: Sequence[float]) -> str:
    if not ratios:
        return "–"
    close = sum(abs(ratio - 1) <= CLOSE for ratio in ratios)
    return f"median {statistics.median(ratios):.2f}, {close} of {len(ratios)} within {CLOSE:.0%}"
