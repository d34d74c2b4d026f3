"""The coordinator's core under arbitrary histories: each unit is kept once, and is never lost."""

from __future__ import annotations

import pytest
from counts import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from gpuinfer.cluster.coordinator_core import CoordinatorCore, RangePolicy
from gpuinfer.division import WorkRange, intervals_of

NODES = st.integers(0, 3)


def item(unit):
    return str(unit).encode()


def work(start, stop):
    return WorkRange(start, stop, tuple(map(item, range(start, stop))))


class CoreMachine(RuleBasedStateMachine):
    """A model with sets of numbers: what was read, what is on the disk, what is being written, what nodes believe."""

    @initialize(
        total=st.integers(0, 60),
        known=st.booleans(),
        kept=st.sets(st.integers(0, 59), max_size=20),
        least=st.integers(1, 5),
        block=st.sampled_from([1, 4]),
    )
    def begin(self, total, known, kept, least, block):
        self.total = total
        self.disk = {unit for unit in kept if unit < total}
        self.unread = [unit for unit in range(total) if unit not in self.disk]
        self.writing = []  # (node, start, stop) of uploads under way
        self.nodes = {}  # of each node that the core knows: ranges that it believes are its own
        self.now, self.joined = 0.0, 0
        policy = RangePolicy(least=least, block=block, first_unit_s=200.0, hung_least_s=100.0)
        self.core = CoordinatorCore(policy, total=total if known else None, kept=intervals_of(self.disk))

    @rule(parallel=st.integers(1, 6))
    def join(self, parallel):
        self.nodes[self.joined] = []
        self.core.join(self.joined, self.now, name="n", parallel=parallel)
        self.joined += 1

    @rule(data=st.data())
    @precondition(lambda self: self.nodes)
    def exchange(self, data):
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        held = sum(len(one) for one in self.nodes[node])
        self.core.heard(node, self.now, data.draw(st.integers(0, 50)), data.draw(st.integers(0, held)))
        grant = self.core.grant(node, self.now)
        for one in grant.ranges:
            assert one == work(one.start, one.stop)
            self.nodes[node].append(one)
        self.read(node, grant.fresh)

    def read(self, node, units):
        """As much as is left, in ranges as the gaps of an earlier run allow; after the last the input has ended."""
        for start, stop in intervals_of(self.unread[:units]):
            self.core.lease(node, work(start, stop), self.now)
            if node in self.nodes:
                self.nodes[node].append(work(start, stop))
        del self.unread[:units]
        if not self.unread and units:
            self.core.ended_input(self.total)

    @rule(data=st.data())
    @precondition(lambda self: any(self.nodes.values()))
    def release(self, data):
        node = data.draw(st.sampled_from([node for node, held in self.nodes.items() if held]))
        one = self.nodes[node].pop(data.draw(st.integers(0, len(self.nodes[node]) - 1)))
        begin = data.draw(st.integers(one.start, one.stop - 1))
        if begin > one.start:
            self.nodes[node].append(one.part(one.start, begin))
        self.core.released(node, begin, one.stop)

    @rule(data=st.data(), late=st.booleans())
    def upload(self, data, late):
        """A node sends one of its ranges, or one that was never its own, or once more what it has sent."""
        node = data.draw(NODES)
        held = self.nodes.get(node, [])
        if held and not late:
            one = data.draw(st.sampled_from(held))
            start, stop = one.start, one.stop
        else:
            start = data.draw(st.integers(0, 59))
            stop = data.draw(st.integers(start, 60))
        units = set(range(start, stop))
        written = self.disk | {unit for _, begin, end in self.writing for unit in range(begin, end)}
        fine = bool(units) and not units & written and all(unit < self.total for unit in units)
        fine = fine and not units & set(self.unread)
        assert self.core.may_keep(node, start, stop) is fine
        if fine:
            self.writing.append((node, start, stop))
            return
        read = set(range(self.total)) - set(self.unread)
        assert self.core.missing(start, stop) == intervals_of((units & read) - written)

    @rule(data=st.data(), works=st.booleans())
    @precondition(lambda self: self.writing)
    def finish_upload(self, data, works):
        node, start, stop = self.writing.pop(data.draw(st.integers(0, len(self.writing) - 1)))
        if not works:
            self.core.not_kept(node, start, stop)
            return
        self.core.kept(node, start, stop, self.now)
        self.disk |= set(range(start, stop))
        for held in self.nodes.values():
            held[:] = [one for one in held if not (start <= one.start and one.stop <= stop)]

    @rule(data=st.data())
    @precondition(lambda self: self.nodes)
    def leave(self, data):
        node = data.draw(st.sampled_from(sorted(self.nodes)))
        del self.nodes[node]
        self.core.leave(node, self.now)

    @rule(seconds=st.sampled_from([0.1, 1.0, 7.0, 31.0]))
    def wait(self, seconds):
        self.now += seconds
        for lost in self.core.expire(self.now):
            assert lost.presence in ("lost", "hung")
            del self.nodes[lost.node]

    @invariant()
    def each_unit_is_in_one_place(self):
        counts = self.core.counts
        assert counts.kept == len(self.disk)
        assert list(self.core.kept_intervals) == intervals_of(self.disk)
        assert counts.keeping == sum(stop - start for _, start, stop in self.writing)
        read = self.total - len(self.unread)
        assert counts.kept + counts.keeping + counts.leased + counts.pending == read
        assert min(counts.leased, counts.pending, counts.copied) >= 0
        assert sum(node.held for node in self.core.nodes if node.presence == "here") >= counts.leased

    def teardown(self):
        """Whatever has happened: one good node brings the run to its end."""
        if not hasattr(self, "core"):
            return
        for _, start, stop in self.writing:
            self.core.not_kept(0, start, stop)
        for node in list(self.nodes):
            self.core.leave(node, self.now)
        self.core.join(99, self.now, name="good")
        done, turns = 0, 0
        if not self.total:
            self.core.ended_input(0)
        while not self.core.over:
            turns += 1
            assert turns < 200, f"not over: {self.core.counts}"
            self.now += 1.0
            self.core.heard(99, self.now, done, 0)
            grant = self.core.grant(99, self.now)
            self.nodes[99] = list(grant.ranges)
            self.read(99, grant.fresh)
            if not grant.fresh and not self.unread:
                self.core.ended_input(self.total)
            for one in self.nodes[99]:
                assert not set(range(one.start, one.stop)) & self.disk
                assert self.core.may_keep(99, one.start, one.stop)
                self.core.kept(99, one.start, one.stop, self.now)
                self.disk |= set(range(one.start, one.stop))
                done += len(one)
        assert self.disk == set(range(self.total))


@pytest.mark.property
def test_any_history_keeps_each_unit_once_and_loses_none():
    run_state_machine_as_test(
        CoreMachine, settings=settings(max_examples=examples(300), stateful_step_count=40, deadline=None)
    )


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_any_history_keeps_each_unit_once_many_times_over():
    run_state_machine_as_test(
        CoreMachine, settings=settings(max_examples=examples(5_000), stateful_step_count=80, deadline=None)
    )
