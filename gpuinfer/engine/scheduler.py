"""What may enter the queue, which requests give way when it is full, and which batch comes next: the questions put to a
strategy, and what of its answers is believed. Nothing here reads a clock: `core.Core`, which alone asks these
questions, gets the time.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Any

from gpuinfer.api import Limits, Priority, QueueView, Reason, Request, Strategy
from gpuinfer.config import blame
from gpuinfer.engine.queue import Queue
from gpuinfer.errors import Expired, GpuinferError, QueueFull, RequestError, StrategyError, UsageError
from gpuinfer.host import error_text


@dataclass(frozen=True, slots=True)
class Cut:
    """The requests of the next batch, taken out of the queue."""

    requests: tuple[Request, ...]
    rows: int
    reason: Reason


@dataclass(frozen=True, slots=True)
class Fault:
    """A strategy's failure, and the requests it was shown, taken out of the queue."""

    requests: tuple[Request, ...]
    error: StrategyError

    def error_of(self, request: Request) -> StrategyError:
        return self.error


class PassThrough(Strategy):
    """Sends on whatever waits: for a remote backend, whose batches are formed beside the model."""

    def cut_at(self, queue: QueueView) -> float:
        return -math.inf

    def reason(self, queue: QueueView) -> Reason:
        return Reason.FREE


def next_cut(strategy: Strategy, queue: Queue, now: float, limits: Limits, *, draining: bool) -> Cut | Fault | float:
    """The batch that is due now, or else the time when to ask again; inf when only an arrival or departure can tell.

    The group that is due first goes first. While draining every group is due, whatever the strategy says.
    """
    due, chosen = math.inf, None
    for line, view in queue.views(now, limits):
        if view.waiting[0].rows > limits.max_rows:  # only when the backend's slots are taken: wait until they are not
            continue
        try:
            line_due = view.waiting[0].arrived if draining else due_at(strategy, view)
        except StrategyError as error:
            return _fault(queue, view, error)
        if line_due < due:
            due, chosen = line_due, (line, view)
    if chosen is None:
        return math.inf
    if due > now:
        return min(due, queue.clients.next_dormant())  # all that it waits for may be gone before it is due
    line, view = chosen
    try:
        cut = choose_batch(strategy, view, line.members, draining=draining)
        try:
            strategy.account(cut.requests, now)
        except Exception as error:
            raise strategy_raised(strategy, "account", error) from error
    except StrategyError as error:
        return _fault(queue, view, error)
    queue.remove(cut.requests)
    return cut


def _fault(queue: Queue, view: QueueView, error: StrategyError) -> Fault:
    shown = tuple(view.waiting)
    queue.remove(shown)
    return Fault(shown, error)


def due_at(strategy: Strategy, view: QueueView) -> float:
    """When the strategy wants this queue cut, never before its oldest request arrived.

    That floor keeps a group which is always due "at once" from going before one that has waited longer.
    Raises `StrategyError` when the strategy raises, or answers with what is no time.
    """
    try:
        due = float(strategy.cut_at(view))
    except Exception as error:
        raise blamed(strategy, f"cut_at raised {error_text.short_message(error)}") from error
    if math.isnan(due):
        raise blamed(strategy, "cut_at answered NaN, which is no time")
    return max(due, view.waiting[0].arrived)


def choose_batch(strategy: Strategy, view: QueueView, members: Set[Request], *, draining: bool = False) -> Cut:
    """The batch that the strategy chooses now; `members` are the waiting requests that it may choose from.

    Raises `StrategyError` when the strategy raises, chooses nothing, or chooses what it may not.
    """
    # no context manager: this runs for each batch
    try:
        reason = Reason.DRAIN if draining else Reason(strategy.reason(view))
    except Exception as error:
        raise strategy_raised(strategy, "reason", error) from error
    try:
        chosen = tuple(strategy.select(view))
        distinct = set(chosen)
    except Exception as error:
        raise strategy_raised(strategy, "select", error) from error
    if not chosen:
        raise blamed(strategy, "select chose nothing although a batch was due")
    if len(distinct) != len(chosen):
        raise blamed(strategy, "select chose a request twice")
    if not distinct <= members:
        raise blamed(strategy, "select chose a request that does not wait in this queue")
    rows = sum(request.rows for request in chosen)
    if rows > view.limits.max_rows:
        raise blamed(strategy, f"select chose {rows} rows where {view.limits.max_rows} fit")
    return Cut(chosen, rows, reason)


def notices_of(strategy: Strategy) -> tuple[str, ...]:
    """What a strategy has to say to the user. Nothing when it raises: no request and no counter depends on it."""
    try:
        notices = strategy.notices
        return (notices,) if isinstance(notices, str) else tuple(map(str, notices))
    except Exception:  # noqa: BLE001 (a plugin may raise anything)
        return ()


def strategy_raised(strategy: Strategy, method: str, error: Exception) -> StrategyError:
    return blamed(strategy, f"{method} raised {error_text.short_message(error)}")


@contextlib.contextmanager
def blaming_strategy(strategy: Strategy, method: str) -> Iterator[None]:
    """Whatever this method of the strategy raises is raised as `StrategyError`."""
    try:
        yield
    except Exception as error:
        raise strategy_raised(strategy, method, error) from error


def blamed(strategy: Strategy, what: str) -> StrategyError:
    """The error that says what a strategy did wrong: `cut_at raised …`."""
    cure = f"Choose another with --strategy. {blame.cure_for(strategy)}"
    return StrategyError(f"{blame.who(strategy)}: {what.rstrip('.')}. {cure}")


class QueueBounds:
    """The bounds of one engine: rows in a request, rows in the queue.

    `max_queue_rows` defaults to 64 full batches, and no less than 4,096 rows. Raises `UsageError` for limits that let
    nothing through.
    """

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

    `refusal` says so: the error of the requests that are turned away, with the seconds after which to try again where
    the strategy knows them.
    """
    view = queue.view(arriving.group, arriving.arrived, limits)
    if view is None:
        return Shed(refusal=refusal)
    try:
        with blaming_strategy(strategy, "shed"):
            victims = list(strategy.shed(view, arriving))
            strangers = len(set(victims)) != len(victims) or any(victim not in queue for victim in victims)
        if strangers or any(victim.group != arriving.group for victim in victims):
            raise blamed(strategy, "shed chose requests that do not wait in this queue, or one of them twice")
        if queue.rows + arriving.rows - sum(victim.rows for victim in victims) > bound:
            return Shed(refusal=_with_retry(strategy, view, arriving, refusal))
        why = f"the queue is full, and this request was turned away for one of class {arriving.priority.name.lower()}. "
        why += "Keep fewer requests outstanding, try again later, or raise max_queue_rows."
        turned_away = [(victim, _with_retry(strategy, view, victim, QueueFull(why))) for victim in victims]
    except StrategyError as error:
        return Shed(refusal=error)
    for victim in victims:
        queue.remove((victim,))
    return Shed(turned_away)


def _with_retry(strategy: Strategy, view: QueueView, request: Request, error: QueueFull) -> QueueFull:
    with blaming_strategy(strategy, "retry_after"):
        seconds = strategy.retry_after(view, request)
        error.retry_after_s = None if seconds is None else max(0.0, float(seconds))
    if error.retry_after_s is not None:
        error.args = (f"{error.args[0]} There may be room in {error.retry_after_s:.3g} s.",)
    return error
