"""The simulation cuts the batches that the real engine cuts: the same requests, times and reasons."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from virtual_engines import diary, serve, written

from gpuinfer.api import Limits, Priority
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.lab.simulate import ClosedLoop, Mix, Poisson, simulate
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.strategies.priority import ByPriority

SERVICE = ServiceModel(alpha=100e-6, beta=2e-3, jitter=0.2)
REQUESTS = 150
STRATEGIES = [(Dynamic, {}), (Adaptive, {}), (Adaptive, {"latency_target": 0.02}), (ByPriority, {})]
MIXED = {Priority.HIGH: 0.2, Priority.NORMAL: 0.5, Priority.LOW: 0.3}


def assert_alike(load, options, limits, *, strategy=Dynamic, service=SERVICE, seed=0, max_queue_rows=None):
    """The same batches in the same order, and the same counts."""
    closed = load if isinstance(load, ClosedLoop) else None
    (cuts, ran), seen = serve(
        load,
        closed,
        service,
        diary(strategy, **options),
        limits,
        seed=seed,
        requests=REQUESTS,
        max_queue_rows=max_queue_rows,
    )
    kept = diary(strategy, **options)
    outcome = simulate(
        load, service, lambda: kept, limits, seed=seed, requests=REQUESTS, warmup=0, max_queue_rows=max_queue_rows
    )
    simulated_cuts, simulated_ran = written(kept, 0.0)
    assert [rows for _, rows, _ in simulated_cuts] == [rows for _, rows, _ in cuts]
    for (now, _, arrived), (then, _, came) in zip(simulated_cuts, cuts, strict=True):
        assert now == pytest.approx(then, abs=1e-7)
        assert arrived == pytest.approx(came, abs=1e-7)
    assert [batch[1:4] for batch in simulated_ran] == [batch[1:4] for batch in ran]
    times = [(batch[0], *batch[4:]) for batch in simulated_ran]
    assert times == [pytest.approx((batch[0], *batch[4:]), abs=1e-7) for batch in ran]
    assert outcome.snapshot.errors == {kind: count for kind, count in seen.errors.items() if count}
    assert (outcome.snapshot.requests, outcome.snapshot.rows) == (seen.requests, seen.rows)
    assert outcome.snapshot.reasons == seen.reasons
    assert outcome.offered_requests == seen.requests + sum(seen.errors.values()) == REQUESTS
    return outcome


open_loads = (
    st.integers(0, 2**31),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 8, 64]),
    st.sampled_from([*STRATEGIES, (Dynamic, {"max_wait": 0.0}), (Dynamic, {"max_wait": 0.02})]),
    st.floats(20, 5000),
    st.sampled_from([math.inf, 0.01]),
)
closed_loads = (
    st.integers(0, 2**31),
    st.sampled_from([1, 2]),
    st.integers(1, 40),
    st.sampled_from(STRATEGIES),
    st.sampled_from([0.0, 0.001, 0.02]),
)


def same_for_an_open_load(seed, in_flight, max_rows, chosen, rate, timeout):
    mix = Mix((1, min(4, max_rows)), MIXED, timeout=timeout, clients=seed % 4)
    limits = Limits(max_rows, in_flight)
    assert_alike(Poisson(rate, mix), chosen[1], limits, strategy=chosen[0], seed=seed, max_queue_rows=2 * max_rows)


def same_for_a_closed_load(seed, in_flight, clients, chosen, think):
    assert_alike(ClosedLoop(clients, think), chosen[1], Limits(16, in_flight), strategy=chosen[0], seed=seed)


def many(test, loads, examples):
    settings(max_examples=examples, deadline=None)(given(*loads)(test))()


def test_any_open_load():
    many(same_for_an_open_load, open_loads, 25)


def test_any_closed_load():
    many(same_for_a_closed_load, closed_loads, 12)


def test_a_request_that_comes_within_a_nanosecond_after_a_batch():
    same_for_an_open_load(10871, 2, 8, (Dynamic, {}), 3513.5112217670294, math.inf)


@pytest.mark.soak
def test_any_load_at_length():
    many(same_for_an_open_load, open_loads, 600)
    many(same_for_a_closed_load, closed_loads, 400)
