import math

import pytest

from gpuinfer.api import BatchRecord, Limits, Priority, QueueView, Reason, Request
from gpuinfer.strategies.priority import ByPriority
from gpuinfer.strategies.service_time import SizeCurve
from gpuinfer.strategies.shares import CLIENTS_KEPT, Credits, FairClients, give_up
from gpuinfer.strategies.timing import CompanyBound
from gpuinfer.testing import waiting

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


@pytest.mark.parametrize(
    ("many", "chosen"),
    [
        pytest.param([99, 99, 99], [5, 3, 2], id="all wait: by shares"),
        pytest.param([99, 0, 99], [5, 0, 5], id="an unused share flows down"),
        pytest.param([0, 99, 99], [0, 8, 2], id="to the next lower class first"),
        pytest.param([99, 99, 0], [5, 5, 0], id="and up where nothing lower waits"),
        pytest.param([1, 99, 99], [1, 7, 2], id="what the highest does not use"),
        pytest.param([0, 0, 99], [0, 0, 10], id="a class alone has everything"),
    ],
)
def test_a_batch_is_shared(many, chosen):
    view = queue_of(*(asked(priority) for priority, count in zip(Priority, many, strict=True) for _ in range(count)))
    view = QueueView(view.waiting, view.rows, 1.0, Limits(10), class_rows=view.class_rows)
    credits = Credits([0.5, 0.3, 0.2])
    assert credits.due(None, 10, view.class_rows) == pytest.approx(chosen)


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


def test_shares_that_leave_something_leave_it_to_the_highest_class_that_waits():
    served = serve(ByPriority(shares=(20, 20, 20)), lambda number: [asked(p) for _ in range(9) for p in Priority], 100)
    assert [part / sum(served) for part in served] == pytest.approx([0.6, 0.2, 0.2], abs=0.03)


def test_a_class_that_was_away_comes_back_without_credit():
    credits = Credits([0.5, 0.3, 0.2])
    for _ in range(50):
        credits.settle(None, [0, 8, 0], [0, 50, 50], 24)
        credits.settle(None, [0, 6, 2], [0, 50, 50], 24)
    assert credits.of(None)[HIGH] == 0
    assert sum(credits.of(None)) == pytest.approx(0)


def test_in_strict_mode_the_highest_goes_first_and_the_rest_flows_down():
    view = queue_of(*(asked(p) for p in (LOW, LOW, NORMAL, NORMAL, HIGH, HIGH, HIGH, LOW)), max_rows=6)
    assert classes(ByPriority(mode="strict").select(view)) == [3, 2, 1]


def test_credits_are_kept_for_each_group_and_not_for_groups_without_end():
    credits = Credits([0.5, 0.3, 0.2])
    for group in range(200):
        credits.settle(group, [8, 0, 0], [50, 50, 50], 24)
    assert credits.of(199)[HIGH] == pytest.approx(-4)
    assert list(credits.of(0)) == [0, 0, 0]


def test_a_class_whose_small_blocks_fit_where_no_others_do_does_not_owe_for_ever():
    def make(number):
        return [*(asked(HIGH) for _ in range(9)), *(asked(p, 3) for p in (NORMAL, LOW) for _ in range(9))]

    strategy = ByPriority(shares=(10, 30, 60))
    serve(strategy, make, 100)
    assert serve(strategy, lambda number: [asked(p) for _ in range(9) for p in Priority], 50)[0] > 0


# The order inside a class


def names(strategy, *requests, **view):
    return [request.payload for request in strategy.select(queue_of(*requests, **view))]


def test_of_one_client_the_earliest_deadline_goes_first():
    requests = [asked(name="late", deadline=9.0), asked(name="never"), asked(name="soon", deadline=5.0)]
    assert names(ByPriority(), *requests, max_rows=2) == ["soon", "late"]


def test_clients_take_turns_by_rows():
    flood = [asked(client="a", name=f"a{number}", rows=2) for number in range(9)]
    others = [asked(client="b", name=f"b{number}") for number in range(9)]
    assert names(ByPriority(), *flood, *others) == ["a0", "b0", "b1", "a1", "b2", "b3"]


def test_a_client_that_had_much_waits_for_those_that_had_less():
    strategy = ByPriority()
    strategy.account([asked(client="a", rows=8)], 1.0)
    assert names(strategy, asked(client="a", name="a"), asked(client="b", name="b"), max_rows=1) == ["b"]


def test_requests_without_a_client_are_one_client():
    flood = [asked(name=number) for number in range(9)]
    assert "b" in names(ByPriority(), *flood, asked(client="b", name="b"), max_rows=2)


def test_whoever_has_waited_for_long_goes_before_whatever_came_later():
    old = [asked(name="old", arrived=1.0, client="a"), asked(name="older than some", arrived=1.5, client="a")]
    new = [asked(name="urgent", arrived=4.0, client="b", deadline=9.0)]
    strategy = ByPriority(ageing=3)
    strategy.account([asked(client="a", rows=8)], 1.0)
    assert names(strategy, *old, *new, now=4.0, max_rows=2) == ["old", "urgent"]
    assert names(strategy, *old, *new, now=4.5, max_rows=2) == ["old", "older than some"]


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


def test_one_that_has_just_come_bears_nearly_a_full_batch_of_company():
    strategy = learnt(1, 2, 4, 8, alpha=0.01, beta=0.0)
    view = queue_of(asked(HIGH, arrived=0.9999), *(asked(LOW) for _ in range(20)))
    assert len(strategy.select(view)) >= 7


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


def test_a_class_that_comes_faster_than_it_can_be_served_alone_bears_any_company():
    company = CompanyBound()
    company.observe(8, 0.08)
    company.observe(1, 0.01)
    company.account([1000, 0, 0], [1000, 0, 0], 1.0)
    assert company.bearable_rows(asked(HIGH, arrived=0.0), 1.0, 1, 8, 1, 0.0) == 8


def test_sizes_between_those_seen_take_a_time_between():
    curve = SizeCurve()
    assert curve.seconds(5) == 0
    for rows, seconds in ((10, 0.02), (40, 0.05)):
        curve.learn(rows, seconds)
    assert [curve.seconds(rows) for rows in (5, 10, 25, 40, 80)] == pytest.approx([0.01, 0.02, 0.035, 0.05, 0.1])


def test_a_larger_batch_that_is_faster_says_that_a_smaller_one_can_be():
    curve = SizeCurve()
    curve.learn(10, 0.06)
    curve.learn(40, 0.05)
    assert curve.seconds(10) == 0.05


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


def test_the_newest_are_given_up_until_the_arriving_block_fits():
    view = queue_of(*(asked(LOW, 2, name=number) for number in range(20)))
    assert [request.payload for request in give_up(view, asked(HIGH, 3), SHARES)] == [19, 18]


def test_nobody_is_given_up_when_that_makes_too_little_room():
    assert give_up(full(0, 79, 21), asked(HIGH, rows=80), SHARES) == []


def test_a_request_is_told_when_its_class_will_have_been_served():
    view = full(0, 10, 39)
    assert ByPriority().retry_after(view, asked(LOW)) is None
    strategy = learnt(8, alpha=0.01, beta=0.0)
    assert strategy.retry_after(view, asked(LOW)) == pytest.approx(40 / 0.2 * 0.01)
    strict = learnt(8, alpha=0.01, beta=0.0, mode="strict")
    assert strict.retry_after(view, asked(LOW)) == pytest.approx(50 * 0.01)


# When


def test_it_cuts_at_once_unless_waiting_pays():
    view = waiting([1.0, 1.2], now=1.5)
    assert ByPriority().cut_at(view) <= view.now
    assert ByPriority().reason(view) is Reason.FREE
