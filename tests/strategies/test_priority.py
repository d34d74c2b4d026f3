import math

import pytest

from gpuinfer.api import BatchRecord, Limits, Priority, QueueView, Reason, Request
from gpuinfer.strategies.priority import ByPriority
from gpuinfer.strategies.shares import CLIENTS_KEPT, FairClients, give_up

HIGH, NORMAL, LOW = Priority


def queue_of(*requests, now=1.0, max_rows=8, slots=None):
    rows = [sum(request.rows for request in requests if request.priority == priority) for priority in Priority]
    deadline = min(request.deadline for request in requests)
    limits = Limits(max_rows, slots=slots)
    return QueueView(requests, sum(rows), now, limits, deadline=deadline, class_rows=rows)


def asked(priority=NORMAL, rows=1, arrived=1.0, client=None, deadline=math.inf, name=None):
    return Request(name, rows, arrived, priority, deadline, client=client)


def learnt(*sizes, alpha, beta, **options):
    """A strategy that has seen batches of these sizes."""
    strategy = ByPriority(**options)
    for rows in sizes:
        strategy.observe(BatchRecord(rows, rows, 0.0, alpha * rows + beta, 0.0, Reason.FREE))
    return strategy


def classes(batch):
    return [sum(request.rows for request in batch if request.priority == priority) for priority in Priority]


# Which classes


def serve(strategy, make, batches, max_rows=8):
    """Rows of each class over many batches while `make` keeps the queue filled."""
    served = [0, 0, 0]
    for number in range(batches):
        view = queue_of(*make(number), now=float(number + 1), max_rows=max_rows)
        batch = strategy.select(view)
        strategy.account(batch, view.now)
        served = [before + more for before, more in zip(served, classes(batch), strict=True)]
    return served


@pytest.mark.parametrize(
    ("shares", "rows"),
    [
        pytest.param((50, 30, 20), 1, id="rows one by one"),
        pytest.param((60, 30, 10), 3, id="blocks that do not fill a batch"),
        pytest.param((50, 30, 20), 8, id="blocks as wide as a batch"),
    ],
)
def test_shares_hold_over_time_though_blocks_are_not_split(shares, rows):
    def make(number):
        return [asked(priority, rows, float(number)) for _ in range(24) for priority in Priority]

    served = serve(ByPriority(shares=shares), make, 400)
    assert [100 * part / sum(served) for part in served] == pytest.approx(shares, abs=1.5)


# The order inside a class


def names(strategy, *requests, **view):
    return [request.payload for request in strategy.select(queue_of(*requests, **view))]


def test_clients_take_turns_by_rows():
    flood = [asked(client="a", name=f"a{number}", rows=2) for number in range(9)]
    others = [asked(client="b", name=f"b{number}") for number in range(9)]
    assert names(ByPriority(), *flood, *others) == ["a0", "b0", "b1", "a1", "b2", "b3"]


@pytest.mark.parametrize(
    ("waited", "first"),
    [
        pytest.param(0.9, ["high", "normal", "low"], id="nobody is old"),
        pytest.param(1.1, ["high", "low", "normal"], id="low counts as normal, before what came later"),
        pytest.param(2.1, ["low", "high", "normal"], id="low counts as high, before what came later"),
    ],
)
def test_in_strict_mode_a_request_rises_a_class_for_each_ageing(waited, first):
    now = 10.0
    requests = [asked(LOW, arrived=now - waited, name="low")]
    requests += [asked(priority, arrived=now, name=priority.name.lower()) for priority in (NORMAL, HIGH)]
    assert names(ByPriority(mode="strict", ageing=1.0), *requests, now=now) == first


def test_clients_that_are_gone_are_forgotten():
    clients = FairClients()
    for number in range(3 * CLIENTS_KEPT):
        clients.served([asked(client=number)])
    assert len(clients._ends) <= CLIENTS_KEPT


# Company


def test_with_a_flat_service_time_a_batch_is_filled_up():
    strategy = learnt(1, 2, 4, 8, alpha=0.0, beta=0.01)
    view = queue_of(asked(HIGH, arrived=0.99), *(asked(LOW) for _ in range(20)))
    assert len(strategy.select(view)) == 8


def test_a_high_request_that_has_waited_for_a_full_batch_does_not_wait_for_a_second():
    strategy = learnt(1, 2, 4, 8, alpha=0.01, beta=0.0)
    view = queue_of(asked(HIGH, arrived=0.92), *(asked(LOW) for _ in range(20)))
    assert classes(strategy.select(view)) == [1, 0, 0]
    assert strategy.reason(view) is Reason.CAP


@pytest.mark.parametrize("mode", ["shares", "strict"])
def test_blocks_wider_than_is_enough_keep_their_class_and_are_not_passed_over_for_ever(mode):
    strategy, served = ByPriority(mode=mode, ageing=3), [0, 0, 0]
    wide = asked(LOW, 12, arrived=0.5)
    for now in range(1, 40):
        crowd = [asked(HIGH, 1, arrived=now - 0.5) for _ in range(9)]
        view = queue_of(wide, asked(HIGH, 12, arrived=now - 0.5), *crowd, now=float(now))
        view = QueueView(view.waiting, view.rows, view.now, Limits(64, enough_rows=8), class_rows=view.class_rows)
        batch = strategy.select(view)
        if now == 1:
            assert classes(batch)[HIGH] > 0  # although the oldest is of class low
        strategy.account(batch, view.now)
        served = [before + more for before, more in zip(served, classes(batch), strict=True)]
    assert served[LOW] > 0


def test_slots_are_not_kept_free_for_the_sake_of_company():
    strategy = learnt(1, 2, 4, 8, alpha=0.01, beta=0.0)
    view = queue_of(asked(HIGH, arrived=0.5), *(asked(LOW) for _ in range(20)), slots=8)
    assert len(strategy.select(view)) == 8


def test_a_class_beyond_its_share_does_not_shorten_batches():
    strategy = learnt(1, 2, 4, 8, alpha=0.01, beta=0.0)
    crowd = [asked(HIGH, arrived=0.5) for _ in range(40)]
    assert len(strategy.select(queue_of(*crowd, *(asked(LOW) for _ in range(20))))) == 8


# A full queue


def full(high, normal, low):
    requests = [asked(p) for p, many in zip(Priority, (high, normal, low), strict=True) for _ in range(many)]
    return queue_of(*requests)


SHARES = (0.5, 0.3, 0.2)


@pytest.mark.parametrize(
    ("waits", "arriving", "given_up"),
    [
        pytest.param((0, 0, 100), HIGH, [0, 0, 1], id="a lower class uses more than its room"),
        pytest.param((0, 80, 20), HIGH, [0, 1, 0], id="the lowest keeps its room"),
        pytest.param((0, 60, 40), HIGH, [0, 0, 1], id="the lowest that uses too much goes first"),
        pytest.param((0, 60, 40), LOW, [0, 0, 0], id="one of a class beyond its room is turned away itself"),
        pytest.param((80, 20, 0), LOW, [1, 0, 0], id="even the highest gives way to one that has room left"),
        pytest.param((60, 20, 20), HIGH, [0, 0, 0], id="beyond its room it takes nobody else's"),
        pytest.param((60, 10, 30), HIGH, [0, 0, 1], id="but what a lower class has beyond its own"),
        pytest.param((20, 70, 10), NORMAL, [0, 0, 0], id="nobody of a higher class gives way to one beyond its room"),
    ],
)
def test_a_full_queue_gives_up(waits, arriving, given_up):
    assert classes(give_up(full(*waits), asked(arriving), SHARES)) == given_up


def test_a_request_is_told_when_its_class_will_have_been_served():
    view = full(0, 10, 39)
    assert ByPriority().retry_after(view, asked(LOW)) is None
    strategy = learnt(8, alpha=0.01, beta=0.0)
    assert strategy.retry_after(view, asked(LOW)) == pytest.approx(40 / 0.2 * 0.01)
    strict = learnt(8, alpha=0.01, beta=0.0, mode="strict")
    assert strict.retry_after(view, asked(LOW)) == pytest.approx(50 * 0.01)


# When
