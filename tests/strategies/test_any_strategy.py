"""What holds for every strategy, whatever arrives."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.api import Limits, Priority, Strategy
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.lab.simulate import Offer, Poisson, RecordedArrivals, simulate
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.strategies.priority import ByPriority
from gpuinfer.testing import check_strategy

ALL = [
    pytest.param(Dynamic, id="dynamic"),
    pytest.param(partial(Dynamic, max_wait=0.02, max_rows=5), id="dynamic with knobs"),
    pytest.param(Adaptive, id="adaptive"),
    pytest.param(partial(Adaptive, latency_target=0.05), id="adaptive with a target"),
    pytest.param(partial(Adaptive, latency_target=0.0001), id="adaptive with an impossible target"),
    pytest.param(ByPriority, id="priority"),
    pytest.param(partial(ByPriority, mode="strict", ageing=0.1), id="strict priority"),
]
SERVICES = [ServiceModel(alpha=0.001, beta=0.01), ServiceModel(beta=0.005, step_rows=4, step_s=0.02, jitter=0.3)]
PAGE = Path(__file__).parents[2] / "docs" / "own-strategy.md"


class Watched(Strategy):
    """Asks another strategy everything twice, checks what every strategy promises, and keeps what was cut."""

    def __init__(self, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy
        self.batches: list[tuple[float, list]] = []
        self.observe, self.shed, self.retry_after = strategy.observe, strategy.shed, strategy.retry_after

    def cut_at(self, queue):
        due = self.strategy.cut_at(queue)
        assert self.strategy.cut_at(queue) == due
        return due

    def reason(self, queue):
        reason = self.strategy.reason(queue)
        assert self.strategy.reason(queue) is reason
        return reason

    def select(self, queue):
        assert queue.now >= self.strategy.cut_at(queue), "cut before it was due"
        chosen = list(self.strategy.select(queue))
        assert list(self.strategy.select(queue)) == chosen
        assert 0 < len(chosen) == len(set(chosen))
        assert sum(request.rows for request in chosen) <= queue.limits.max_rows
        return chosen

    def account(self, batch, now):
        self.batches.append((now, list(batch)))
        self.strategy.account(batch, now)


asks = st.lists(
    st.tuples(
        st.sampled_from([0.0, 0.0, 0.0001, 0.001, 0.01, 0.1, 1.0]),  # since the one before
        st.integers(1, 8),
        st.sampled_from(Priority),
        st.sampled_from([math.inf, math.inf, 0.001, 0.05, 2.0]),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from(["x", "y"]),
    ),
    min_size=1,
    max_size=60,
)


def play(build, drawn, service, limits, max_queue_rows=None):
    """The outcome, and the batches: for each replica one strategy, here one replica."""
    at, made, watched = 0.0, [], []
    for gap, *rest in drawn:
        at += gap
        made.append(Offer(at, *rest))

    def make():
        watched.append(Watched(build()))
        return watched[-1]

    load = RecordedArrivals(made)
    return simulate(load, service, make, limits, warmup=0, max_queue_rows=max_queue_rows), watched[0].batches


def identified(batches):
    return [(now, [(request.arrived, request.rows, request.priority) for request in batch]) for now, batch in batches]


@pytest.mark.parametrize("build", ALL)
@settings(max_examples=examples(25), deadline=None)
@given(asks, st.sampled_from(SERVICES), st.integers(1, 3), st.sampled_from([None, 8, 20]), st.sampled_from([None, 12]))
def test_every_request_is_served_once_expires_or_is_turned_away_and_the_same_load_is_cut_the_same_way(
    build, drawn, service, in_flight, slots, bound
):
    limits = Limits(8, in_flight, slots)
    outcome, batches = play(build, drawn, service, limits, bound)
    served, errors = [request for _, batch in batches for request in batch], outcome.snapshot.errors
    assert len(served) == len(set(served)) == outcome.snapshot.requests
    assert bound or not errors.get("rejected", 0)
    assert len(served) + errors.get("expired", 0) + errors.get("rejected", 0) == len(drawn)
    assert outcome.snapshot.waiting == 0
    assert all(len({request.group for request in batch}) == 1 for _, batch in batches)
    assert all(request.deadline > now for now, batch in batches for request in batch)
    assert identified(play(build, drawn, service, limits, bound)[1]) == identified(batches)


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_a_lane_never_idles_for_long_while_requests_wait(build, load):
    """The longest queue wait stays within the work ahead of it and what company is worth: no request is forgotten."""
    service = SERVICES[0]
    run = partial(simulate, Poisson(load * 5 / service.seconds(5)), service, limits=Limits(8), requests=2000, seed=4)
    outcome, at_once = run(strategy=build, warmup=0), run(strategy=partial(Dynamic, max_wait=0, max_rows=5), warmup=0)
    assert outcome.snapshot.requests == at_once.snapshot.requests == 2000
    assert outcome.latency_s["mean"] < at_once.latency_s["mean"] + 0.02


@pytest.mark.parametrize("build", ALL)
def test_the_conformance_kit_finds_no_fault(build):
    assert [finding for finding in check_strategy(build) if not finding.ok] == []


def test_the_code_on_the_page_about_a_strategy_of_ones_own_runs_in_its_order(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert len(blocks) == 4
    names: dict[str, object] = {"__name__": "punctual"}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102 (our own page)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [name for name, *_ in lines] == ["Punctual", "Dynamic"]
    assert all(float(p95) < 0.1 for _, p95, _ in lines)
    assert float(lines[0][2]) > float(lines[1][2])
