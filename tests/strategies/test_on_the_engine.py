"""The strategies on the real engine, on a virtual clock: slots, a full queue, strategies at fault, what is counted."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from gpuinfer.api import Backend, Event, Limits, Priority
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import QueueFull, RequestError
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.strategies.priority import ByPriority
from gpuinfer.testing import run_virtual

HIGH, NORMAL, LOW = Priority


class Steady(Backend):
    """Takes 10 ms for a batch of rows."""

    def __init__(self, limits):
        super().__init__()
        self.limits = limits

    async def infer(self, batch):
        await asyncio.sleep(0.01)
        return [request.payload for request in batch]


class Generator(Steady):
    """Answers each request as many seconds after its admission as it holds."""

    def __init__(self, limits):
        super().__init__(limits)
        self.rows = self.most = 0

    async def stream(self, batch):
        self.rows += sum(request.rows for request in batch)
        self.most = max(self.most, self.rows)

        async def generate(request):
            await asyncio.sleep(request.payload)
            self.rows -= request.rows
            return Event(request, request.payload)

        for event in asyncio.as_completed([asyncio.ensure_future(generate(request)) for request in batch]):
            yield await event


class Witness:
    """A recorder that keeps how each request ended."""

    def __init__(self):
        self.came, self.outcomes = [], {}

    def arrived(self, request):
        self.came.append(request)

    def cut(self, requests, rows, reason, now):
        return 0

    def ran(self, batch, seconds, now):
        pass

    def settled(self, request, outcome, now):
        assert request not in self.outcomes
        self.outcomes[request] = outcome


async def served(backend, strategy, asks, **options):
    """The outcome of each request of `asks`, keywords of `submit` that all come at once; and the last snapshot."""
    engine = Engine(backend, strategy, clock=asyncio.get_running_loop().time, **options)
    await engine.start()
    outcomes = await asyncio.gather(*(engine.submit(**ask) for ask in asks), return_exceptions=True)
    await engine.close()
    return outcomes, engine.snapshot()


@pytest.mark.parametrize(
    "build",
    [Dynamic, Adaptive, partial(Adaptive, latency_target=0.1), ByPriority, partial(ByPriority, mode="strict")],
    ids=["dynamic", "adaptive", "adaptive with a target", "priority", "strict priority"],
)
def test_slots_that_come_free_are_filled_and_no_more_than_there_are(build):
    backend = Generator(Limits(max_rows=4, in_flight=32, slots=8))
    asks = [
        {"payload": 1.0 + number % 3, "rows": 1 + number % 2, "priority": Priority(number % 3)} for number in range(60)
    ]
    outcomes, snapshot = run_virtual(served(backend, build(), asks))
    assert outcomes == [ask["payload"] for ask in asks]
    assert backend.most == 8
    assert backend.rows == 0
    assert snapshot.notices == ()  # a target says nothing of how long a whole generation takes


def test_whoever_is_turned_away_is_told_so_once_and_counted_in_its_class():
    witness = Witness()
    asks = [{"payload": "low", "priority": LOW}] * 20 + [{"payload": "high", "priority": HIGH}] * 6
    outcomes, snapshot = run_virtual(
        served(Steady(Limits(max_rows=4)), ByPriority(), asks, max_queue_rows=16, recorder=witness)
    )
    away = [error for error in outcomes if isinstance(error, QueueFull)]
    assert len(away) == 10
    assert outcomes[20:] == ["high"] * 6
    assert {name: (count["requests"], count["errors"]["rejected"]) for name, count in snapshot.classes.items()} == {
        "high": (6, 0),
        "low": (10, 10),
    }
    assert sorted(witness.outcomes.values()) == ["ok"] * 16 + ["rejected"] * 10
    assert set(witness.outcomes) == set(witness.came)


@pytest.mark.parametrize("priority", [3, -1, "high", None])
def test_a_priority_that_is_none_is_refused_and_harms_nobody(priority):
    asks = [{"payload": 1}, {"payload": 2, "priority": priority}, {"payload": 3, "priority": 0}]
    outcomes, snapshot = run_virtual(served(Steady(Limits(max_rows=4)), Dynamic(), asks))
    assert (outcomes[0], outcomes[2]) == (1, 3)
    assert isinstance(outcomes[1], RequestError)
    assert "Give one of Priority.HIGH" in str(outcomes[1])
    assert snapshot.classes["high"]["requests"] == 1
    assert snapshot.waiting == 0


class Talks(Dynamic):
    """Fails to say what it has to say."""

    @property
    def notices(self):
        raise ZeroDivisionError


class Blunders(Dynamic):
    """Raises when the queue is full."""

    def shed(self, queue, arriving):
        raise ZeroDivisionError


class Forgets(Dynamic):
    def retry_after(self, queue, request):
        raise ZeroDivisionError


class Miscounts(Dynamic):
    def account(self, batch, now):
        raise ZeroDivisionError


@pytest.mark.parametrize("strategy", [Talks, Blunders, Forgets, Miscounts])
def test_a_strategy_at_fault_leaves_no_request_unsettled(strategy):
    asks = [{"payload": number, "priority": Priority(number % 3)} for number in range(30)]
    witness = Witness()
    backend = Steady(Limits(max_rows=4))
    outcomes, snapshot = run_virtual(served(backend, strategy(), asks, max_queue_rows=16, recorder=witness))
    assert len(outcomes) == len(witness.outcomes) == 30
    assert snapshot.requests + sum(snapshot.errors.values()) == 30
    assert snapshot.waiting == 0
