import pytest

from gpuinfer.api import BatchRecord, Reason
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import waiting

BACK_SOON = {"live": 2, "thinking": 1, "think_s": 0.0001}


def learnt(fixed_cost_s):
    """Has seen one batch of one row that took this long."""
    strategy = Dynamic()
    strategy.observe(BatchRecord(1, 1, 0.0, fixed_cost_s, 0.0, Reason.FREE))
    return strategy


@pytest.mark.parametrize(
    ("arrivals", "cut"),
    [
        pytest.param([1.0], 3.0, id="a lone request waits its full delay"),
        pytest.param([1.0, 2.5], 3.0, id="a later arrival does not extend the wait"),
        pytest.param([1.0, 1.5, 1.6, 1.7], 1.0, id="a full batch goes at once"),
        pytest.param([1.0, 1.5, 1.6, 1.7, 1.8], 1.0, id="more than a batch goes at once"),
    ],
)
def test_dynamic_cuts(arrivals, cut):
    assert Dynamic(max_wait=2.0).cut_at(waiting(arrivals, max_rows=4)) == cut


@pytest.mark.parametrize(
    "view",
    [
        pytest.param(waiting([1.0]), id="nobody that it knows may still ask"),
        pytest.param(waiting([1.0], live=9, thinking=8), id="nobody knows when they will ask"),
        pytest.param(
            waiting([1.0], live=9, thinking=8, think_s=0.09), id="the next comes back after more than a batch costs"
        ),
        pytest.param(waiting([1.0] * 4, live=8, thinking=4, think_s=1e-4, max_rows=4), id="the batch is full"),
        pytest.param(
            waiting([1.0], rows=1000, max_rows=4096, enough_rows=512, **BACK_SOON), id="a batch has enough rows"
        ),
        pytest.param(waiting([1.0] * 4, live=8, thinking=4, think_s=1e-4, in_flight=2), id="this lane has its share"),
    ],
)
def test_without_knobs_it_goes_at_once_when(view):
    assert learnt(0.01).cut_at(view) <= view.now


def test_without_knobs_it_goes_at_once_while_it_knows_no_cost():
    view = waiting([1.0], **BACK_SOON)
    assert Dynamic().cut_at(view) <= view.now


@pytest.mark.parametrize(
    ("think_s", "cut"),
    [
        pytest.param(0.0001, 1.0008, id="a few think times"),
        pytest.param(0.004, 1.01, id="never longer than an extra batch costs"),
        pytest.param(0.006, 1.0, id="not at all when that would cost more than it saves"),
    ],
)
def test_without_knobs_it_waits_for_clients_that_come_back_soon(think_s, cut):
    view = waiting([1.0], live=2, thinking=1, think_s=think_s)
    assert learnt(0.01).cut_at(view) == pytest.approx(cut)


def test_a_wait_counts_from_when_a_lane_became_free():
    strategy = learnt(0.01)
    strategy.observe(BatchRecord(1, 1, 1.49, 0.01, 0.0, Reason.FREE))
    assert strategy.cut_at(waiting([1.0], now=1.5, **BACK_SOON)) == pytest.approx(1.5008)


def test_live_clients_are_shared_alike_between_the_lanes():
    view = waiting([1.0] * 32, live=32, in_flight=2)
    assert Dynamic().select(view) == list(view.waiting[:16])


@pytest.mark.parametrize(
    ("options", "rows", "chosen"),
    [
        pytest.param({}, [2, 2, 2, 2], 3, id="as many as the backend takes"),
        pytest.param({"max_rows": 4}, [2, 2, 2, 2], 2, id="as many as it allows itself"),
        pytest.param({"max_rows": 3}, [2, 2, 2, 2], 1, id="a block is not split to fill the batch"),
        pytest.param({"max_rows": 2}, [5, 1], 1, id="a block wider than its own cap goes alone"),
        pytest.param({"max_rows": 99}, [3, 3, 1], 2, id="its cap never lifts the backend's"),
    ],
)
def test_dynamic_selects_the_oldest_that_fit(options, rows, chosen):
    view = waiting([1.0] * len(rows), rows=rows, max_rows=6)
    assert Dynamic(**options).select(view) == list(view.waiting[:chosen])


@pytest.mark.parametrize(
    ("options", "view", "reason"),
    [
        pytest.param({"max_wait": 1.0}, waiting([1.0] * 4, max_rows=4), Reason.FULL, id="full"),
        pytest.param({"max_rows": 2}, waiting([1.0] * 2, max_rows=4), Reason.CAP, id="its own cap"),
        pytest.param({"max_wait": 1.0}, waiting([1.0], live=1), Reason.CLIENTS, id="every client waits"),
        pytest.param({"max_wait": 1.0}, waiting([1.0], now=2.0), Reason.WAITED, id="waited long enough"),
        pytest.param({}, waiting([1.0]), Reason.FREE, id="the backend was free"),
        pytest.param({"max_wait": 0.0}, waiting([1.0]), Reason.FREE, id="told never to wait"),
        pytest.param({}, waiting([1.0] * 2, rows=5, enough_rows=8), Reason.CAP, id="enough rows"),
        pytest.param({}, waiting([1.0] * 2, live=4, thinking=2, in_flight=2), Reason.CAP, id="its lane's share"),
    ],
)
def test_dynamic_says_why(options, view, reason):
    assert Dynamic(**options).reason(view) is reason


def test_a_learnt_wait_that_ran_out_has_a_reason_of_its_own():
    assert learnt(0.01).reason(waiting([1.0], now=2.0, **BACK_SOON)) is Reason.GAIN
