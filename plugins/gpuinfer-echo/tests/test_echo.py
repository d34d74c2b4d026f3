import asyncio

import pytest
from gpuinfer_echo.backend import Echo
from gpuinfer_echo.strategy import Fixed

from gpuinfer.api import Reason, Request
from gpuinfer.testing import assert_ok, check_backend, check_package, check_strategy, waiting


def test_the_backend_keeps_the_contract():
    assert_ok(check_backend(lambda: Echo(seconds=0.0)))


def test_the_strategy_keeps_the_contract():
    assert_ok(check_strategy(lambda: Fixed(rows=4)))


def test_the_installed_package_keeps_the_contract():
    assert_ok(check_package("gpuinfer-echo"))


@pytest.mark.parametrize(
    ("arrivals", "cut", "reason"),
    [
        pytest.param([1.0], 3.0, Reason.WAITED, id="a lone request waits out the timeout"),
        pytest.param([1.0, 1.5, 1.6], 1.0, Reason.FULL, id="enough rows go at once"),
    ],
)
def test_fixed_cuts(arrivals, cut, reason):
    queue = waiting(arrivals, max_rows=64)
    strategy = Fixed(rows=3, timeout=2.0)
    assert (strategy.cut_at(queue), strategy.reason(queue)) == (cut, reason)


def test_echo_answers_with_the_payload():
    assert asyncio.run(Echo(seconds=0.0).infer([Request("a"), Request("b")])) == ["a", "b"]
