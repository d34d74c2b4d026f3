"""What `priority` promises, whatever arrives: in small numbers always, in large ones in the soak."""

import itertools

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from gpuinfer.api import BatchRecord, Limits, Priority, QueueView, Request
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.engine.queue import Queue
from gpuinfer.engine.scheduler import Cut, next_cut
from gpuinfer.lab.simulate import Offer
from gpuinfer.strategies.priority import ByPriority
from gpuinfer.strategies.shares import give_up
from gpuinfer.testing import waiting

FULL = 8
services = st.sampled_from([ServiceModel(beta=0.01), ServiceModel(alpha=0.002, beta=0.001)])
shares_of_all = st.sampled_from([(50.0, 30.0, 20.0), (10.0, 20.0, 70.0), (90.0, 5.0, 5.0), (20.0, 20.0, 20.0)])
ask = st.builds(
    Offer,
    at=st.sampled_from([0.0, 0.0, 0.001, 0.02, 0.3]),  # after the one before
    rows=st.sampled_from([1, 1, 2, FULL]),
    priority=st.sampled_from(Priority),
    timeout=st.sampled_from([float("inf"), 1.0, 5.0]),
    client=st.sampled_from([None, "a", "b"]),
)
loads = st.lists(ask, min_size=1, max_size=80)


def property_of(*arguments):
    """A test that holds for few of these, and in the soak for many."""

    def decorated(check):
        @pytest.mark.parametrize(
            "examples", [pytest.param(10, id="few"), pytest.param(1000, id="many", marks=pytest.mark.soak)]
        )
        def test(examples):
            settings(max_examples=examples, deadline=None)(given(*arguments)(check))()

        return test

    return decorated


def run(strategy, load, service):
    """Each batch with its time and who waited when it was cut, as one lane serves the load."""
    queue, now, batches, limits = Queue(), 0.0, [], Limits(FULL)
    arrivals = itertools.accumulate(load, lambda before, one: one._replace(at=before.at + one.at))
    coming = sorted(arrivals, key=lambda one: one.at)
    while coming or queue.rows:
        while coming and (coming[0].at <= now or not queue.rows):
            one = coming.pop(0)
            now = max(now, one.at)
            queue.add(request_of(one))
        queue.expire(now)
        if not queue.rows:
            continue
        ((_, view),) = queue.views(now, limits)
        waited, rows = tuple(view.waiting), tuple(view.class_rows)
        cut = next_cut(strategy, queue, now, limits, draining=True)
        assert isinstance(cut, Cut), cut
        batches.append((now, cut.requests, waited, rows))
        seconds = service.seconds(cut.rows)
        strategy.observe(BatchRecord(cut.rows, len(cut.requests), now, seconds, 0.0, cut.reason))
        now += seconds
    return batches


def request_of(one):
    return Request(None, one.rows, one.at, one.priority, one.at + one.timeout, client=one.client)


@property_of(loads, services, shares_of_all)
def test_no_newer_one_of_its_class_goes_before_one_that_has_waited_for_long(load, service, shares):
    for now, batch, waited, _ in run(ByPriority(shares=shares, ageing=0.05), load, service):
        newest = {
            priority: max([waited.index(one) for one in batch if one.priority == priority], default=-1)
            for priority in Priority
        }
        for place, request in enumerate(waited):
            if request not in batch and now - request.arrived >= 0.05:
                assert newest[request.priority] < place


@property_of(loads, services)
def test_in_strict_mode_only_older_ones_keep_out_one_that_has_waited_for_long(load, service):
    for now, batch, waited, _ in run(ByPriority(mode="strict", ageing=0.05), load, service):
        older = 0
        for request in waited:
            if now - request.arrived >= (request.priority + 1) * 0.05 + 1e-9:
                assert request in batch or older + request.rows > FULL
                older += request.rows if request in batch else FULL


crowds = st.lists(
    st.tuples(st.sampled_from(Priority), st.sampled_from([1, 2, 4, FULL]), st.integers(0, 120)), max_size=20
)


@property_of(crowds, services, shares_of_all)
def test_a_class_with_enough_waiting_gets_its_share_less_at_most_four_full_batches(bursts, service, shares):
    load = []
    for priority, rows, many in bursts:
        load += [Offer(0.0, rows, priority)] * many + [Offer(0.1, 1, priority)]
    assume(load)
    lag, most = [0.0] * 3, [0.0] * 3
    for _, batch, _, waited in run(ByPriority(shares=shares), load, service):
        served = [sum(request.rows for request in batch if request.priority == one) for one in Priority]
        for number in Priority:
            if waited[number] - served[number] < 3 * FULL:
                lag[number] = most[number] = 0.0
                continue
            lag[number] += shares[number] / 100 * sum(served) - served[number]
            most[number] = min(most[number], lag[number])
            assert lag[number] - most[number] <= 4 * FULL


@property_of(loads, services)
def test_of_one_client_and_class_the_earliest_deadline_goes_first(load, service):
    for _, batch, waited, _ in run(ByPriority(ageing=1e6), load, service):
        for left in set(waited) - set(batch):
            mine = (left.client, left.priority)
            assert all(one.deadline <= left.deadline for one in batch if (one.client, one.priority) == mine)


blocks = st.lists(st.integers(1, FULL), min_size=30, max_size=30)


@property_of(blocks, blocks, services)
def test_clients_of_a_class_that_always_wait_are_never_further_apart_than_a_block_of_each(ones, others, service):
    served = {"a": 0, "b": 0}
    load = [Offer(0.0, rows, client="a") for rows in ones] + [Offer(0.0, rows, client="b") for rows in others]
    for _, batch, waited, _ in run(ByPriority(), load, service):
        for request in batch:
            served[request.client] += request.rows
        if {request.client for request in set(waited) - set(batch)} == {"a", "b"}:
            assert abs(served["a"] - served["b"]) <= max(ones) + max(others)


classes = st.sampled_from(Priority)


@property_of(
    st.lists(classes, min_size=1, max_size=400), st.integers(1, 5), classes, st.integers(1, FULL), shares_of_all
)
def test_a_class_within_its_room_is_never_given_up(priorities, rows, arriving, wanted, shares):
    view = waiting([0.0] * len(priorities), rows=rows, priorities=priorities)
    share = [part / 100 for part in shares]
    given_up = give_up(view, request_of(Offer(0.0, wanted, arriving)), share)
    room, left = [part * (view.rows + wanted) for part in share], list(view.class_rows)
    for one in given_up:
        assert left[one.priority] > room[one.priority]
        left[one.priority] -= one.rows
        assert one.priority > arriving or view.class_rows[arriving] + wanted <= room[arriving]
    assert not given_up or sum(one.rows for one in given_up) >= wanted
    for priority in Priority:  # the newest of each
        mine = [one for one in view.waiting if one.priority == priority]
        gone = [one for one in mine if one in given_up]
        assert gone == mine[len(mine) - len(gone) :]


def test_a_view_without_rows_by_class_is_served_all_the_same():
    view = waiting([1.0] * 20, max_rows=FULL)
    bare = QueueView(view.waiting, view.rows, view.now, view.limits)
    assert len(ByPriority().select(bare)) == FULL
