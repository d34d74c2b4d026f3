"""What the steps of a masked diffusion model came to: useful tokens a forward, and what was done in vain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

COUNTS = ("rows", "tokens", "output_tokens", "positions", "committed", "idle")
"""Of a backend's `steps`, what is needed for it."""


@dataclass(frozen=True, slots=True)
class Unmasked:
    """Totals over steps. A forward is one row in one step: a step of 16 rows is 16 of them."""

    forwards: float
    idle: float  # forwards that committed nothing
    positions: float  # of their canvases, prompts and what guidance takes besides included
    computed: float  # of these, those that went through the model: the others' keys and values were kept
    committed: float  # masks that became tokens
    useful: float  # tokens of answers: nothing of a prompt, nothing after the end of an answer, no mask

    @classmethod
    def of(cls, steps: Mapping[str, float] | None) -> Unmasked | None:
        """From the `steps` that a backend with slots tells; None where no canvas was in one."""
        if not steps or not steps.get("positions"):
            return None
        rows, computed, useful, positions, committed, idle = (float(steps.get(name, 0)) for name in COUNTS)
        return cls(rows, idle, positions, computed, committed, useful)

    @property
    def tokens_per_forward(self) -> float:
        """Useful ones."""
        return self.useful / self.forwards if self.forwards else 0.0

    @property
    def idle_share(self) -> float:
        """Of the forwards."""
        return self.idle / self.forwards if self.forwards else 0.0

    @property
    def computed_share(self) -> float:
        """Of all positions, those that were computed anew."""
        return self.computed / self.positions if self.positions else 0.0

    def plain(self) -> dict[str, float]:
        """As reports and `/stats` have it."""
        return {
            "forwards": self.forwards,
            "idle_forwards": self.idle,
            "committed_tokens": self.committed,
            "useful_tokens": self.useful,
            "positions": self.positions,
            "computed_positions": self.computed,
            "tokens_per_forward": self.tokens_per_forward,
            "idle_share": self.idle_share,
            "computed_share": self.computed_share,
        }
