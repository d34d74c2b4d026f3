"""A line of the final panel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class PanelRow:
    """A line of the panel. The tone says how it should look."""

    name: str
    text: str
    tone: Literal["plain", "strong", "command", "bad", "warning"] = "plain"
