"""Options of the strategies: how they are written, and which are refused."""

import pytest
from pydantic import ValidationError

from gpuinfer.config.options import GivenValue, check
from gpuinfer.errors import UsageError
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.strategies.priority import ByPriority


def shares_of(value):
    values = check(ByPriority.Options, {"shares": GivenValue(value, "-S shares")}, "the strategy priority")
    return ByPriority(**values).options.shares


@pytest.mark.parametrize(
    ("given", "shares"),
    [
        pytest.param("60,30,10", (60, 30, 10), id="high, normal, low"),
        pytest.param("60%, 30%, 10%", (60, 30, 10), id="with signs"),
        pytest.param("high=60,normal=30,low=10", (60, 30, 10), id="by name"),
        pytest.param("low:10,high:60,normal:30", (60, 30, 10), id="by name in any order"),
        pytest.param("high=75", (75, 15, 10), id="the others share what is left as usual"),
        pytest.param({"high": 60, "low": 10}, (60, 30, 10), id="a table"),
        pytest.param([40, 40, 20], (40, 40, 20), id="a list"),
        pytest.param({}, (50, 30, 20), id="a table that says nothing"),
        pytest.param("20,20,20", (20, 20, 20), id="less than all"),
    ],
)
def test_shares_are_given_as(given, shares):
    assert shares_of(given) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        pytest.param("60,30", "these are 2 shares. Give 3 percentages", id="too few"),
        pytest.param("60,30,5,5", "these are 4 shares. Give 3 percentages", id="too many"),
        pytest.param("60,-30,10", "-30 % for normal cannot be. Give each class more than 0.", id="negative"),
        pytest.param("60,40,0", "0 % for low cannot be. Give each class more than 0.", id="zero"),
        pytest.param("60,nan,10", "nan % for normal cannot be", id="no number at all"),
        pytest.param("60,30,20", "add up to 110 %. Give at most 100 in all.", id="over 100 in all"),
        pytest.param("inf,30,20", "inf % for high cannot be", id="endless"),
        pytest.param("high=100", "leaves nothing for the others. Give", id="nothing is left"),
        pytest.param("hihg=60", "no class named 'hihg'. Did you mean 'high'? Classes: high, normal, low.", id="typo"),
        pytest.param("urgent=60", "no class named 'urgent'. Classes: high, normal, low.", id="unknown class"),
        pytest.param("high=60,high=50", "a class is named twice. Give", id="twice"),
        pytest.param("high=much", "'much' is no share. Give", id="a word"),
        pytest.param("", "these are 0 shares. Give", id="nothing"),
        pytest.param(7, "7 are no shares. Give", id="one number"),
        pytest.param([True, 50, 20], "True is no share. Give", id="a truth"),
    ],
)
def test_shares_that_cannot_be_are_refused_with_the_cure(given, complaint):
    with pytest.raises(UsageError) as refused:
        shares_of(given)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        pytest.param(ByPriority, {"mode": "fair"}, id="an unknown mode"),
        pytest.param(ByPriority, {"ageing": 0}, id="no ageing time"),
        pytest.param(ByPriority, {"ageing": float("inf")}, id="an endless ageing time"),
        pytest.param(ByPriority, {"share": "50,30,20"}, id="an unknown option"),
        pytest.param(Dynamic, {"max_wait": -0.1}, id="a negative wait"),
        pytest.param(Dynamic, {"max_wait": float("inf")}, id="an endless wait"),
        pytest.param(Dynamic, {"max_wait": "soon"}, id="a wait that is no number"),
        pytest.param(Dynamic, {"max_rows": 0}, id="batches of no rows"),
        pytest.param(Adaptive, {"latency_target": 0}, id="no time at all"),
        pytest.param(Adaptive, {"latency_target": float("nan")}, id="a target that is no number"),
    ],
)
def test_options_that_cannot_be_are_refused(strategy, options):
    with pytest.raises(ValidationError):
        strategy(**options)


@pytest.mark.parametrize("value", ["-1", "0ms", "inf", "soon"])
def test_a_target_that_is_none_is_refused_with_the_cure(value):
    given = {"latency_target": GivenValue(value, f"-S latency_target={value}")}
    with pytest.raises(UsageError, match=r"-S latency_target=.*(Give|Choose)"):
        check(Adaptive.Options, given, "strategy 'adaptive'")
