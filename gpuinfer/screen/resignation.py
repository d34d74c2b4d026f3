"""What people see of resignation: in the final panel, and while games are played."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpuinfer.report.resignation import in_rate, in_share, of_resignation
from gpuinfer.screen.rows import PanelRow


def rows(found: Mapping[str, Any] | None) -> Iterator[PanelRow]:
    """Of the report's `resignation`; none where there is none."""
    if not found:
        return
    yield PanelRow("resigned", f"{in_share(found)}\n{in_rate(found)}")
    if found["advice"]:
        yield PanelRow("", found["advice"], "warning")


def live(facts: Mapping[str, float]) -> list[str]:
    """The share of games that were resigned; nothing where nobody may resign."""
    found = of_resignation(facts)
    free = found["games"] - found["checked"] if found else 0
    return [f"{found['resigned'] / free:.0%} resigned"] if found and free else []
