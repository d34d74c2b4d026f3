import pytest
from pydantic import ValidationError

from gpuinfer.api import Reason
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing import assert_ok, check_strategy, waiting


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
    ("live", "thinking", "cut"),
    [
        pytest.param(2, 0, 1.0, id="nobody is left to wait for"),
        pytest.param(3, 1, 3.0, id="one client may still ask"),
        pytest.param(0, 0, 3.0, id="clients that never joined may ask at any time"),
    ],
)
def test_dynamic_waits_only_while_a_live_client_may_still_ask(live, thinking, cut):
    view = waiting([1.0, 1.5], max_rows=4, live=live, thinking=thinking)
    assert Dynamic(max_wait=2.0).cut_at(view) == cut


def test_without_knobs_it_never_waits():
    view = waiting([1.0], now=1.0)
    assert Dynamic().cut_at(view) <= view.now


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
    ],
)
def test_dynamic_says_why(options, view, reason):
    assert Dynamic(**options).reason(view) is reason


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_wait": -0.1}, id="a negative wait"),
        pytest.param({"max_wait": float("inf")}, id="an endless wait"),
        pytest.param({"max_wait": "soon"}, id="a wait that is no number"),
        pytest.param({"max_rows": 0}, id="batches of no rows"),
        pytest.param({"max_row": 8}, id="an option that does not exist"),
    ],
)
def test_dynamic_refuses(options):
    with pytest.raises(ValidationError):
        Dynamic(**options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="no knobs"),
        pytest.param({"max_wait": 0.005}, id="a wait"),
        pytest.param({"max_wait": 0.005, "max_rows": 4}, id="a wait and a cap"),
    ],
)
def test_dynamic_keeps_the_contract(options):
    assert_ok(check_strategy(lambda: Dynamic(**options)))
