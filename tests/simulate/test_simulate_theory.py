"""The simulation against what queueing theory says, and what must hold of any simulation."""

import math

import pytest

from gpuinfer.api import BatchRecord, Limits, Priority, QueueView, Strategy
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.errors import StrategyError, UsageError
from gpuinfer.lab.simulate import Bursty, ClosedLoop, Mix, Offer, Poisson, RecordedArrivals, Watch, simulate
from gpuinfer.stats import ERRORS
from gpuinfer.strategies.dynamic import Dynamic

PLAIN = ServiceModel(alpha=50e-6, beta=2e-3)


class AtOnce(Strategy):
    """Cuts as soon as there is room."""

    def cut_at(self, queue: QueueView) -> float:
        return -math.inf


@pytest.mark.sample
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.parametrize(
    "jitter", [pytest.param(0.0, id="M/D/1"), pytest.param(0.5, id="M/G/1"), pytest.param(1.0, id="as M/M/1")]
)
def test_the_mean_wait_is_that_of_pollaczek_and_khinchine(load, jitter):
    """E[wait] = λ·E[S²] / 2(1 - ρ), with E[S²] = s²(1 + jitter²)."""
    s, rate = 1e-3, load / 1e-3
    service = ServiceModel(beta=s, jitter=jitter)
    outcome = simulate(
        Poisson(rate), service, AtOnce, Limits(1), requests=25_000, warmup=0.02, max_queue_rows=10**6, seed=1
    )
    expected = rate * s * s * (1 + jitter**2) / (2 * (1 - load))
    assert outcome.queue_wait_s["mean"] == pytest.approx(expected, rel=0.06)
    assert outcome.utilisation == pytest.approx(load, rel=0.02)
    assert outcome.served_rows_per_s == pytest.approx(rate, rel=0.02)


def test_two_lanes_wait_as_erlang_c_says():
    """Of constant times the wait is about half of that in M/M/2 (Cosmetatos, "Approximate explicit formulae", 1975)."""
    s, load = 1e-3, 0.5
    rate = 2 * load / s
    outcome = simulate(Poisson(rate), ServiceModel(beta=s), AtOnce, Limits(1, 2), requests=25_000, seed=2)
    erlang = s * load**2 / (1 - load**2)
    correction = 0.5 * (1 + (1 - load) * (2 - 1) * (math.sqrt(4 + 5 * 2) - 2) / (16 * load * 2))
    assert outcome.queue_wait_s["mean"] == pytest.approx(erlang * correction, rel=0.06)


def test_a_lone_client_of_a_closed_loop_is_exact():
    outcome = simulate(ClosedLoop(1, 0.01, constant=True), PLAIN, Dynamic, Limits(64), requests=500, warmup=0)
    tau = PLAIN.seconds(1)
    assert outcome.served_rows_per_s == pytest.approx(1 / (0.01 + tau))
    assert outcome.latency_s["mean"] == pytest.approx(tau)
    assert outcome.utilisation == pytest.approx(tau / (0.01 + tau))


@pytest.mark.parametrize("in_flight", [1, 2])
def test_many_clients_of_a_closed_loop_saturate_the_lanes(in_flight):
    outcome = simulate(ClosedLoop(64 * 4, 0.001), PLAIN, Dynamic, Limits(64, in_flight), requests=15_000)
    capacity = in_flight * 64 / PLAIN.seconds(64)
    assert outcome.capacity_rows_per_s == pytest.approx(capacity)
    assert outcome.served_rows_per_s == pytest.approx(capacity, rel=0.01)
    assert outcome.utilisation > 0.99


def test_littles_law_holds():
    """Requests under way = rate × latency: counted here as the busy time of requests over the length of the run."""
    outcome = simulate(ClosedLoop(40, 0.02), PLAIN, Dynamic, Limits(64), requests=15_000)
    thinking = outcome.served_requests_per_s * 0.02
    assert thinking + outcome.served_requests_per_s * outcome.latency_s["mean"] == pytest.approx(40, rel=0.02)


@pytest.mark.sample
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Poisson(3000, Mix((1, 8), {Priority.HIGH: 0.5, Priority.LOW: 0.5}, 0.02, 7)), id="poisson"),
        pytest.param(Poisson([(20_000, 0.2), (100, 0.5), (0, 0.1)], Mix(timeout=0.05)), id="steps"),
        pytest.param(Bursty(3000, 6, 0.05), id="bursty"),
        pytest.param(ClosedLoop(50, 0.001, mix=Mix((1, 3))), id="closed"),
        pytest.param(ClosedLoop(50, 0.0), id="closed, more clients than may wait"),
        pytest.param(RecordedArrivals([Offer(0.01 * n, 1 + n % 3) for n in range(3000)]), id="recorded"),
    ],
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_each_request_is_settled_once_and_the_same_seed_gives_the_same(load, replicas):
    service = ServiceModel(alpha=50e-6, beta=2e-3, jitter=0.2, failures=0.05)

    def run(seed):
        return simulate(
            load,
            service,
            Dynamic,
            Limits(16, 2),
            replicas=replicas,
            routing="power-of-two",
            seed=seed,
            requests=3000,
            warmup=0,
            max_queue_rows=40,
        )

    outcome = run(5)
    settled = outcome.snapshot.requests + sum(outcome.snapshot.errors.values())
    assert settled == outcome.offered_requests == 3000
    assert set(outcome.snapshot.errors) <= set(ERRORS)
    assert outcome.snapshot.waiting == 0
    assert 0 < outcome.utilisation <= 1
    again, other = run(5), run(6)
    assert (again.snapshot, again.served_rows_per_s) == (outcome.snapshot, outcome.served_rows_per_s)
    assert other.snapshot != outcome.snapshot


@pytest.mark.parametrize(
    "load", [pytest.param(Poisson(1000, Mix((1, 9))), id="poisson"), pytest.param(Bursty(1000, 4, 0.001), id="bursty")]
)
def test_loads_come_at_their_mean_rate(load):
    outcome = simulate(load, ServiceModel(beta=1e-5), AtOnce, Limits(16, 64), duration=30)
    assert outcome.offered_rows_per_s == pytest.approx(1000, rel=0.05)


def test_a_drift_makes_batches_slower_from_its_time_on():
    seen = []

    class Watching(AtOnce):
        def observe(self, batch: BatchRecord) -> None:
            seen.append((batch.started, batch.seconds))

    simulate(Poisson(100), ServiceModel(beta=1e-3), Watching, Limits(8), duration=10, drift=[(4.0, 2.0), (8.0, 0.5)])
    assert {round(seconds, 6) for started, seconds in seen if started < 4} == {0.001}
    assert {round(seconds, 6) for started, seconds in seen if 4 <= started < 8} == {0.002}
    assert {round(seconds, 6) for started, seconds in seen if started >= 8} == {0.0005}


@pytest.mark.thorough
def test_better_routing_waits_less():
    def wait(routing):
        load, service = Poisson(8 * 800), ServiceModel(beta=1e-3)
        return simulate(load, service, AtOnce, Limits(1), replicas=8, routing=routing, requests=15_000).queue_wait_s[
            "mean"
        ]

    blind, two, least = wait("random"), wait("power-of-two"), wait("least-loaded")
    assert least < two < 0.5 * blind
    assert wait("round-robin") < least  # of times that are all alike: of equals the one that began first is free first
    assert blind == pytest.approx(0.8 * 1e-3 / (2 * 0.2), rel=0.15)  # of eight queues M/D/1


def test_overload_is_said():
    outcome = simulate(Poisson(50_000), PLAIN, Dynamic, Limits(64), requests=20_000)
    assert "offered 50,000 rows/s > capacity 12,308 rows/s" in " ".join(outcome.notices)
    assert outcome.snapshot.errors["rejected"] > 0
    assert outcome.served_rows_per_s == pytest.approx(12_308, rel=0.03)


@pytest.mark.parametrize("load", [Poisson(100), ClosedLoop(4)], ids=["an open load", "clients that wait"])
@pytest.mark.parametrize("later", [math.inf, 3600.0, 0.01], ids=["never", "an hour later", "a little later"])
def test_a_strategy_that_never_cuts_ends_the_simulation(load, later):
    class Never(Strategy):
        def cut_at(self, queue: QueueView) -> float:
            return queue.now + later

    with pytest.raises(StrategyError, match=r"strategy 'Never' \(module .*\) does not cut: \d+ requests? wait"):
        simulate(load, PLAIN, Never, Limits(64), requests=100)


def test_what_a_strategy_leaves_at_the_end_is_drained_as_by_an_engine_that_closes():
    class Full(Strategy):
        def cut_at(self, queue: QueueView) -> float:
            return queue.now if queue.rows >= queue.limits.max_rows else math.inf

    outcome = simulate(Poisson(100), PLAIN, Full, Limits(64), requests=100, warmup=0)
    assert outcome.snapshot.requests == 100
    assert set(outcome.snapshot.reasons) == {"full", "drain"}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        pytest.param(lambda: Poisson(0), "a rate of 0 brings no request", id="rate 0"),
        pytest.param(lambda: Poisson(-1), "Give numbers above 0", id="rate below 0"),
        pytest.param(lambda: Poisson([(1, 0.0)]), "Give numbers above 0", id="no time"),
        pytest.param(lambda: Bursty(0), "rate above 0", id="bursts of nothing"),
        pytest.param(lambda: Bursty(1, 1.0), "factor above 1", id="bursts that are none"),
        pytest.param(lambda: Bursty(1, 2.0, 0.0), "length above 0", id="bursts of no time"),
        pytest.param(lambda: ClosedLoop(0), "Give 1 or more", id="no clients"),
        pytest.param(lambda: ClosedLoop(1, -1), "Give 0 or more", id="think time below 0"),
        pytest.param(lambda: Mix((0, 1)), "Give 1 or more", id="no rows"),
        pytest.param(lambda: Mix((3, 2)), "Give 1 or more", id="rows the wrong way round"),
        pytest.param(lambda: Mix(classes={Priority.LOW: 1.5}), "add up to 1.5", id="shares over 1"),
        pytest.param(lambda: Mix(timeout=0), "over before it began", id="no time for an answer"),
        pytest.param(lambda: Mix(timeout=1e-9), "Give 1 µs or more", id="hardly any time for an answer"),
        pytest.param(lambda: Mix((1, 10**400)), "Give 1 or more", id="endless rows"),
        pytest.param(lambda: Poisson(1e-300), "rate above 0", id="a rate of next to nothing"),
        pytest.param(lambda: Poisson([(1, 1e-9)]), "Give longer times", id="a schedule of next to nothing"),
        pytest.param(lambda: Bursty(1, 2.0, 1e-9), "Give longer ones", id="bursts of next to nothing"),
        pytest.param(lambda: ServiceModel(alpha=1e300), "0 or more, 1e.06 at most", id="endless batches"),
        pytest.param(lambda: ServiceModel(alpha=1e-300), "takes no time", id="batches of next to no time"),
        pytest.param(lambda: ServiceModel(beta=1, jitter=1e200), "jitter", id="endless jitter"),
        pytest.param(lambda: RecordedArrivals([]), "nothing arrives", id="an empty recording"),
        pytest.param(lambda: simulate(Poisson(1), PLAIN, Dynamic, Limits(1)), "never ends", id="no end"),
        pytest.param(lambda: simulate(Poisson(1), PLAIN, Dynamic, Limits(1), requests=0), "Give 1", id="no requests"),
        pytest.param(
            lambda: simulate(Poisson(1), PLAIN, Dynamic, Limits(1), requests=1, warmup=1), "leaves nothing", id="warm"
        ),
        pytest.param(
            lambda: simulate(Poisson(1), PLAIN, Dynamic, Limits(1), requests=1, replicas=0), "Give 1", id="none"
        ),
    ],
)
def test_what_cannot_be_is_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        wrong()


def test_a_short_run_of_full_batches_is_exact_too():
    """Counting begins and ends with the end of a batch, so that no part of one is counted twice or not at all."""
    outcome = simulate(ClosedLoop(64, 0.0), PLAIN, Dynamic, Limits(64), requests=64 * 20, warmup=0.2)
    assert outcome.served_rows_per_s == pytest.approx(64 / PLAIN.seconds(64))


@pytest.mark.parametrize("warmup", [0.0, 0.05, 0.5, 0.9])
def test_a_load_that_ebbs_before_it_is_warm_has_a_rate(warmup):
    outcome = simulate(ClosedLoop(100, 1.0), PLAIN, Dynamic, Limits(64), requests=100, warmup=warmup)
    assert outcome.seconds > 0
    assert 0 < outcome.served_rows_per_s < 200


@pytest.mark.parametrize("think", [0.0, 0.01])
def test_clients_of_whom_nobody_is_answered_come_to_an_end(think):
    late = ClosedLoop(4, think, mix=Mix(timeout=1e-3))
    outcome = simulate(late, ServiceModel(beta=10.0), Dynamic, Limits(1), duration=5, warmup=0)
    assert outcome.snapshot.errors["expired"] > 10
    assert outcome.snapshot.waiting == 0
    never = simulate(ClosedLoop(4, think), ServiceModel(beta=1e-3, failures=0.99), Dynamic, Limits(4), duration=5)
    assert never.served_share < 0.1


def test_a_watch_sees_a_step_in_load_and_each_request():
    watch = Watch()
    load = Poisson([(100, 1.0), (20_000, 0.2), (100, 4.0)], Mix(timeout=10))
    outcome = simulate(load, PLAIN, Dynamic, Limits(64), warmup=0, recorder=lambda: watch)
    assert len(watch.settled_at) == outcome.offered_requests
    assert sum(rows for _, rows, _ in watch.batches) == outcome.snapshot.rows
    calm, busy, after = watch.latency(0.95, 0, 1), watch.latency(0.95, 1, 1.2), watch.latency(0.95, 2)
    assert calm < 0.006 < 0.05 < busy
    assert after < 0.006
    assert math.isnan(watch.latency(0.95, 100))


def test_a_client_stays_with_its_replica_under_sticky_routing():
    """Three clients who think long are never so many at one replica that their favourite is left."""
    outcome = simulate(ClosedLoop(3, 0.5), PLAIN, Dynamic, Limits(8), replicas=64, routing="sticky", requests=300)
    served = [one.requests for one in outcome.replicas if one.requests]
    assert len(served) <= 3
    assert sum(served) == outcome.snapshot.requests
