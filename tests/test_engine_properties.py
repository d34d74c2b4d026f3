"""The engine under arbitrary histories: arrivals, cancellations, deadlines, failures and closing, in any order.

The machine keeps a model of its own, of which requests wait, are served or are settled, and what became of them. Time
is virtual, and a batch ends when a rule says so.
"""

import asyncio
import math
from dataclasses import dataclass

import pytest
from counts import examples
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuinfer.api import Backend, Limits
from gpuinfer.engine.engine import Engine
from gpuinfer.errors import BackendDied, BackendError, BadResult, Closed, Expired, QueueFull, StrategyError
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import VirtualLoop

CLIENTS = ("ann", "bob")
TURNS = 12  # of the loop: enough for all that one step sets going
OUTCOMES = ("good", "raises", "dies", "one short", "bad first")


@dataclass(eq=False)
class Asked:
    """One request as the machine knows it."""

    rows: int
    group: str
    client: str | None
    deadline: float
    arrived: float
    task: asyncio.Task
    served: bool = False
    cancelled: bool = False
    due: type | None = None  # the error that it must end with; None for an answer

    @property
    def waits(self):
        return not (self.served or self.cancelled or self.task.done() or self.due is QueueFull)


class Gated(Backend):
    """Holds each batch until the machine lets it go."""

    def __init__(self, machine, limits):
        super().__init__()
        self.limits = limits
        self.machine = machine
        self.open = []  # (the asked of each batch, the future that ends it)

    async def infer(self, batch):
        try:
            self.machine.check_cut(batch)
        except AssertionError as error:
            self.machine.broken_promises.append(error)
        asked = [self.machine.asked[request.payload] for request in batch]
        gate = asyncio.get_running_loop().create_future()
        self.open.append((asked, gate))
        if self.machine.closing:
            gate.set_result("good")
        try:
            return self.answer(asked, await gate)
        finally:
            self.open.remove((asked, gate))

    def answer(self, asked, outcome):
        if outcome == "raises":
            raise ValueError("scripted")
        if outcome == "dies":
            raise BackendDied("scripted")
        answers = [self.machine.asked.index(one) for one in asked]
        if outcome == "one short":
            return answers[1:]
        return [Wrong, *answers[1:]] if outcome == "bad first" else answers


class Wrong:
    """An array of no rows."""

    shape = (0,)
    dtype = "none"


class Moody(Dynamic):
    """Dynamic, until the machine breaks it."""

    broken = False

    def cut_at(self, queue):
        if self.broken:
            raise RuntimeError("scripted")
        return super().cut_at(queue)


class EngineMachine(RuleBasedStateMachine):
    def __init__(self):
        super().__init__()
        self.loop = VirtualLoop()
        self.asked = []
        self.live = set()
        self.last_seen = {}  # when each client joined, or a request of its ended
        self.closing = False
        self.broken_promises = []  # found inside the backend, whose errors the engine would take for its own
        self.regretted = None  # the request that is being cancelled in this very turn of the loop

    @initialize(
        max_rows=st.integers(1, 6),
        in_flight=st.integers(1, 3),
        spare=st.integers(0, 12),
        max_wait=st.sampled_from([0.0, 0.5, 2.0]),
        drain=st.booleans(),
    )
    def start(self, max_rows, in_flight, spare, max_wait, drain):
        self.limits = Limits(max_rows, in_flight)
        self.bound = max_rows + spare
        self.max_wait = max_wait
        self.drain = drain
        self.backend = Gated(self, self.limits)
        self.strategy = Moody(max_wait=max_wait)
        self.engine = Engine(
            self.backend, self.strategy, max_queue_rows=self.bound, clock=self.loop.time, patience_s=10.0
        )
        self.loop.run_until_complete(self.engine.start())

    # What may happen

    @rule(
        asks=st.lists(
            st.tuples(
                st.integers(1, 6),
                st.sampled_from("xy"),
                st.sampled_from([math.inf, math.inf, 0.25, 1.0]),
                st.sampled_from([None, *CLIENTS]),
            ),
            min_size=1,
            max_size=4,
        ),
        regret=st.integers(0, 7),
        sound=st.integers(0, 5),
    )
    def submit_together(self, asks, regret, sound):
        """Several requests in one turn of the loop.

        One of them may be cancelled before that turn is over; now and then the strategy is broken, for this turn only.
        """
        self.strategy.broken = not sound
        admitted = [one for ask in asks if (one := self.submit(*ask)) is not None]
        if regret < len(admitted):
            one = admitted[regret]
            one.cancelled, one.due = True, asyncio.CancelledError
            self.regretted = one
            self.loop.call_soon(one.task.cancel)  # after the submits, before the dispatch
        self.turn()
        self.regretted = None
        self.strategy.broken = False

    def submit(self, rows, group, timeout, client):
        rows = min(rows, self.limits.max_rows)
        full = self.waiting_rows() + rows > self.bound
        now = self.loop.time()
        task = self.loop.create_task(
            self.engine.submit(len(self.asked), rows=rows, group=group, timeout=timeout, client=client)
        )
        if not full:
            task.add_done_callback(lambda _: self.last_seen.update({client: self.loop.time()}))
        one = Asked(rows, group, client, now + timeout, now, task, due=QueueFull if full else None)
        self.asked.append(one)
        return None if full else one

    @rule(seconds=st.sampled_from([0.1, 0.25, 0.5, 1.0, 3.0]))
    def pass_time(self, seconds):
        self.loop.run_until_complete(asyncio.sleep(seconds))
        self.turn()

    @precondition(lambda self: any(not one.task.done() for one in self.asked))
    @rule(data=st.data())
    def cancel(self, data):
        one = data.draw(st.sampled_from([one for one in self.asked if not one.task.done()]))
        one.cancelled, one.due = True, asyncio.CancelledError
        one.task.cancel()
        self.turn()

    @precondition(lambda self: self.backend.open)
    @rule(data=st.data(), outcome=st.sampled_from(OUTCOMES))
    def finish(self, data, outcome):
        asked, gate = data.draw(st.sampled_from(self.backend.open))
        errors = {"raises": BackendError, "dies": BackendDied, "one short": BadResult}
        for one in asked:
            one.due = one.due or errors.get(outcome)
        if outcome == "bad first":
            asked[0].due = asked[0].due or BadResult
        gate.set_result(outcome)
        self.turn()

    @rule(client=st.sampled_from(CLIENTS))
    def join(self, client):
        if client not in self.live:
            self.last_seen[client] = self.loop.time()
        self.live.add(client)
        self.engine.join(client)
        self.turn()

    @rule(client=st.sampled_from(CLIENTS))
    def leave(self, client):
        self.live.discard(client)
        self.engine.leave(client)
        self.turn()

    # What must hold

    @invariant()
    def no_more_batches_than_allowed_are_in_flight(self):
        if hasattr(self, "backend"):
            assert len(self.backend.open) <= self.limits.in_flight

    @invariant()
    def counters_match_what_happened(self):
        if not hasattr(self, "backend"):
            return
        self.turn()
        snapshot = self.engine.snapshot()
        ended = [one for one in self.asked if one.task.done()]
        assert snapshot.requests + sum(snapshot.errors.values()) == len(ended)
        assert snapshot.waiting == self.waiting_rows()
        assert sum(snapshot.batches.values()) == sum(snapshot.reasons.values())

    @invariant()
    def what_is_due_does_not_wait_while_there_is_room(self):
        if not hasattr(self, "backend"):
            return
        self.turn()
        if len(self.backend.open) < self.limits.in_flight:
            assert not any(self.is_due(group) for group in "xy")

    def teardown(self):
        if hasattr(self, "engine"):
            self.close()
        self.loop.close()

    def close(self):
        self.closing = True
        for one in self.asked:
            if one.waits and not self.drain:
                one.due = Closed
        for _, gate in self.backend.open:
            gate.set_result("good")
        self.loop.run_until_complete(asyncio.wait_for(self.engine.close(self.drain), 60.0))
        assert all(one.task.done() for one in self.asked)
        self.turn()

    # The model

    def turn(self):
        """Let all that was set going come to rest, at one moment."""

        async def turns():
            for _ in range(TURNS):
                await asyncio.sleep(0)

        self.loop.run_until_complete(turns())
        if self.broken_promises:
            raise self.broken_promises[0]
        for tag, one in enumerate(self.asked):
            self.check_ending(tag, one)

    def waiting_rows(self):
        return sum(one.rows for one in self.asked if one.waits)

    def dormant(self, away_s):
        return {client for client, seen in self.last_seen.items() if self.loop.time() - seen > away_s}

    def is_due(self, group, cut=(), away_s=math.inf):
        """By the model's own reckoning: full, waited long enough, or nobody left to wait for.

        Clients that were away for longer than `away_s` are not waited for.
        """
        line = [*cut, *(one for one in self.asked if one.waits and one.group == group and one not in cut)]
        if self.regretted is not None and self.regretted.group == group:
            line.append(self.regretted)  # the strategy could not know
        if not line:
            return False
        busy = {one.client for one in self.asked if not one.task.done() or one is self.regretted}
        full = sum(one.rows for one in line) >= self.limits.max_rows
        waited = self.loop.time() >= min(one.arrived for one in line) + self.max_wait
        return full or waited or (bool(self.live) and self.live <= busy | self.dormant(away_s))

    def check_cut(self, batch):
        asked = [self.asked[request.payload] for request in batch]
        assert sum(one.rows for one in asked) <= self.limits.max_rows
        assert len({one.group for one in asked}) == 1
        assert not any(one.served or one.cancelled for one in asked)
        assert all(one.deadline > self.loop.time() for one in asked)
        group = asked[0].group
        seen = [one for one in self.asked if one in asked or one.waits or one is self.regretted]
        hurried = any(one.deadline < math.inf for one in seen)
        assert self.closing or hurried or self.is_due(group, asked, away_s=0.0)
        for one in asked:
            one.served = True

    def check_ending(self, tag, one):
        """A request that has ended did so in the one way that its history allows."""
        if not one.task.done():
            assert one.served or one.cancelled or one.deadline > self.loop.time()
            return
        if one.task.cancelled():
            assert one.cancelled
            return
        error = one.task.exception()
        if error is None:
            assert one.due is None
            assert one.served
            assert one.task.result() == tag
        elif one.due is not None:
            assert isinstance(error, one.due)
        elif isinstance(error, Expired):
            one.due = Expired
            assert one.deadline <= self.loop.time()
            assert not one.served
        else:
            one.due = StrategyError
            assert isinstance(error, StrategyError)
            assert self.strategy.broken
            assert not one.served


@pytest.mark.property
def test_any_history_keeps_every_promise():
    run_state_machine_as_test(
        EngineMachine, settings=settings(max_examples=examples(200), stateful_step_count=40, deadline=None)
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_any_history_keeps_every_promise_many_times_over():
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=5000, stateful_step_count=80, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
