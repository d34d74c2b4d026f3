"""What may enter the queue, what is refused before it costs anything, and which requests give way when it is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gpuinfer.api import Limits, Priority, QueueView, Request, Strategy
from gpuinfer.engine.cutting import blamed
from gpuinfer.engine.queue import Queue
from gpuinfer.errors import Expired, GpuinferError, QueueFull, RequestError, StrategyError, UsageError
from gpuinfer.host import spoken


class QueueBounds:
    """The bounds of one engine: rows in a request, rows in the queue.

    `max_queue_rows` defaults to 64 full batches, and no less than 4,096 rows. Raises `UsageError` for limits that let
    nothing through.
    """

    __slots__ = ("rows", "widest")

    def __init__(self, limits: Limits, max_queue_rows: int | None) -> None:
        self.widest = limits.max_rows if limits.slots is None else min(limits.max_rows, limits.slots)
        if self.widest < 1 or limits.in_flight < 1:
            raise UsageError(f"the backend can take nothing: {limits}. Make every limit at least 1.")
        self.rows = max(4096, 64 * self.widest) if max_queue_rows is None else max_queue_rows
        if self.rows < self.widest:
            raise UsageError(f"max_queue_rows {self.rows} is less than one batch. Make it at least {self.widest}.")

    def refusal(self, request: Request, waiting_rows: int) -> RequestError:
        """Why a request cannot enter, of which `Core.arrive` has found that it cannot."""
        rows = request.rows
        if not 1 <= rows <= self.widest:
            return RequestError(
                f"a request of {rows} rows can never be served: a batch takes 1 to {self.widest} rows, and no block "
                f"is split. Submit smaller blocks, or raise the backend's max_rows."
            )
        if not request.deadline > request.arrived:
            timeout = request.deadline - request.arrived
            return Expired(f"a timeout of {timeout:g} s is over before it began. Give a positive one.")
        return QueueFull(
            f"the queue is full: {waiting_rows} of {self.rows} rows wait, and {rows} more do not fit. "
            f"Keep fewer requests outstanding, try again later, or raise max_queue_rows."
        )


def class_of(priority: Any) -> Priority:
    """The class that a caller means, who may have written its number. Raises `RequestError` for what is none."""
    try:
        return Priority(priority)
    except ValueError:
        names = ", ".join(f"Priority.{one.name}" for one in Priority)
        raise RequestError(f"a request of priority {priority!r} cannot be queued. Give one of {names}.") from None


@dataclass(frozen=True, slots=True)
class Shed:
    """What became of a request for which there was no room, and of those that had to make room for it."""

    turned_away: Sequence[tuple[Request, GpuinferError]] = ()  # taken out of the queue
    refusal: GpuinferError | None = None  # why there is no room for it even so; None: it may enter


def make_room(
    strategy: Strategy, queue: Queue, arriving: Request, limits: Limits, refusal: QueueFull, bound: int
) -> Shed:
    """Ask the strategy whom to turn away now that `arriving` does not fit into `bound` rows.

    `refusal` says so; with the time after which to try again, where the strategy knows one, it is what they are told.
    """
    view = queue.view(arriving.group, arriving.arrived, limits)
    if view is None:
        return Shed(refusal=refusal)
    try:
        victims = _victims(strategy, queue, view, arriving)
        if queue.rows + arriving.rows - sum(victim.rows for victim in victims) > bound:
            return Shed(refusal=_told(strategy, view, arriving, refusal))
        told = [(victim, _told(strategy, view, victim, _shed_by(arriving))) for victim in victims]
    except StrategyError as error:
        return Shed(refusal=error)
    for victim in victims:
        queue.remove((victim,))
    return Shed(told)


def _victims(strategy: Strategy, queue: Queue, view: QueueView, arriving: Request) -> list[Request]:
    try:
        victims = list(strategy.shed(view, arriving))
        strangers = len(set(victims)) != len(victims) or any(victim not in queue for victim in victims)
    except Exception as error:
        raise blamed(strategy, f"shed raised {spoken.in_short(error)}") from error
    if strangers or any(victim.group != arriving.group for victim in victims):
        raise blamed(strategy, "shed chose requests that do not wait in this queue, or one of them twice")
    return victims


def _told(strategy: Strategy, view: QueueView, request: Request, error: QueueFull) -> QueueFull:
    try:
        seconds = strategy.retry_after(view, request)
        error.retry_after_s = None if seconds is None else max(0.0, float(seconds))
    except Exception as fault:
        raise blamed(strategy, f"retry_after raised {spoken.in_short(fault)}") from fault
    if error.retry_after_s is not None:
        error.args = (f"{error.args[0]} There may be room in {error.retry_after_s:.3g} s.",)
    return error


def _shed_by(arriving: Request) -> QueueFull:
    return QueueFull(
        f"the queue is full, and this request was turned away for one of class {arriving.priority.name.lower()}. "
        "Keep fewer requests outstanding, try again later, or raise max_queue_rows."
    )
