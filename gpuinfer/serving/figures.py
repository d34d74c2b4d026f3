"""The counters of a replica as plain JSON, and how fast it was in the last seconds."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from gpuinfer.report import models, report
from gpuinfer.stats import ERRORS, Snapshot, since, summarise, tokens_of

EVERY_S, KEPT_S = 1.0, 10.0  # a look at the counters, and how far back the rates of /stats look


@dataclass(slots=True)
class Recent:
    """The counters of the last seconds, one snapshot a second."""

    began: float = field(default_factory=time.monotonic)
    _seen: deque[tuple[float, Snapshot]] = field(default_factory=deque)

    def due(self, now: float) -> bool:
        return not self._seen or now - self._seen[-1][0] >= EVERY_S

    def take(self, now: float, snapshot: Snapshot) -> None:
        self._seen.append((now, snapshot))
        while len(self._seen) > 2 and now - self._seen[0][0] > KEPT_S:
            self._seen.popleft()

    def window(self) -> tuple[float, Snapshot]:
        """For so many seconds it has been counted; both empty before there are two looks."""
        if len(self._seen) < 2:
            return 0.0, Snapshot()
        (first, before), (last, now) = self._seen[0], self._seen[-1]
        return last - first, since(now, before)

    @property
    def rows_per_s(self) -> float:
        seconds, counted = self.window()
        return counted.rows / seconds if seconds else 0.0


def figures(snapshot: Snapshot, recent: Recent, about: dict[str, Any]) -> dict[str, Any]:
    """What `GET /stats` answers: the JSON report's fields, live. Times are in seconds, sizes in rows."""
    wall_s = time.monotonic() - recent.began
    return {
        **about,
        "uptime_s": wall_s,
        "requests": snapshot.requests,
        "rows": snapshot.rows,
        "waiting_rows": snapshot.waiting,
        "slots": snapshot.slots or None,
        "throughput": rates(*recent.window()),
        "batches": report.batches(snapshot),
        "latency_s": summarise(snapshot.latency),
        "queue_wait_s": summarise(snapshot.queue_wait),
        "first_token_s": summarise(snapshot.first_token),
        "between_tokens_s": summarise(snapshot.between_tokens),
        "classes": {name: report.of_class(count) for name, count in snapshot.classes.items()},
        "tokens": tokens_of(snapshot),
        "unmasking": report.unmasking(snapshot),
        "time_s": report.time_s(snapshot.lanes, wall_s),
        "lanes": len(snapshot.lanes),
        "stations": report.stations(snapshot.lanes, wall_s),
        "errors": {name: snapshot.errors.get(name, 0) for name in ERRORS},
        "memory": report.memory(snapshot),
        "model": dict(snapshot.device["model"]) if "model" in snapshot.device else None,
        "models": models.lines(snapshot, wall_s),
        "notices": list(snapshot.notices),
        "device": report.device(snapshot, wall_s),
    }


def rates(seconds: float, counted: Snapshot) -> dict[str, float]:
    """For each second of the last ones."""
    counts: dict[str, float] = {"requests": counted.requests, "rows": counted.rows, **tokens_of(counted)}
    return {
        "over_s": seconds,
        **{f"{name}_per_s": count / seconds if seconds else 0.0 for name, count in counts.items()},
    }
