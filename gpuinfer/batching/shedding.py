"""Who is turned away when the queue is full: the one that comes, or those that the strategy gives up for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gpuinfer import blame
from gpuinfer.api import Limits, QueueView, Request, Strategy
from gpuinfer.batching.cutting import blamed
from gpuinfer.batching.queueing import Queue
from gpuinfer.errors import GpuinferError, QueueFull, StrategyError


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
        raise blamed(strategy, f"shed raised {blame.in_short(error)}") from error
    if strangers or any(victim.group != arriving.group for victim in victims):
        raise blamed(strategy, "shed chose requests that do not wait in this queue, or one of them twice")
    return victims


def _told(strategy: Strategy, view: QueueView, request: Request, error: QueueFull) -> QueueFull:
    try:
        seconds = strategy.retry_after(view, request)
        error.retry_after_s = None if seconds is None else max(0.0, float(seconds))
    except Exception as fault:
        raise blamed(strategy, f"retry_after raised {blame.in_short(fault)}") from fault
    if error.retry_after_s is not None:
        error.args = (f"{error.args[0]} There may be room in {error.retry_after_s:.3g} s.",)
    return error


def _shed_by(arriving: Request) -> QueueFull:
    return QueueFull(
        f"the queue is full, and this request was turned away for one of class {arriving.priority.name.lower()}. "
        "Keep fewer requests outstanding, try again later, or raise max_queue_rows."
    )
