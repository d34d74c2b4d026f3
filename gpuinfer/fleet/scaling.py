"""How many replicas there should be. Pure: told the time and the load, it reads no clock and starts nothing.

The load is what waits or is being answered in the whole fleet, in requests. So many replicas are wanted that none has
more than `target` of it. More are wanted at once, when that was so in a few looks; fewer only after a delay in which at
no look more were needed, and with room to spare, so that a load near a border does not go to and fro.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

LOOK_S = 1.0  # between two looks
UP_LOOKS = 3  # in a row over target, before more are started
SLACK = 0.8  # of the target: what fewer replicas would have each, for them to be enough


@dataclass(frozen=True, slots=True)
class Scaling:
    """The limits. `least` = `most`: no scaling."""

    least: int
    most: int
    target: float = 16.0  # requests that wait or are being answered, per replica
    down_delay_s: float = 60.0

    @property
    def fixed(self) -> bool:
        return self.least == self.most


@dataclass(frozen=True, slots=True)
class Decision:
    """From how many replicas to how many, and why, for people."""

    at: float
    before: int
    after: int
    reason: str

    def told(self, now: float) -> dict[str, Any]:
        """What `/stats` says of it."""
        return {"ago_s": now - self.at, "before": self.before, "after": self.after, "reason": self.reason}


class Scaler:
    """Decides, look by look. `now` never goes back."""

    def __init__(self, scaling: Scaling) -> None:
        self._limits = scaling
        self._over = 0  # looks in a row
        self._roomy_since: float | None = None  # since when fewer would have been enough at every look
        self._roomy_load = 0.0  # the most load since then

    def look(self, now: float, load: float, replicas: int) -> Decision | None:
        """What to change; None: nothing. `replicas`: all that are up, or are being started."""
        limits = self._limits
        if not limits.least <= replicas <= limits.most:
            return self._within_limits(now, replicas)
        needed = self._needed(load, limits.target)
        self._over = self._over + 1 if needed > replicas else 0
        if self._over >= UP_LOOKS:
            return self._up(now, load, replicas, needed)
        return self._down(now, load, replicas)

    def _within_limits(self, now: float, replicas: int) -> Decision:
        self._forget()
        after = min(max(replicas, self._limits.least), self._limits.most)
        word = "fewer than the least" if replicas < after else "more than the most"
        return Decision(now, replicas, after, f"{replicas} replicas are {word} allowed, {after}")

    def _up(self, now: float, load: float, replicas: int, needed: int) -> Decision:
        self._forget()
        each = load / max(1, replicas)
        reason = f"{each:.1f} requests per replica, over the target of {self._limits.target:g} in {UP_LOOKS} looks"
        return Decision(now, replicas, needed, reason)

    def _down(self, now: float, load: float, replicas: int) -> Decision | None:
        if self._needed(load, SLACK * self._limits.target) >= replicas:
            self._roomy_since = None
            return None
        if self._roomy_since is None:
            self._roomy_since, self._roomy_load = now, load
        self._roomy_load = max(self._roomy_load, load)
        if now - self._roomy_since < self._limits.down_delay_s:
            return None
        most = self._roomy_load
        self._forget()
        delay = f"{self._limits.down_delay_s:g} s"
        return Decision(now, replicas, replicas - 1, f"at most {most:g} requests under way for {delay}: fewer will do")

    def _needed(self, load: float, each: float) -> int:
        """Replicas for this load, within the limits."""
        return min(max(math.ceil(load / each), self._limits.least), self._limits.most)

    def _forget(self) -> None:
        self._over, self._roomy_since = 0, None
