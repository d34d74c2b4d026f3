"""Whether this replica is alive, ready, busy or stuck, and its counters as `GET /stats` answers them.

Busy is healthy. A replica is stuck when it has work and its engine has made no progress for too long, though its port
may still answer. Looks are counted, not seconds, so that a suspended process does not call itself stuck.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from gpuinfer.report import report, report_sections
from gpuinfer.stats import ERRORS, Snapshot, counted_tokens, since, summarise

if TYPE_CHECKING:
    from gpuinfer.runtime.session import OwnPulse

LOOK_S = 0.25
STUCK_S = 3.0
LONGEST = 4.0  # times the longest batch or step so far: one that is slow is not one that hangs
COMPUTING = 10.0  # times as long for a process that has kept half a core busy meanwhile: a large step, not a deadlock
FIRST_S = 60.0  # until anything has been answered: kernels are compiled, memory is touched for the first time

Status = Literal["ready", "starting", "draining", "stuck"]


@dataclass(slots=True)
class ReplicaHealth:
    """One model's health. The routes count `in_flight`; `look_once` checks the rest, four times a second."""

    pulse: OwnPulse
    model: str
    kind: str
    phase: Literal["starting", "ready", "draining"] = "starting"
    in_flight: int = 0  # requests under way
    dead: bool = False  # the backend is gone
    cpu_s: Callable[[], float] = time.process_time
    _still: int = 0  # checks without progress, with work there
    _moved: int = -1
    _spent_s: float = 0.0  # processor time at the last progress

    def look_once(self) -> None:
        moved = self.pulse.moved
        still = moved == self._moved and self.pulse.serving and self.phase != "starting"
        self._moved, self._still = moved, self._still + 1 if still else 0
        self.dead = self.dead or self.pulse.lost
        if not still:
            self._spent_s = self.cpu_s()

    @property
    def heartbeat_age_s(self) -> float:
        """Seconds without progress; 0 with nothing to do."""
        return self._still * LOOK_S

    @property
    def stuck(self) -> bool:
        longest_s = self.pulse.longest_s
        limit_s = max(STUCK_S, LONGEST * longest_s) if longest_s else FIRST_S
        computing = self.cpu_s() - self._spent_s > 0.5 * self.heartbeat_age_s
        return self.dead or self.heartbeat_age_s > (COMPUTING * limit_s if computing else limit_s)

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
            "room": self.pulse.room,
            "model": self.model,
            "kind": self.kind,
        }


@dataclass(slots=True)
class RecentCounters:
    """The counters of the last `kept_s` seconds, from snapshots that are `every_s` apart or more."""

    every_s: float = 1.0
    kept_s: float = 10.0
    began: float = field(default_factory=time.monotonic)
    _seen: deque[tuple[float, Snapshot]] = field(default_factory=deque)

    def due(self, now: float) -> bool:
        return not self._seen or now - self._seen[-1][0] >= self.every_s

    def take(self, now: float, snapshot: Snapshot) -> None:
        self._seen.append((now, snapshot))
        while len(self._seen) > 2 and now - self._seen[0][0] > self.kept_s:
            self._seen.popleft()

    def window(self) -> tuple[float, Snapshot]:
        """Seconds, and what was counted in them; both empty before there are two snapshots."""
        if len(self._seen) < 2:
            return 0.0, Snapshot()
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        return last - first, since(now, before)


def counter_stats(snapshot: Snapshot, seconds: float, recent: Snapshot, wall_s: float) -> dict[str, Any]:
    """The counters in `GET /stats` of a replica and of a fleet: the JSON report's fields, live.

    `recent`: what was counted in the last `seconds`; `wall_s`: since the start. Times are in seconds, sizes in rows.
    """
    counts: dict[str, float] = {"requests": recent.requests, "rows": recent.rows, **counted_tokens(recent)}
    rates = {f"{name}_per_s": count / seconds if seconds else 0.0 for name, count in counts.items()}
    return {
        "requests": snapshot.requests,
        "rows": snapshot.rows,
        "waiting_rows": snapshot.waiting,
        "slots": snapshot.slots or None,
        "throughput": {"over_s": seconds, **rates},
        "batches": report.batches_section(snapshot),
        "latency_s": summarise(snapshot.latency),
        "queue_wait_s": summarise(snapshot.queue_wait),
        "first_token_s": summarise(snapshot.first_token),
        "between_tokens_s": summarise(snapshot.between_tokens),
        "tokens": counted_tokens(snapshot),
        "unmasking": report.unmasking(snapshot),
        "speculation": report.speculation(snapshot),
        "models": report_sections.model_lines(snapshot, wall_s),
        "errors": {name: snapshot.errors.get(name, 0) for name in ERRORS},
        "notices": list(snapshot.notices),
    }


def replica_stats(snapshot: Snapshot, recent: RecentCounters, about: dict[str, Any]) -> dict[str, Any]:
    """What `GET /stats` of a replica answers."""
    wall_s = time.monotonic() - recent.began
    return {
        **about,
        "uptime_s": wall_s,
        **counter_stats(snapshot, *recent.window(), wall_s),
        "classes": {name: report.of_class(count) for name, count in snapshot.classes.items()},
        "time_s": report.time_s(snapshot.lanes, wall_s),
        "lanes": len(snapshot.lanes),
        "stations": report.stations(snapshot.lanes, wall_s),
        "memory": report.memory_section(snapshot),
        "model": dict(snapshot.device["model"]) if "model" in snapshot.device else None,
        "device": report.device(snapshot, wall_s),
    }
