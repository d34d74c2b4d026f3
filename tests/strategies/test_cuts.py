"""Arrivals → cuts: when each strategy cuts what waits, why, and whom it chooses."""

from __future__ import annotations

import math
from functools import partial

import pytest

from gpuinfer.api import BatchRecord, Limits, Priority, QueueView, Reason, Request
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.strategies.priority import ByPriority
from gpuinfer.strategies.shares import CLIENTS_KEPT, FairClients, give_up
from gpuinfer.testing import waiting

HIGH, NORMAL, LOW = Priority


def learnt(build, alpha, beta, sizes=(1,), times=1):
    """A strategy that has seen batches of these sizes, each of which took alpha·rows + beta seconds."""
    strategy = build()
    for rows in list(sizes) * times:
        strategy.observe(BatchRecord(rows, rows, 0.0, alpha * rows + beta, 0.0, Reason.FREE))
    return strategy


PLAIN, WAITS = Dynamic, partial(Dynamic, max_wait=2.0)
COSTLY = partial(learnt, Dynamic, 0.0, 0.01)  # has seen one batch of one row that took 10 ms
TARGET = partial(learnt, partial(Adaptive, latency_target=0.05), 0.0005, 0.005, range(1, 17), 25)
TIGHT = partial(learnt, partial(Adaptive, latency_target=0.010), 0.0005, 0.005, range(1, 17), 25)
SOON = {"live": 2, "thinking": 1, "think_s": 0.0001}  # another client comes back soon
CROWD = {"live": 60, "thinking": 50, "think_s": 0.004}
SHARED = {"live": 8, "thinking": 4, "think_s": 1e-4}
DATED = {"deadlines": [1.0 + 0.0065 + 0.001, 9.0], **CROWD}  # the first must go nearly at once


@pytest.mark.parametrize(
    ("build", "arrivals", "view", "cut"),
    [
        pytest.param(WAITS, [1.0], {"max_rows": 4}, 3.0, id="a lone request waits its full delay"),
        pytest.param(WAITS, [1.0, 2.5], {"max_rows": 4}, 3.0, id="a later arrival does not extend the wait"),
        pytest.param(WAITS, [1.0, 1.5, 1.6, 1.7], {"max_rows": 4}, 1.0, id="a full batch goes at once"),
        pytest.param(WAITS, [1.0, 1.5, 1.6, 1.7, 1.8], {"max_rows": 4}, 1.0, id="more than a batch too"),
        pytest.param(COSTLY, [1.0], {}, 1.0, id="no client is known that may still ask"),
        pytest.param(COSTLY, [1.0], {"live": 9, "thinking": 8}, 1.0, id="no think time is known"),
        pytest.param(COSTLY, [1.0], {"live": 9, "thinking": 8, "think_s": 0.09}, 1.0, id="the next comes too late"),
        pytest.param(COSTLY, [1.0] * 4, {"max_rows": 4, **SHARED}, 1.0, id="the batch is full"),
        pytest.param(
            COSTLY, [1.0], {"rows": 1000, "max_rows": 4096, "enough_rows": 512, **SOON}, 1.0, id="enough rows"
        ),
        pytest.param(COSTLY, [1.0] * 4, {"in_flight": 2, **SHARED}, 1.0, id="this lane has its share"),
        pytest.param(PLAIN, [1.0], SOON, 1.0, id="no cost is known"),
        pytest.param(COSTLY, [1.0], SOON, 1.0008, id="it waits for a few think times"),
        pytest.param(COSTLY, [1.0], {**SOON, "think_s": 0.004}, 1.01, id="never longer than an extra batch costs"),
        pytest.param(COSTLY, [1.0], {**SOON, "think_s": 0.006}, 1.0, id="not when that costs more than it saves"),
        pytest.param(TARGET, [1.0, 1.001], CROWD, pytest.approx(1.011, abs=0.008), id="adaptive: a relaxed deadline"),
        pytest.param(TARGET, [1.0, 1.001], DATED, pytest.approx(1.0005, abs=0.0006), id="adaptive: a pressing one"),
    ],
)
def test_when_it_cuts(build, arrivals, view, cut):
    assert max(build().cut_at(waiting(arrivals, **view)), arrivals[0]) == pytest.approx(cut)


def test_a_wait_counts_from_when_a_lane_became_free():
    strategy = COSTLY()
    strategy.observe(BatchRecord(1, 1, 1.49, 0.01, 0.0, Reason.FREE))
    assert strategy.cut_at(waiting([1.0], now=1.5, **SOON)) == pytest.approx(1.5008)


@pytest.mark.parametrize(
    ("build", "arrivals", "view", "chosen", "reason"),
    [
        (WAITS, [1.0] * 4, {"max_rows": 4}, 4, Reason.FULL),
        (WAITS, [1.0], {"live": 1}, 1, Reason.CLIENTS),
        (WAITS, [1.0], {"now": 3.0}, 1, Reason.WAITED),
        (PLAIN, [1.0], {}, 1, Reason.FREE),
        (partial(Dynamic, max_wait=0.0), [1.0], {}, 1, Reason.FREE),
        (PLAIN, [1.0] * 2, {"rows": 5, "enough_rows": 8}, 1, Reason.CAP),
        (PLAIN, [1.0] * 2, {"live": 4, "thinking": 2, "in_flight": 2}, 2, Reason.CAP),
        (PLAIN, [1.0] * 32, {"live": 32, "in_flight": 2}, 16, Reason.CLIENTS),  # shared alike between the lanes
        (COSTLY, [1.0], {"now": 2.0, **SOON}, 1, Reason.GAIN),  # a learnt wait that ran out
        (PLAIN, [1.0] * 4, {"rows": 2, "max_rows": 6}, 3, Reason.FULL),  # as many as the backend takes
        (partial(Dynamic, max_rows=4), [1.0] * 4, {"rows": 2, "max_rows": 6}, 2, Reason.CAP),
        (partial(Dynamic, max_rows=3), [1.0] * 4, {"rows": 2, "max_rows": 6}, 1, Reason.CAP),  # no block is split
        (partial(Dynamic, max_rows=2), [1.0] * 2, {"rows": [5, 1], "max_rows": 6}, 1, Reason.CAP),  # it goes alone
        (partial(Dynamic, max_rows=99), [1.0] * 3, {"rows": [3, 3, 1], "max_rows": 6}, 2, Reason.FULL),
        (TARGET, [1.0, 1.001], {"now": 1.0011, **DATED}, 2, Reason.DEADLINE),
        (TIGHT, [1.0] * 16, {"arrival_rate": 5000.0}, 16, Reason.FREE),  # smaller ones could not serve what arrives
    ],
)
def test_whom_it_chooses_and_why(build, arrivals, view, chosen, reason):
    view = waiting(arrivals, **view)
    assert (list(build().select(view)), build().reason(view)) == (list(view.waiting[:chosen]), reason)


def test_a_batch_is_no_larger_than_the_target_allows():
    view = waiting([1.0] * 16, arrival_rate=100.0)
    assert 8 <= len(TIGHT().select(view)) <= 10
    assert TIGHT().reason(view) is Reason.CAP


def test_blocks_that_never_add_up_to_a_size_are_not_cut_short_to_see_it():
    strategy, sizes = Adaptive(), []
    view = waiting([1.0] * 5, rows=100, max_rows=1024)
    for _ in range(60):
        rows = sum(request.rows for request in strategy.select(view))
        strategy.account(strategy.select(view), view.now)
        strategy.observe(BatchRecord(rows, rows // 100, 1.0, 0.005 + 1e-5 * rows, 0.0, Reason.FREE))
        sizes.append(rows)
    assert (set(sizes[:30]), set(sizes[30:])) == ({200, 500}, {500})


# By priority


def asked(priority=NORMAL, rows=1, arrived=1.0, client=None, name=None):
    return Request(name, rows, arrived, priority, math.inf, client=client)


def queue_of(*requests, now=1.0, max_rows=8, slots=None, enough_rows=None):
    limits = Limits(max_rows, slots=slots, enough_rows=enough_rows)
    return QueueView(requests, sum(classes(requests)), now, limits, class_rows=classes(requests))


def classes(batch):
    return [sum(request.rows for request in batch if request.priority == priority) for priority in Priority]


BY_ROW = partial(learnt, ByPriority, 0.01, 0.0, (1, 2, 4, 8))
FLAT = partial(learnt, ByPriority, 0.0, 0.01, (1, 2, 4, 8))
STRICT = partial(ByPriority, mode="strict", ageing=1.0)
CROWDED = [asked(HIGH, arrived=0.5) for _ in range(40)]
LOWS = [asked(LOW) for _ in range(20)]


@pytest.mark.parametrize(
    ("build", "requests", "slots", "chosen", "reason"),
    [
        pytest.param(
            FLAT, [asked(HIGH, arrived=0.99), *LOWS], None, [1, 0, 7], Reason.FULL, id="company costs nothing"
        ),
        pytest.param(
            BY_ROW, [asked(HIGH, arrived=0.92), *LOWS], None, [1, 0, 0], Reason.CAP, id="it has waited enough"
        ),
        pytest.param(
            BY_ROW, [asked(HIGH, arrived=0.5), *LOWS], 8, [1, 0, 7], Reason.FULL, id="slots are not kept free"
        ),
        pytest.param(BY_ROW, [*CROWDED, *LOWS], None, None, Reason.FULL, id="a class beyond its share"),
    ],
)
def test_how_much_company_a_higher_class_bears(build, requests, slots, chosen, reason):
    strategy, view = build(), queue_of(*requests, slots=slots)
    batch = strategy.select(view)
    assert sum(classes(batch)) == (8 if chosen is None else sum(chosen))
    assert chosen in (None, classes(batch))
    assert strategy.reason(view) is reason


FLOOD = [asked(client="a", name=f"a{number}", rows=2) for number in range(9)]
OTHERS = [asked(client="b", name=f"b{number}") for number in range(9)]


def old(waited):
    """One of the lowest class that has waited for so long, and two that come now."""
    now = [asked(priority, arrived=10.0, name=priority.name.lower()) for priority in (NORMAL, HIGH)]
    return [asked(LOW, arrived=10.0 - waited, name="low"), *now]


@pytest.mark.parametrize(
    ("build", "requests", "now", "names"),
    [
        pytest.param(ByPriority, FLOOD + OTHERS, 1.0, "a0 b0 b1 a1 b2 b3", id="clients take turns by rows"),
        pytest.param(STRICT, old(0.9), 10.0, "high normal low", id="strict: none is old"),
        pytest.param(STRICT, old(1.1), 10.0, "high low normal", id="strict: low counts as normal"),
        pytest.param(STRICT, old(2.1), 10.0, "low high normal", id="strict: low counts as high"),
    ],
)
def test_in_which_order(build, requests, now, names):
    assert [request.payload for request in build().select(queue_of(*requests, now=now))] == names.split()


def serve(strategy, make, batches, **view):
    """Rows of each class over many batches while `make` keeps the queue filled."""
    served = [0, 0, 0]
    for number in range(1, batches + 1):
        seen = queue_of(*make(number), now=float(number), **view)
        batch = strategy.select(seen)
        strategy.account(batch, seen.now)
        served = [before + more for before, more in zip(served, classes(batch), strict=True)]
    return served


@pytest.mark.parametrize(("shares", "rows"), [((50, 30, 20), 1), ((60, 30, 10), 3), ((50, 30, 20), 8)])
def test_shares_hold_over_time_though_blocks_are_not_split(shares, rows):
    def make(number):
        return [asked(priority, rows, number - 1.0) for _ in range(24) for priority in Priority]

    served = serve(ByPriority(shares=shares), make, 400)
    assert [100 * part / sum(served) for part in served] == pytest.approx(shares, abs=1.5)


@pytest.mark.parametrize("mode", ["shares", "strict"])
def test_blocks_wider_than_is_enough_are_not_passed_over_for_ever(mode):
    wide = asked(LOW, 12, arrived=0.5)

    def make(now):
        return [wide, asked(HIGH, 12, arrived=now - 0.5), *(asked(HIGH, 1, arrived=now - 0.5) for _ in range(9))]

    assert serve(ByPriority(mode=mode, ageing=3), make, 1, max_rows=64, enough_rows=8)[HIGH] > 0
    assert serve(ByPriority(mode=mode, ageing=3), make, 39, max_rows=64, enough_rows=8)[LOW] > 0


def full(high, normal, low):
    return queue_of(*([asked(HIGH)] * high + [asked(NORMAL)] * normal + [asked(LOW)] * low))


@pytest.mark.parametrize(
    ("waits", "arriving", "given_up"),
    [
        pytest.param((0, 0, 100), HIGH, [0, 0, 1], id="a lower class uses more than its room"),
        pytest.param((0, 80, 20), HIGH, [0, 1, 0], id="the lowest keeps its room"),
        pytest.param((0, 60, 40), HIGH, [0, 0, 1], id="the lowest that uses too much goes first"),
        pytest.param((0, 60, 40), LOW, [0, 0, 0], id="one of a class beyond its room is turned away itself"),
        pytest.param((80, 20, 0), LOW, [1, 0, 0], id="even the highest gives way to one that has room left"),
        pytest.param((60, 20, 20), HIGH, [0, 0, 0], id="beyond its room it takes no other class's"),
        pytest.param((60, 10, 30), HIGH, [0, 0, 1], id="but what a lower class has beyond its own"),
        pytest.param((20, 70, 10), NORMAL, [0, 0, 0], id="no higher class gives way to one beyond its room"),
    ],
)
def test_a_full_queue_gives_up(waits, arriving, given_up):
    assert classes(give_up(full(*waits), asked(arriving), (0.5, 0.3, 0.2))) == given_up


def test_a_request_is_told_when_its_class_will_have_been_served():
    view = full(0, 10, 39)
    assert ByPriority().retry_after(view, asked(LOW)) is None
    for mode, seconds in (("shares", 40 / 0.2 * 0.01), ("strict", 50 * 0.01)):
        strategy = learnt(partial(ByPriority, mode=mode), 0.01, 0.0, (8,))
        assert strategy.retry_after(view, asked(LOW)) == pytest.approx(seconds)


def test_clients_that_are_gone_are_forgotten():
    clients = FairClients()
    for number in range(3 * CLIENTS_KEPT):
        clients.served([asked(client=number)])
    assert len(clients._ends) <= CLIENTS_KEPT
