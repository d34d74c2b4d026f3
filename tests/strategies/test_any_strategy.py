"""What holds for every strategy, whatever arrives."""

from __future__ import annotations

import math
from functools import partial

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from watched import Watched

from gpuinfer.api import Limits, Priority
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.lab.simulate import Offer, Poisson, RecordedArrivals, simulate
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.strategies.priority import ByPriority as Classes
from gpuinfer.testing import check_strategy

ALL = [
    pytest.param(Dynamic, id="dynamic"),
    pytest.param(partial(Dynamic, max_wait=0.02, max_rows=5), id="dynamic with knobs"),
    pytest.param(Adaptive, id="adaptive"),
    pytest.param(partial(Adaptive, latency_target=0.05), id="adaptive with a target"),
    pytest.param(partial(Adaptive, latency_target=0.0001), id="adaptive with an impossible target"),
    pytest.param(Classes, id="priority"),
    pytest.param(partial(Classes, mode="strict", ageing=0.1), id="strict priority"),
]
SERVICES = [ServiceModel(alpha=0.001, beta=0.01), ServiceModel(beta=0.005, step_rows=4, step_s=0.02, jitter=0.3)]

gaps = st.sampled_from([0.0, 0.0, 0.0001, 0.001, 0.01, 0.1, 1.0])
asks = st.lists(
    st.tuples(
        gaps,
        st.integers(1, 8),
        st.sampled_from(Priority),
        st.sampled_from([math.inf, math.inf, 0.001, 0.05, 2.0]),
        st.sampled_from([None, "a", "b"]),
        st.sampled_from(["x", "y"]),
    ),
    min_size=1,
    max_size=60,
)


def arriving(drawn):
    at, made = 0.0, []
    for gap, *rest in drawn:
        at += gap
        made.append(Offer(at, *rest))
    return RecordedArrivals(made)


def play(build, drawn, service, in_flight, slots=None, max_queue_rows=None):
    """The outcome, and the batches: for each replica one strategy, here one replica."""
    watched = []

    def make():
        watched.append(Watched(build()))
        return watched[-1]

    limits = Limits(8, in_flight, slots)
    load = arriving(drawn)
    return simulate(load, service, make, limits, warmup=0, max_queue_rows=max_queue_rows), watched[0].batches


def identified(batches):
    return [(now, [(request.arrived, request.rows, request.priority) for request in batch]) for now, batch in batches]


@pytest.mark.parametrize("build", ALL)
@settings(max_examples=examples(25), deadline=None)
@given(asks, st.sampled_from(SERVICES), st.integers(1, 3), st.sampled_from([None, 8, 20]))
def test_every_request_is_served_once_or_expires_and_the_same_load_is_cut_the_same_way(
    build, drawn, service, in_flight, slots
):
    outcome, batches = play(build, drawn, service, in_flight, slots)
    served = [request for _, batch in batches for request in batch]
    assert len(served) == len(set(served))
    assert len(served) + outcome.snapshot.errors.get("expired", 0) == len(drawn)
    assert outcome.snapshot.requests == len(served)
    assert all(len({request.group for request in batch}) == 1 for _, batch in batches)
    assert all(request.deadline > now for now, batch in batches for request in batch)
    assert identified(play(build, drawn, service, in_flight, slots)[1]) == identified(batches)


@pytest.mark.parametrize("build", ALL)
@settings(max_examples=examples(20), deadline=None)
@given(asks, st.sampled_from(SERVICES))
def test_a_full_queue_turns_away_and_loses_nobody(build, drawn, service):
    outcome, batches = play(build, drawn, service, 1, max_queue_rows=12)
    served = sum(len(batch) for _, batch in batches)
    errors = outcome.snapshot.errors
    assert served + errors.get("rejected", 0) + errors.get("expired", 0) == len(drawn)
    assert outcome.snapshot.waiting == 0


@pytest.mark.parametrize("build", ALL)
@pytest.mark.parametrize("load", [0.3, 0.9])
def test_a_lane_never_idles_for_long_while_requests_wait(build, load):
    """The longest queue wait stays within the work ahead of it and what company is worth: nobody is forgotten."""
    service = SERVICES[0]
    load_of = Poisson(load * 5 / service.seconds(5))
    run = partial(simulate, load_of, service, limits=Limits(8), requests=2000, seed=4, warmup=0)
    outcome, at_once = run(strategy=build), run(strategy=partial(Dynamic, max_wait=0, max_rows=5))
    assert outcome.snapshot.requests == at_once.snapshot.requests == 2000
    assert outcome.latency_s["mean"] < at_once.latency_s["mean"] + 0.02


@pytest.mark.parametrize("build", ALL)
def test_the_conformance_kit_finds_no_fault(build):
    assert [finding for finding in check_strategy(build) if not finding.ok] == []
