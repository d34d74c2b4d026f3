"""Which batch comes next: the questions put to a strategy, and what of its answers is believed.

Nothing here reads a clock: `core.Core`, which alone asks these questions, is told the time.
"""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from gpuinfer.api import Limits, QueueView, Reason, Request, Strategy
from gpuinfer.config import blame
from gpuinfer.engine.queue import GroupLine, Queue
from gpuinfer.errors import StrategyError
from gpuinfer.host import spoken


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
    return _cut(strategy, queue, *chosen, draining=draining)


def _cut(strategy: Strategy, queue: Queue, line: GroupLine, view: QueueView, *, draining: bool) -> Cut | Fault:
    try:
        cut = choose(strategy, view, line.members, draining=draining)
        _account(strategy, cut, view.now)
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
        raise blamed(strategy, f"cut_at raised {spoken.in_short(error)}") from error
    if math.isnan(due):
        raise blamed(strategy, "cut_at answered NaN, which is no time")
    return max(due, view.waiting[0].arrived)


def choose(strategy: Strategy, view: QueueView, members: Set[Request], *, draining: bool = False) -> Cut:
    """The batch that the strategy chooses now; `members` are the waiting requests that it may choose from.

    Raises `StrategyError` when the strategy raises, chooses nothing, or chooses what it may not.
    """
    try:
        reason = Reason.DRAIN if draining else Reason(strategy.reason(view))
    except Exception as error:
        raise blamed(strategy, f"reason raised {spoken.in_short(error)}") from error
    try:
        chosen = tuple(strategy.select(view))
        distinct = set(chosen)
    except Exception as error:
        raise blamed(strategy, f"select raised {spoken.in_short(error)}") from error
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


def _account(strategy: Strategy, cut: Cut, now: float) -> None:
    try:
        strategy.account(cut.requests, now)
    except Exception as error:
        raise blamed(strategy, f"account raised {spoken.in_short(error)}") from error


def notices_of(strategy: Strategy) -> tuple[str, ...]:
    """What a strategy has to say to the user. Nothing when it raises: no request and no counter depends on it."""
    try:
        said = strategy.notices
        return (said,) if isinstance(said, str) else tuple(map(str, said))
    except Exception:  # noqa: BLE001 (a plugin may raise anything)
        return ()


def blamed(strategy: Strategy, what: str) -> StrategyError:
    """The error that says what a strategy did wrong: `cut_at raised …`."""
    cure = f"Choose another with --strategy. {blame.cure(strategy)}"
    return StrategyError(f"{blame.who(strategy)}: {what.rstrip('.')}. {cure}")
