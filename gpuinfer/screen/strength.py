"""What people see of games against an opponent: in the final panel, and while they are played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuinfer.report.strength import in_elo, in_score, of_strength
from gpuinfer.screen.rows import PanelRow
from gpuinfer.units import whole


def rows(found: Mapping[str, Any] | None) -> Iterator[PanelRow]:
    """Of the report's `strength`; none where there is none."""
    if found:
        counts = ", ".join(f"{whole(found[name])} {name}" for name in ("wins", "draws", "losses"))
        yield PanelRow("strength", f"{in_elo(found)}\n{in_score(found)}: {counts}", "strong")


def live(facts: Mapping[str, float]) -> list[str]:
    """How the games stand, while they are played; nothing where there is no opponent."""
    return [in_elo(found)] if (found := of_strength(facts)) else []
