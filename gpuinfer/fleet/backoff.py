"""How long to wait before a replica is started again: not at all after a first death, then ever longer."""

from __future__ import annotations

FIRST_S = 0.5
MOST_S = 30.0
WELL_S = 5.0  # one that has served for so long had a good start: its next death counts as a first


class Backoff:
    """Of one replica. Exponential, 0, 0.5, 1, 2 … 30 seconds; told how long the last attempt served."""

    __slots__ = ("failures",)

    def __init__(self) -> None:
        self.failures = 0  # in a row

    def after(self, served_s: float) -> float:
        """Seconds until the next attempt. `served_s`: how long the one that ended had served, 0 if it never came up."""
        self.failures = 1 if served_s >= WELL_S else self.failures + 1
        if self.failures == 1 and served_s > 0.0:
            return 0.0
        return float(min(MOST_S, FIRST_S * 2 ** min(self.failures - 1, 16)))
