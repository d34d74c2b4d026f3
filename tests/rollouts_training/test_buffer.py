"""Groups that wait for the trainer: each is given once, in order, none too old, and nobody waits for ever."""

import asyncio

import pytest
from counts import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from played import group

from gpuinfer.errors import Closed
from gpuinfer.rollouts.buffer import GroupBuffer
from gpuinfer.rollouts.record import oldest_version, version_lags, version_number

PATIENCE_S = 60.0


def run(main):
    async def bounded():
        async with asyncio.timeout(PATIENCE_S):
            return await main

    return asyncio.run(bounded())


async def turns(number=8):
    for _ in range(number):
        await asyncio.sleep(0)


def numbers(groups):
    return [one.number for one in groups]


@pytest.mark.parametrize(
    ("name", "number"), [("", 0), ("v7", 7), ("policy@v12", 12), ("3", 3), ("a@b@v2", 2), ("base", 0), ("v", 0)]
)
def test_numbers_of_versions(name, number):
    assert version_number(name) == number


def test_a_group_is_as_old_as_its_oldest_trainable_token():
    assert oldest_version(group(0, ["v5", "v3", "v4"])) == 3
    assert oldest_version(group(0, ["v5"], opponent=["v1"])) == 5
    assert oldest_version(group(0, ()), otherwise=9) == 9
    assert version_lags([group(0, ["v5", "v3"]), group(1, ["policy@v6"])], 6) == [3, 0]


def test_what_is_too_old_is_dropped_whether_it_waits_or_comes():
    async def main():
        gone = []
        buffer = GroupBuffer(depth=8, max_staleness=1, on_drop=gone.append)
        for number, versions in enumerate([["v0"], ["v2", "v1"], ["v2"]]):
            assert await buffer.put(group(number, versions))
        assert buffer.advance(2) == 1
        assert numbers(gone) == [0]
        assert not await buffer.put(group(3, ["v3", "v0"]))
        assert numbers(gone) == [0, 3]
        assert numbers(await buffer.take(2)) == [1, 2]
        assert buffer.shelf.counts() == {"put": 4, "given": 2, "dropped": 2, "waiting": 0}

    run(main())


def test_who_waits_for_room_with_what_grows_too_old_does_not_wait_on():
    async def main():
        buffer = GroupBuffer(depth=1, max_staleness=0)
        await buffer.put(group(0, ["v1"]))
        putting = asyncio.create_task(buffer.put(group(1, ["v0"])))
        await turns()
        assert not putting.done()
        buffer.advance(1)
        assert await putting is False

    run(main())


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
