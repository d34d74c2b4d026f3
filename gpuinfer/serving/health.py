"""Whether this replica is alive, ready, busy or stuck.

Busy is healthy. Stuck is one that has work, and whose engine or generator has moved nothing for too long: its port may
answer all the while. Looks are counted, not seconds, so that a process that was suspended does not call itself stuck.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

LOOK_S = 0.25
STUCK_S = 3.0
LONGEST = 4.0  # times the longest batch or step so far: one that is slow is not one that hangs
COMPUTING = 10.0  # times as long for a process that has kept half a core busy meanwhile: a large step, not a deadlock
FIRST_S = 60.0  # until anything has been answered: kernels are compiled, memory is touched for the first time

Status = Literal["ready", "starting", "draining", "stuck"]


class Pulse(Protocol):
    """What there is to see of an engine at work."""

    @property
    def moved(self) -> int: ...
    @property
    def longest_s(self) -> float: ...
    @property
    def waiting_rows(self) -> int: ...
    @property
    def serving(self) -> bool: ...
    @property
    def lost(self) -> bool: ...


@dataclass(slots=True)
class Health:
    """One replica's. `in_flight` is counted by whoever takes requests, the rest is looked at."""

    pulse: Pulse
    model: str
    kind: str
    phase: Literal["starting", "ready", "draining"] = "starting"
    in_flight: int = 0  # requests that wait for their answers
    dead: bool = False  # the backend is gone: nothing will be answered any more
    cpu_s: Callable[[], float] = time.process_time
    _still: int = 0  # looks since something moved, with work there
    _moved: int = -1
    _spent_s: float = 0.0  # of processor time, when it moved

    def look_once(self) -> None:
        moved = self.pulse.moved
        still = moved == self._moved and self.pulse.serving and self.phase != "starting"
        self._moved, self._still = moved, self._still + 1 if still else 0
        self.dead = self.dead or self.pulse.lost
        if not still:
            self._spent_s = self.cpu_s()

    @property
    def heartbeat_age_s(self) -> float:
        """Since something moved; 0 with nothing to do."""
        return self._still * LOOK_S

    @property
    def stuck(self) -> bool:
        return self.dead or self.heartbeat_age_s > self._limit_s

    @property
    def _limit_s(self) -> float:
        longest_s = self.pulse.longest_s
        limit_s = max(STUCK_S, LONGEST * longest_s) if longest_s else FIRST_S
        computing = self.cpu_s() - self._spent_s > 0.5 * self.heartbeat_age_s
        return COMPUTING * limit_s if computing else limit_s

    @property
    def status(self) -> Status:
        return "stuck" if self.stuck else self.phase

    @property
    def code(self) -> int:
        """200 or 503."""
        return 200 if self.status == "ready" else 503

    def told(self) -> dict[str, Any]:
        """What `GET /health` answers."""
        return {
            "server": "gpuinfer",
            "status": self.status,
            "alive": not self.dead,
            "ready": self.status == "ready",
            "busy": self.in_flight > 0,
            "stuck": self.stuck,
            "heartbeat_age_s": round(self.heartbeat_age_s, 3),
            "in_flight": self.in_flight,
            "waiting_rows": self.pulse.waiting_rows,
            "model": self.model,
            "kind": self.kind,
        }


async def look(at: Sequence[Health], on_look: Callable[[], None]) -> None:
    """Look at all of them again and again, until it is cancelled. `on_look` is called each time."""
    with contextlib.suppress(asyncio.CancelledError):
        while True:
            for one in at:
                one.look_once()
            on_look()
            await asyncio.sleep(LOOK_S)
