"""Which of the waiting requests go into a batch."""

from __future__ import annotations

import math

from gpuinfer.api import QueueView, Request


def oldest_first(queue: QueueView, room: int, most: float = math.inf) -> list[Request]:
    """The oldest requests, `most` at most, as long as their rows fit into `room`; one that is wider goes alone."""
    chosen: list[Request] = []
    rows = 0
    for request in queue.waiting:
        rows += request.rows
        if chosen and (rows > room or len(chosen) >= most):
            break
        chosen.append(request)
    return chosen
