"""How many groups may be under way: the rule, and the gate that keeps it in any order of events."""

import asyncio

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.errors import Closed
from gpuinfer.rollouts.buffer import Capacity, CapacityGate

PATIENCE_S = 60.0


@pytest.mark.parametrize(
    ("state", "room"),
    [
        pytest.param({}, 4, id="at first a whole batch, where nothing may be stale"),
        pytest.param({"running": 4}, 0, id="no more than that batch"),
        pytest.param({"accepted": 4}, 0, id="also when it is played and the trainer is at work"),
        pytest.param({"accepted": 4, "version": 1}, 4, id="another once the weights are new"),
        pytest.param({"staleness": 1}, 8, id="one version late: one batch more"),
        pytest.param({"staleness": 1, "concurrency": 5}, 5, id="the concurrency bounds what runs"),
        pytest.param({"staleness": 1, "concurrency": 5, "running": 3}, 2, id="and counts what runs already"),
        pytest.param({"staleness": 9, "running": 4, "accepted": 40}, -4, id="too many, after what was dropped is back"),
        pytest.param({"staleness": None, "accepted": 10**6, "running": 60}, 4, id="without a trainer only concurrency"),
        pytest.param({"first": 7, "version": 8, "accepted": 4}, 4, id="a run that begins at version 7"),
    ],
)
def test_the_rule_of_capacity(state, room):
    assert Capacity(**{"concurrency": 64, "batch": 4, "staleness": 0, **state}).room == room


def run(main):
    async def bounded():
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(bounded())


async def turns(number=5):
    for _ in range(number):
        await asyncio.sleep(0)


def test_a_gate_lets_in_as_many_as_there_is_room_for_in_the_order_in_which_they_asked():
    async def main():
        gate, order = CapacityGate(Capacity(concurrency=10, batch=2, staleness=0)), []

        async def ask(number):
            await gate.admitted()
            gate.started()
            order.append(number)

        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(ask(number))
            await turns()
            assert (order, gate.waiting) == ([0, 1], 4)
            gate.accepted()
            gate.accepted()
            await turns()
            assert order == [0, 1]  # the trainer has not trained on them yet
            gate.advance(1)
            await turns()
            assert order == [0, 1, 2, 3]
            gate.accepted()
            gate.dropped()  # too old: another is played in its place
            await turns()
            assert order == [0, 1, 2, 3, 4]
            gate.failed()
            await turns()
            assert order == [0, 1, 2, 3, 4, 5]

    run(main())


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
            waiting = [task for task in waiting if not task.done()]
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

    run(main())
