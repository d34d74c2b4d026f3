"""Groups that wait for the trainer: each is given once, in order, none too old; and how many may be under way."""

import asyncio

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from played import group

from gpuinfer.errors import Closed
from gpuinfer.rollouts.buffer import Capacity, CapacityGate, GroupBuffer
from gpuinfer.rollouts.record import oldest_version, version_lags, version_number


async def turns(number=8):
    for _ in range(number):
        await asyncio.sleep(0)


def numbers(groups):
    return [one.number for one in groups]


def test_a_group_is_as_old_as_its_oldest_trainable_token():
    names = {"": 0, "v7": 7, "policy@v12": 12, "3": 3, "a@b@v2": 2, "base": 0, "v": 0}
    assert {name: version_number(name) for name in names} == names
    assert oldest_version(group(0, ["v5", "v3", "v4"])) == 3
    assert oldest_version(group(0, ["v5"], opponent=["v1"])) == 5
    assert oldest_version(group(0, ()), otherwise=9) == 9
    assert version_lags([group(0, ["v5", "v3"]), group(1, ["policy@v6"])], 6) == [3, 0]


class BufferMachine(RuleBasedStateMachine):
    """Any history of putting, taking, cancelling, new versions and the end, against what is promised of each group."""

    def __init__(self):
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.count = self.version = 0
        self.putting, self.taking = {}, []
        self.put, self.given, self.dropped, self.withdrawn = [], [], [], []
        self.ended = self.closed = False

    @initialize(depth=st.integers(1, 4), prefill=st.integers(0, 6), staleness=st.none() | st.integers(0, 3))
    def begin(self, depth, prefill, staleness):
        self.depth, self.prefill, self.staleness = depth, prefill, staleness
        self.most = depth
        self.buffer = self.loop.run_until_complete(self.made())
        self.settle()

    async def made(self):
        return GroupBuffer(
            self.depth, self.prefill, self.staleness, on_drop=lambda one: self.dropped.append(one.number)
        )

    def settle(self):
        """Let everything happen that can, and look at what has come of it."""
        self.loop.run_until_complete(turns(12 + 4 * (len(self.putting) + len(self.taking))))  # one wakes the next
        for number, task in list(self.putting.items()):
            if task.done():
                del self.putting[number]
                if task.exception() is None:
                    self.put.append(number)
                    assert task.result() == (number not in self.dropped) or number in self.given
                else:
                    assert isinstance(task.exception(), Closed | ValueError)
                    self.withdrawn.append(number)
        for wanted, version, task in list(self.taking):
            if task.done():
                self.taking.remove((wanted, version, task))
                if task.cancelled():
                    continue
                if task.exception() is not None:
                    assert isinstance(task.exception(), Closed)
                    assert self.closed
                    continue
                taken = task.result()
                assert len(taken) == wanted or self.ended
                if self.staleness is not None:
                    assert all(self.version - oldest_version(one, self.version) <= self.staleness for one in taken)
                self.given += numbers(taken)

    @rule(age=st.integers(0, 4))
    def puts(self, age):
        number, self.count = self.count, self.count + 1
        made = group(number, [f"v{max(0, self.version - age)}"])
        self.putting[number] = self.loop.create_task(self.buffer.put(made))
        self.settle()

    @rule(wanted=st.integers(1, 5))
    def takes(self, wanted):
        self.most = max(self.most, wanted)
        self.taking.append((wanted, self.version, self.loop.create_task(self.buffer.take(wanted))))
        self.settle()

    @rule(which=st.integers(0, 9))
    def cancels(self, which):
        if self.taking:
            self.taking[which % len(self.taking)][2].cancel()
            self.settle()

    @rule()
    def advances(self):
        self.version += 1
        self.buffer.advance(self.version)
        self.settle()

    @rule()
    def ends(self):
        if self.count > 6:
            self.ended = True
            self.buffer.end()
            self.settle()

    @rule()
    def closes(self):
        if self.count > 9:
            self.closed = True
            self.buffer.close()
            self.settle()

    @invariant()
    def none_is_lost_or_given_twice(self):
        if not hasattr(self, "buffer"):
            return
        waiting = numbers(self.buffer.shelf.waiting)
        seen = sorted([*self.given, *self.dropped, *waiting])
        assert len(set(seen)) == len(seen)
        assert seen == sorted(self.put)
        assert len(waiting) <= max(self.most, self.prefill) or self.ended
        assert self.buffer.shelf.put == len(self.given) + len(self.dropped) + len(waiting)

    @invariant()
    def nobody_waits_without_need(self):
        if not hasattr(self, "buffer") or self.closed:
            return
        shelf = self.buffer.shelf
        if self.putting:
            assert not shelf.room()
            assert not self.ended
        if self.taking:
            assert not shelf.ready(self.taking[0][0])

    def teardown(self):
        if hasattr(self, "buffer"):
            self.closed = True
            self.buffer.close()
            self.settle()
            assert not self.putting
            assert not self.taking
        self.loop.close()


@pytest.mark.property
def test_any_history_of_a_buffer_gives_each_group_once_or_counts_it_as_dropped():
    run_state_machine_as_test(
        BufferMachine, settings=settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
    )


CAPACITIES = [  # what differs from 64 at a time and batches of 4 that may not be stale, and the room
    ({}, 4),
    ({"running": 4}, 0),
    ({"accepted": 4}, 0),
    ({"accepted": 4, "version": 1}, 4),
    ({"staleness": 1}, 8),
    ({"staleness": 1, "concurrency": 5}, 5),
    ({"staleness": 1, "concurrency": 5, "running": 3}, 2),
    ({"staleness": 9, "running": 4, "accepted": 40}, -4),
    ({"staleness": None, "accepted": 10**6, "running": 60}, 4),
    ({"first": 7, "version": 8, "accepted": 4}, 4),
]


def test_the_rule_of_capacity():
    for state, room in CAPACITIES:
        assert Capacity(**{"concurrency": 64, "batch": 4, "staleness": 0, **state}).room == room, state


@settings(max_examples=examples(200), deadline=None)
@given(
    st.integers(1, 6),
    st.integers(1, 4),
    st.integers(0, 3) | st.none(),
    st.lists(st.sampled_from(["ask", "cancel", "accept", "fail", "drop", "advance"]), max_size=60),
)
@pytest.mark.property
def test_a_gate_never_lets_in_more_than_the_rule_and_keeps_nobody_out_without_need(concurrency, batch, eta, events):
    async def main():
        capacity = Capacity(concurrency=concurrency, batch=batch, staleness=eta)
        gate, waiting, inside = CapacityGate(capacity), [], 0
        for event in events:
            if event == "ask":
                waiting.append(asyncio.create_task(gate.admitted()))
            elif event == "cancel" and waiting:
                waiting.pop().cancel()
            elif event == "accept" and inside:
                gate.accepted()
                inside -= 1
            elif event == "fail" and inside:
                gate.failed()
                inside -= 1
            elif event == "drop" and capacity.accepted:
                gate.dropped()
            elif event == "advance":
                gate.advance(capacity.version + 1)
            await turns()
            let_in = [task for task in waiting if task.done()]
            assert waiting[: len(let_in)] == let_in  # in the order in which they asked
            del waiting[: len(let_in)]
            for _ in let_in:
                gate.started()
            inside += len(let_in)
            assert capacity.running == inside <= concurrency
            if eta is not None:
                assert capacity.accepted + capacity.running <= (eta + capacity.version + 1) * batch
            assert not waiting or capacity.room <= 0
            assert gate.waiting == len(waiting)
        gate.close()
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert all(isinstance(end, Closed) for end in ends)

    asyncio.run(main())
