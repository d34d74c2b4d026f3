"""What may enter the queue, and what is refused before it costs anything."""

from __future__ import annotations

from typing import Any

from gpuinfer.api import Limits, Priority
from gpuinfer.errors import Expired, QueueFull, RequestError, UsageError


class Admission:
    """The bounds of one engine: rows in a request, rows in the queue.

    `max_queue_rows` defaults to 64 full batches, and no less than 4,096 rows. Raises `UsageError` for limits that let
    nothing through.
    """

    __slots__ = ("bound", "widest")

    def __init__(self, limits: Limits, max_queue_rows: int | None) -> None:
        self.widest = limits.max_rows if limits.slots is None else min(limits.max_rows, limits.slots)
        if self.widest < 1 or limits.in_flight < 1:
            raise UsageError(f"the backend can take nothing: {limits}. Make every limit at least 1.")
        self.bound = max(4096, 64 * self.widest) if max_queue_rows is None else max_queue_rows
        if self.bound < self.widest:
            raise UsageError(f"max_queue_rows is {self.bound}, less than one batch. Make it at least {self.widest}.")

    def refuse(self, rows: int, timeout: float, waiting_rows: int) -> RequestError | None:
        """Why a request of that many rows cannot enter now; None when it can."""
        if 1 <= rows <= self.widest and waiting_rows + rows <= self.bound and timeout > 0:
            return None
        if not 1 <= rows <= self.widest:
            return RequestError(
                f"a request of {rows} rows can never be served: a batch takes 1 to {self.widest} rows, and no block "
                f"is split. Submit smaller blocks, or raise the backend's max_rows."
            )
        if not timeout > 0:
            return Expired(f"a timeout of {timeout} s is over before it began. Give a positive one.")
        return QueueFull(
            f"the queue is full: {waiting_rows} of {self.bound} rows wait, and {rows} more do not fit. "
            f"Keep fewer requests outstanding, try again later, or raise max_queue_rows."
        )


def class_of(priority: Any) -> Priority:
    """The class that a caller means, who may have written its number. Raises `RequestError` for what is none."""
    try:
        return Priority(priority)
    except ValueError:
        names = ", ".join(f"Priority.{one.name}" for one in Priority)
        raise RequestError(f"a request of priority {priority!r} cannot be queued. Give one of {names}.") from None
