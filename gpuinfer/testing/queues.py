"""Queues as a strategy sees them, written down in one line."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpuinfer.api import Limits, Priority, QueueView, Request


def waiting(
    arrivals: Sequence[float],
    *,
    rows: int | Sequence[int] = 1,
    max_rows: int = 64,
    in_flight: int = 1,
    now: float | None = None,
    live: int = 0,
    thinking: int = 0,
    priorities: Sequence[Priority] = (),
    deadlines: Sequence[float] = (),
    arrival_rate: float = 0.0,
    think_s: float = math.inf,
    enough_rows: int | None = None,
    outstanding: int | None = None,
) -> QueueView:
    """A queue of requests that arrived at these times (seconds, oldest first), seen at `now`: at the last arrival.

    `rows` is one number for all requests, or one for each; `priorities` and `deadlines` are one for each, or none.
    Those who wait are all that is `outstanding`, unless more is said to be.
    """
    each = [rows] * len(arrivals) if isinstance(rows, int) else list(rows)
    requests = tuple(
        Request(
            payload=number,
            rows=each[number],
            arrived=arrived,
            priority=priorities[number] if priorities else Priority.NORMAL,
            deadline=deadlines[number] if deadlines else math.inf,
        )
        for number, arrived in enumerate(arrivals)
    )
    seen = arrivals[-1] if now is None else now
    return QueueView(
        requests,
        sum(each),
        seen,
        Limits(max_rows, in_flight, enough_rows=enough_rows),
        live,
        thinking,
        arrival_rate,
        think_s,
        len(requests) if outstanding is None else outstanding,
        min((request.deadline for request in requests), default=math.inf),
        [sum(request.rows for request in requests if request.priority == priority) for priority in Priority],
    )
