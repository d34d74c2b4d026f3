"""Whether a replica lives, from its answers to probes. Pure: told of answers and of looks, it reads no clock.

Looks are counted, not seconds (as `runtime.pulse` does): a supervisor that was suspended, or found no core to run on,
has missed a single look, and accuses nobody.
"""

from __future__ import annotations

from typing import Literal

LOOK_S = 0.5  # from one look to the next
LATE_LOOKS = 6  # looks in a row without an answer: 3 s
STUCK_LOOKS = 2  # answers in a row that say "stuck", each of a heartbeat that is 3 s late by itself. One may come of a
# machine that was suspended as a whole

State = Literal["well", "late", "stuck"]


class Heartbeat:
    """What is known of one replica since it came up."""

    __slots__ = ("_answered", "_missed", "_stuck")

    def __init__(self) -> None:
        self._answered = True
        self._missed = self._stuck = 0

    @property
    def missed(self) -> int:
        """Looks in a row without an answer."""
        return self._missed

    def answer(self, *, stuck: bool) -> None:
        """A probe was answered; `stuck`: it says that its work does not go on."""
        self._answered = True
        self._stuck = self._stuck + 1 if stuck else 0

    def look(self) -> State:
        """Look once, `LOOK_S` after the last time: how it stands."""
        self._missed = 0 if self._answered else self._missed + 1
        self._answered = False
        if self._stuck >= STUCK_LOOKS:
            return "stuck"
        return "late" if self._missed >= LATE_LOOKS else "well"
