"""What a strategy promises, tried on queues of every kind and on a random load; `waiting` makes a queue in one line."""

from __future__ import annotations

import asyncio
import functools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from gpuinfer.api import Backend, BatchRecord, Limits, Priority, QueueView, Reason, Request, Result, Strategy
from gpuinfer.engine.engine import Engine
from gpuinfer.engine.scheduler import choose_batch, due_at
from gpuinfer.testing.fakes import run_virtual
from gpuinfer.testing.findings import Examination, Finding, check_build, check_options, raised, run_bounded


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
    The waiting requests are all that is `outstanding`, unless a number is given.
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


PATIENCE_S = 60.0  # of virtual time: a request that waits longer than this waits for ever
SHIFT_S = 2.0**20  # exact in binary, so that shifted times differ by exactly this much
LOAD = "serves every request of a random load"
LOAD_REQUESTS = 200


def check_strategy(
    strategy_factory: Callable[[], Strategy], timeout_s: float = 30.0, *, examiner: Examination | None = None
) -> list[Finding]:
    """Every promise of `api.Strategy`; `strategy_factory` is called for a new one as often as needed. Each check may
    take `timeout_s`, or what `examiner` allows.
    """
    return run_bounded(functools.partial(_check, strategy_factory), examiner or Examination(timeout_s))


def _check(strategy_factory: Callable[[], Strategy], examiner: Examination) -> None:
    if (strategy := check_build(strategy_factory, Strategy, examiner)) is None:
        return
    check_options(strategy, examiner)
    held = [
        examiner.check(name, functools.partial(_first_fault, strategy_factory, fault_of))
        for name, fault_of in PROMISES.items()
    ]
    held.append(examiner.check("observes", lambda: _fault_of_observing(strategy_factory())))
    if all(held):
        examiner.check(LOAD, lambda: run_virtual(_load(strategy_factory())))
    else:  # on a virtual clock, one that reads a real clock would run for hours
        examiner.skip(LOAD, "a strategy that breaks other promises may run for hours in it")


def queues() -> Iterator[tuple[str, QueueView]]:
    """Queues that a strategy must cope with."""
    at = 1000.0
    yield "a lone request", waiting([at])
    yield "a lone request seen later", waiting([at], now=at + 0.5)
    yield "a few requests", waiting([at, at + 0.01, at + 0.02], max_rows=8)
    yield "a full batch", waiting([at] * 8, max_rows=8)
    yield "more than a batch", waiting([at] * 20, max_rows=8)
    yield "batches of one row", waiting([at] * 3, max_rows=1)
    yield "blocks that do not fit together", waiting([at] * 3, rows=5, max_rows=8)
    yield "blocks as wide as a batch", waiting([at] * 2, rows=8, max_rows=8)
    yield "a block behind a row", waiting([at, at], rows=[1, 8], max_rows=8)
    yield "all clients waiting", waiting([at, at], live=2, thinking=0)
    yield "clients thinking", waiting([at, at], live=5, thinking=3, arrival_rate=100.0)
    yield "clients back soon", waiting([at, at], live=5, thinking=3, think_s=0.0001, in_flight=3)
    yield "clients being served", waiting([at], live=5, thinking=1, think_s=0.001, in_flight=3, outstanding=4)
    yield "more than enough rows", waiting([at] * 2, rows=6, max_rows=32, enough_rows=4, in_flight=3)
    yield "every priority", waiting([at] * 3, priorities=[Priority.LOW, Priority.NORMAL, Priority.HIGH], max_rows=2)
    yield "a deadline", waiting([at, at], deadlines=[math.inf, at + 0.001])


def _first_fault(
    strategy_factory: Callable[[], Strategy], fault_of: Callable[[Strategy, QueueView], str | None]
) -> str | None:
    for name, view in queues():
        try:
            fault = fault_of(strategy_factory(), view)
        except Exception as error:  # noqa: BLE001 (the code under test may raise anything)
            fault = raised(error)
        if fault:
            return f"with {name}: {fault}"
    return None


def _fault_of_time(strategy: Strategy, view: QueueView) -> str | None:
    due_at(strategy, view)
    return None


def _fault_of_choice(strategy: Strategy, view: QueueView) -> str | None:
    choose_batch(strategy, view, set(view.waiting))
    return None


def _fault_of_patience(strategy: Strategy, view: QueueView) -> str | None:
    """Let time pass with no arrivals, as the engine would, until the strategy cuts."""
    now = view.now
    for _ in range(10_000):
        due = due_at(strategy, replace(view, now=now))
        if due <= now:
            return None
        if due > view.now + PATIENCE_S:
            break
        now = due
    return "it never cuts, so these requests wait for ever. Return a time that comes, whatever else arrives or not."


def _fault_of_purity(strategy: Strategy, view: QueueView) -> str | None:
    first, second = ((strategy.cut_at(view), strategy.reason(view), list(strategy.select(view))) for _ in range(2))
    if first == second:
        return None
    return "the same queue got two different answers. Decide from the QueueView, and learn in observe alone."


def _fault_of_clock(strategy: Strategy, view: QueueView) -> str | None:
    """A strategy that reads a clock of its own gives itself away when all times of the queue are shifted: to before
    what any clock shows, and to long after.
    """
    due = max(strategy.cut_at(view), view.now)
    for shift in (-SHIFT_S, SHIFT_S):
        requests = tuple(
            replace(request, arrived=request.arrived + shift, deadline=request.deadline + shift)
            for request in view.waiting
        )
        shifted = replace(view, waiting=requests, now=view.now + shift, deadline=view.deadline + shift)
        if not math.isclose(due, max(strategy.cut_at(shifted), shifted.now) - shift, abs_tol=1e-6):
            break
    else:
        return None
    return "the same queue at another time of day is cut differently. Read queue.now, never a clock."


def _fault_of_observing(strategy: Strategy) -> str | None:
    for reason in Reason:
        strategy.observe(BatchRecord(4, 2, 1000.0, 0.01, 0.002, reason))
    strategy.observe(BatchRecord(1, 1, 1000.0, 0.0, 0.0, Reason.FREE))
    return next((fault for _, view in queues() if (fault := _fault_of_choice(strategy, view))), None)


def _fault_of_shedding(strategy: Strategy, view: QueueView) -> str | None:
    """A full queue asks for each arrival: one more of each class, as wide as the widest."""
    rows = max(request.rows for request in view.waiting)
    for priority in Priority:
        arriving = replace(view.waiting[-1], payload="arriving", rows=rows, arrived=view.now, priority=priority)
        victims = list(strategy.shed(view, arriving))
        if len(set(victims)) != len(victims) or not set(victims) <= set(view.waiting):
            return "shed turned away what does not wait, or one request twice. Choose from queue.waiting."
    return None


def _fault_of_retrying(strategy: Strategy, view: QueueView) -> str | None:
    seconds = strategy.retry_after(view, view.waiting[-1])
    if seconds is None or (isinstance(seconds, int | float) and 0 <= seconds < math.inf):
        return None
    return f"retry_after gave {seconds!r}. Return seconds, or None when you do not know."


def _fault_of_notices(strategy: Strategy, view: QueueView) -> str | None:
    strategy.cut_at(view)
    notices = strategy.notices
    if not isinstance(notices, str) and all(isinstance(one, str) for one in notices):
        return None
    return f"notices are {notices!r:.60}. Keep a list of sentences."


async def _load(strategy: Strategy) -> str | None:
    """A random load through the real engine on a virtual clock."""
    engine = Engine(_Delay(), strategy, clock=asyncio.get_running_loop().time)
    await engine.start()
    dice = random.Random(1)

    async def ask(number: int) -> object:
        await asyncio.sleep(dice.expovariate(1.0))
        return await engine.submit(number, rows=dice.randint(1, 8), group=dice.choice("ab"))

    tasks = [asyncio.create_task(ask(number)) for number in range(LOAD_REQUESTS)]
    done, pending = await asyncio.wait(tasks, timeout=PATIENCE_S)
    await engine.close(drain=False)
    await asyncio.wait(tasks)
    if pending:
        return f"{len(pending)} of {LOAD_REQUESTS} requests were never served. Return a time that comes."
    error = next((task.exception() for task in done if task.exception()), None)
    return str(error) if error else None


class _Delay(Backend):
    """Takes 10 ms for a batch, and answers with the payloads."""

    limits = Limits(max_rows=16, in_flight=2)

    async def infer(self, batch: Sequence[Request]) -> Sequence[Result]:
        await asyncio.sleep(0.01)
        return [request.payload for request in batch]


PROMISES: dict[str, Callable[[Strategy, QueueView], str | None]] = {
    "answers cut_at with a time": _fault_of_time,
    "selects waiting requests within the limits": _fault_of_choice,
    "cuts in the end": _fault_of_patience,
    "answers the same queue the same way": _fault_of_purity,
    "reads no clock": _fault_of_clock,
    "sheds only what waits": _fault_of_shedding,
    "tells when to try again": _fault_of_retrying,
    "says its notices in words": _fault_of_notices,
}
