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
        ("60,30,10", (60, 30, 10)),
        ("60%, 30%, 10%", (60, 30, 10)),
        ("high=60,normal=30,low=10", (60, 30, 10)),
        ("low:10,high:60,normal:30", (60, 30, 10)),
        ("high=75", (75, 15, 10)),
        ({"high": 60, "low": 10}, (60, 30, 10)),
        ([40, 40, 20], (40, 40, 20)),
        ({}, (50, 30, 20)),
        ("20,20,20", (20, 20, 20)),
    ],
)
def test_shares_are_given_as(given, shares):
    assert shares_of(given) == pytest.approx(shares)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ("60,30", "these are 2 shares. Give 3 percentages"),
        ("60,30,5,5", "these are 4 shares. Give 3 percentages"),
        ("60,-30,10", "-30 % for normal cannot be. Give each class more than 0."),
        ("60,40,0", "0 % for low cannot be. Give each class more than 0."),
        ("60,nan,10", "nan % for normal cannot be"),
        ("60,30,20", "add up to 110 %. Give at most 100 in all."),
        ("inf,30,20", "inf % for high cannot be"),
        ("high=100", "leaves nothing for the others. Give"),
        ("hihg=60", "no class named 'hihg'. Did you mean 'high'? Classes: high, normal, low."),
        ("urgent=60", "no class named 'urgent'. Classes: high, normal, low."),
        ("high=60,high=50", "a class is named twice. Give"),
        ("high=much", "'much' is no share. Give"),
        ("", "these are 0 shares. Give"),
        (7, "7 are no shares. Give"),
        ([True, 50, 20], "True is no share. Give"),
    ],
)
def test_shares_that_cannot_be_are_refused_with_the_cure(given, complaint):
    with pytest.raises(UsageError) as refused:
        shares_of(given)
    assert complaint in str(refused.value)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        (ByPriority, {"mode": "fair"}),
        (ByPriority, {"ageing": 0}),
        (ByPriority, {"ageing": float("inf")}),
        (ByPriority, {"share": "50,30,20"}),
        (Dynamic, {"max_wait": -0.1}),
        (Dynamic, {"max_wait": float("inf")}),
        (Dynamic, {"max_wait": "soon"}),
        (Dynamic, {"max_rows": 0}),
        (Adaptive, {"latency_target": 0}),
        (Adaptive, {"latency_target": float("nan")}),
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
