"""The router of a simulation: bounds of requests at a replica, the queue of those that wait, what that is good for."""

from __future__ import annotations

import math

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuinfer.api import Limits, Priority
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.errors import UsageError
from gpuinfer.lab.simulate import ClosedLoop, Mix, Poisson, simulate
from gpuinfer.lab.simulate.simulated_router import RoutingSetup
from gpuinfer.stats import summarise
from gpuinfer.strategies.dynamic import Dynamic

ONE, SERVICE = Limits(1, 1), ServiceModel(0.0, 1.0, jitter=0.5)


def run(load, routing, *, replicas=4, requests=4000, limits=ONE, service=SERVICE, **more):
    return simulate(load, service, Dynamic, limits, replicas=replicas, routing=routing, requests=requests, **more)


def test_replicas_with_a_global_queue_are_the_lanes_of_one_engine():
    """One queue before four servers is the same however the servers are called."""
    load = Poisson(3.6, Mix())
    alone = simulate(load, ServiceModel(0.0, 1.0), Dynamic, Limits(1, 4), requests=4000)
    fleet = run(load, RoutingSetup(queue="global"), service=ServiceModel(0.0, 1.0))
    assert fleet.latency_s == pytest.approx(alone.latency_s)
    assert fleet.router_wait_s["mean"] > 0
    assert fleet.queue_wait_s["max"] == 0  # a replica has no more than it computes


def test_a_high_class_waits_less_in_one_queue_than_at_a_replica():
    load = Poisson(3.6, Mix(classes={Priority.HIGH: 0.2, Priority.NORMAL: 0.8}))
    at_replica, in_router = (run(load, RoutingSetup(queue=queue)) for queue in ("replica", "global"))
    high = [summarise(one.snapshot.classes["high"]["latency"])["p95"] for one in (at_replica, in_router)]
    assert high[1] < 0.7 * high[0]


@settings(max_examples=examples(30))
@given(
    st.integers(1, 4),
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from(["global", "replica"]),
    st.sampled_from([math.inf, 2.0]),
    st.booleans(),
)
def test_nothing_is_lost_and_no_replica_has_more_than_its_bound(replicas, most, limit, queue, timeout, closed):
    mix = Mix(classes={Priority.HIGH: 0.3, Priority.LOW: 0.7}, timeout=timeout)
    load = ClosedLoop(30, 0.0, mix=mix) if closed else Poisson(2.0 * replicas, mix)
    routing = RoutingSetup("least-loaded", queue, most, limit)
    outcome = run(load, routing, replicas=replicas, requests=200, limits=Limits(2, 1), warmup=0.0)
    lost = sum(outcome.snapshot.errors.values())
    assert outcome.snapshot.requests + lost == outcome.offered_requests == 200
    by_class = outcome.snapshot.classes.values()
    assert sum(sum(one["errors"].values()) for one in by_class) == lost
    assert sum(one["requests"] for one in by_class) == outcome.snapshot.requests
    assert all(rows <= most for one in outcome.replicas for rows in one.batches)
    again = run(load, routing, replicas=replicas, requests=200, limits=Limits(2, 1), warmup=0.0)
    assert again.latency_s == outcome.latency_s


def test_what_waits_for_too_long_expires_in_the_router_and_a_full_one_refuses():
    late = run(Poisson(8.0, Mix(timeout=3.0)), RoutingSetup(queue="global"), service=ServiceModel(0.0, 1.0))
    assert late.snapshot.errors["expired"] > 0.3 * 4000
    assert late.latency_s["max"] <= 4.0 + 1e-9  # no more than its time, and one answer
    full = run(Poisson(8.0, Mix()), RoutingSetup(queue="global", queue_limit=8), service=ServiceModel(0.0, 1.0))
    assert full.snapshot.errors["rejected"] > 0.3 * 4000
    assert full.latency_s["max"] < 8.0


def test_without_a_queue_what_is_over_the_bound_is_refused():
    outcome = run(Poisson(8.0, Mix()), RoutingSetup(max_inputs=1), service=ServiceModel(0.0, 1.0))
    assert outcome.latency_s["max"] == pytest.approx(1.0)
    assert outcome.snapshot.errors["rejected"] > 0.3 * 4000


def test_room_for_nothing_is_refused():
    with pytest.raises(UsageError, match="Give 1 or more"):
        run(Poisson(1.0, Mix()), RoutingSetup(max_inputs=0))


def test_options_of_the_policy_decide_which_replicas_have_the_work():
    def kept(**options):
        routing = RoutingSetup("sticky", options=options)
        load = Poisson(3.0, Mix(clients=2))
        return run(load, routing, requests=500).latency_s["mean"]

    assert kept(margin=1000.0) > 2 * kept(margin=0.0)
