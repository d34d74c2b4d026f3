"""How long to wait before a replica is started again: not at all after a first death, then ever longer.

One that comes up and dies soon may have met a bad request, or someone who kills it: seconds at most. One that does not
even come up lacks something, and loading a large model in vain costs everybody: half a minute in the end.
"""

from __future__ import annotations

FIRST_S = 0.5
MOST_S = 30.0  # of one that does not come up
MOST_UP_S = 4.0  # of one that does
WELL_S = 5.0  # one that has served for so long had a good start: its next death counts as a first


class Backoff:
    """Of one replica: exponential, told how long each attempt has served."""

    __slots__ = ("_short", "failed")

    def __init__(self) -> None:
        self._short = self.failed = 0  # in a row: short lives, attempts that did not come up

    def after(self, served_s: float) -> float:
        """Seconds until the next attempt. `served_s`: how long the one that ended had served, 0 if it never came up."""
        if served_s <= 0.0:
            self.failed += 1
            return _doubled(self.failed, MOST_S)
        self.failed = 0
        self._short = 0 if served_s >= WELL_S else self._short + 1
        return _doubled(self._short - 1, MOST_UP_S) if self._short > 1 else 0.0


def _doubled(times: int, most_s: float) -> float:
    return float(min(most_s, FIRST_S * 2 ** min(times - 1, 16)))
