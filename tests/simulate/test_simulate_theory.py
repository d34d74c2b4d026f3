"""The simulation against queueing theory, what must hold of any simulation, and service models fitted to what runs have
left.
"""

import json
import math
import random

import pytest

from gpuinfer.api import BatchRecord, Limits, Priority, QueueView, Strategy
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.engine.arrivals import PiecewiseArrivals
from gpuinfer.engine.trace_merge import merge_trace
from gpuinfer.engine.trace_reader import read
from gpuinfer.engine.trace_recorder import Recorder
from gpuinfer.errors import StrategyError, UsageError
from gpuinfer.lab.simulate import Bursty, ClosedLoop, Mix, Offer, Poisson, RecordedArrivals, Watch, simulate
from gpuinfer.lab.simulate.fitting import fitted
from gpuinfer.lab.simulate.outcome import solve
from gpuinfer.report.report import batches_section
from gpuinfer.stats import ERRORS
from gpuinfer.strategies.dynamic import Dynamic

PLAIN, LIMITS = ServiceModel(alpha=50e-6, beta=2e-3), Limits(64)


def hurried(rate):
    return Poisson(rate, Mix(timeout=0.05))


class AtOnce(Strategy):
    """Cuts as soon as there is room."""

    def cut_at(self, queue: QueueView) -> float:
        return -math.inf


class Full(Strategy):
    """Waits until a batch is full, however long that takes."""

    def cut_at(self, queue: QueueView) -> float:
        return queue.now if queue.rows >= queue.limits.max_rows else math.inf


@pytest.mark.sample
@pytest.mark.parametrize("load", [0.3, 0.6, 0.8])
@pytest.mark.parametrize(
    "jitter", [pytest.param(0.0, id="M/D/1"), pytest.param(0.5, id="M/G/1"), pytest.param(1.0, id="as M/M/1")]
)
def test_the_mean_wait_is_that_of_pollaczek_and_khinchine(load, jitter):
    """E[wait] = λ·E[S²] / 2(1 - ρ), with E[S²] = s²(1 + jitter²)."""
    s, rate = 1e-3, load / 1e-3
    service = ServiceModel(beta=s, jitter=jitter)
    course = {"requests": 25_000, "warmup": 0.02, "max_queue_rows": 10**6, "seed": 1}
    outcome = simulate(Poisson(rate), service, AtOnce, Limits(1), **course)
    expected = rate * s * s * (1 + jitter**2) / (2 * (1 - load))
    assert outcome.queue_wait_s["mean"] == pytest.approx(expected, rel=0.06)
    assert outcome.utilisation == pytest.approx(load, rel=0.02)
    assert outcome.served_rows_per_s == pytest.approx(rate, rel=0.02)


def test_two_lanes_wait_as_erlang_c_says():
    """Of constant times the wait is about half of that in M/M/2 (Cosmetatos, "Approximate explicit formulae", 1975)."""
    s, load = 1e-3, 0.5
    outcome = simulate(Poisson(2 * load / s), ServiceModel(beta=s), AtOnce, Limits(1, 2), requests=25_000, seed=2)
    erlang = s * load**2 / (1 - load**2)
    correction = 0.5 * (1 + (1 - load) * (2 - 1) * (math.sqrt(4 + 5 * 2) - 2) / (16 * load * 2))
    assert outcome.queue_wait_s["mean"] == pytest.approx(erlang * correction, rel=0.06)


def test_a_closed_loop_is_exact_saturates_and_keeps_littles_law():
    tau = PLAIN.seconds(1)
    lone = simulate(ClosedLoop(1, 0.01, constant=True), PLAIN, Dynamic, LIMITS, requests=500, warmup=0)
    assert lone.served_rows_per_s == pytest.approx(1 / (0.01 + tau))
    assert (lone.latency_s["mean"], lone.utilisation) == pytest.approx((tau, tau / (0.01 + tau)))
    for lanes in (1, 2):
        many = simulate(ClosedLoop(64 * 4, 0.001), PLAIN, Dynamic, Limits(64, lanes), requests=15_000)
        assert many.capacity_rows_per_s == pytest.approx(lanes * 64 / PLAIN.seconds(64))
        assert many.served_rows_per_s == pytest.approx(many.capacity_rows_per_s, rel=0.01)
        assert many.utilisation > 0.99
    some = simulate(ClosedLoop(40, 0.02), PLAIN, Dynamic, LIMITS, requests=15_000)
    assert some.served_requests_per_s * (0.02 + some.latency_s["mean"]) == pytest.approx(40, rel=0.02)
    short = simulate(ClosedLoop(64, 0.0), PLAIN, Dynamic, LIMITS, requests=64 * 20, warmup=0.2)
    assert short.served_rows_per_s == pytest.approx(64 / PLAIN.seconds(64))  # no part of a batch is counted twice
    for warmup in (0.0, 0.05, 0.5, 0.9):  # a load that ebbs before it is warm
        ebbing = simulate(ClosedLoop(100, 1.0), PLAIN, Dynamic, LIMITS, requests=100, warmup=warmup)
        assert ebbing.seconds > 0
        assert 0 < ebbing.served_rows_per_s < 200


@pytest.mark.sample
@pytest.mark.parametrize(
    "load",
    [
        pytest.param(Poisson(3000, Mix((1, 8), {Priority.HIGH: 0.5, Priority.LOW: 0.5}, 0.02, 7)), id="poisson"),
        pytest.param(PiecewiseArrivals([(20_000, 0.2), (100, 0.5), (0, 0.1)] * 3, hurried), id="steps"),
        pytest.param(Bursty(3000, 6, 0.05), id="bursty"),
        pytest.param(ClosedLoop(50, 0.001, mix=Mix((1, 3))), id="closed"),
        pytest.param(ClosedLoop(50, 0.0), id="closed, more clients than may wait"),
        pytest.param(RecordedArrivals([Offer(0.01 * n, 1 + n % 3) for n in range(3000)]), id="recorded"),
    ],
)
@pytest.mark.parametrize("replicas", [1, 3])
def test_each_request_is_settled_once_and_the_same_seed_gives_the_same(load, replicas):
    service = ServiceModel(alpha=50e-6, beta=2e-3, jitter=0.2, failures=0.05)
    course = {"replicas": replicas, "routing": "power-of-two", "requests": 3000, "warmup": 0, "max_queue_rows": 40}
    outcome, again, other = (simulate(load, service, Dynamic, Limits(16, 2), seed=seed, **course) for seed in (5, 5, 6))
    settled = outcome.snapshot.requests + sum(outcome.snapshot.errors.values())
    assert settled == outcome.offered_requests == 3000
    assert set(outcome.snapshot.errors) <= set(ERRORS)
    assert outcome.snapshot.waiting == 0
    assert 0 < outcome.utilisation <= 1
    assert (again.snapshot, again.served_rows_per_s) == (outcome.snapshot, outcome.served_rows_per_s)
    assert other.snapshot != outcome.snapshot


@pytest.mark.parametrize("load", [Poisson(1000, Mix((1, 9))), Bursty(1000, 4, 0.001)], ids=["poisson", "bursty"])
def test_loads_come_at_their_mean_rate(load):
    outcome = simulate(load, ServiceModel(beta=1e-5), AtOnce, Limits(16, 64), duration=15)
    assert outcome.offered_rows_per_s == pytest.approx(1000, rel=0.05)


def test_a_drift_makes_batches_slower_from_its_time_on():
    seen = []

    class Watching(AtOnce):
        def observe(self, batch: BatchRecord) -> None:
            seen.append((batch.started >= 4, batch.started >= 8, round(batch.seconds, 6)))

    simulate(Poisson(100), ServiceModel(beta=1e-3), Watching, Limits(8), duration=10, drift=[(4.0, 2.0), (8.0, 0.5)])
    assert set(seen) == {(False, False, 0.001), (True, False, 0.002), (True, True, 0.0005)}


@pytest.mark.thorough
def test_better_routing_waits_less():
    def wait(routing):
        course = {"replicas": 8, "routing": routing, "requests": 15_000}
        return simulate(Poisson(8 * 800), ServiceModel(beta=1e-3), AtOnce, Limits(1), **course).queue_wait_s["mean"]

    blind, two, least = wait("random"), wait("power-of-two"), wait("least-loaded")
    assert least < two < 0.5 * blind
    assert wait("round-robin") < least  # of times that are all alike: of equals the one that began first is free first
    assert blind == pytest.approx(0.8 * 1e-3 / (2 * 0.2), rel=0.15)  # of eight queues M/D/1


def test_a_client_stays_with_its_replica_under_sticky_routing():
    """Three clients who think long are never so many at one replica that their favourite is left."""
    outcome = simulate(ClosedLoop(3, 0.5), PLAIN, Dynamic, Limits(8), replicas=64, routing="sticky", requests=300)
    served = [one.requests for one in outcome.replicas if one.requests]
    assert len(served) <= 3
    assert sum(served) == outcome.snapshot.requests


def test_overload_is_said():
    outcome = simulate(Poisson(50_000), PLAIN, Dynamic, LIMITS, requests=20_000)
    assert "offered 50,000 rows/s > capacity 12,308 rows/s" in " ".join(outcome.notices)
    assert outcome.snapshot.errors["rejected"] > 0
    assert outcome.served_rows_per_s == pytest.approx(12_308, rel=0.03)


@pytest.mark.parametrize("later", [math.inf, 3600.0, 0.01], ids=["never", "an hour later", "a little later"])
def test_a_strategy_that_never_cuts_ends_the_simulation_of_an_open_load(later):
    class Never(Strategy):
        def cut_at(self, queue: QueueView) -> float:
            return queue.now + later

    with pytest.raises(StrategyError, match=r"strategy 'Never' \(module .*\) does not cut: \d+ requests? wait"):
        simulate(Poisson(100), PLAIN, Never, LIMITS, requests=100)


def test_what_a_strategy_leaves_at_the_end_is_drained_as_by_an_engine_that_closes():
    outcome = simulate(Poisson(100), PLAIN, Full, LIMITS, requests=100, warmup=0)
    assert outcome.snapshot.requests == 100
    assert set(outcome.snapshot.reasons) == {"full", "drain"}


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
    load = PiecewiseArrivals([(100, 1.0), (20_000, 0.2), (100, 4.0)], lambda rate: Poisson(rate, Mix(timeout=10)))
    outcome = simulate(load, PLAIN, Dynamic, LIMITS, warmup=0, recorder=lambda: watch)
    assert len(watch.settled_at) == outcome.offered_requests
    assert sum(rows for _, rows, _ in watch.batches) == outcome.snapshot.rows
    calm, busy, after = watch.latency(0.95, 0, 1), watch.latency(0.95, 1, 1.2), watch.latency(0.95, 2)
    assert max(calm, after) < 0.006 < 0.05 < busy
    assert math.isnan(watch.latency(0.95, 100))


def one_request(**course):
    return simulate(Poisson(1), PLAIN, Dynamic, Limits(1), **course)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [  # what no flag lets through: test_simulate_command.py has the others
        (lambda: Poisson(-1), "rate above 0"),
        (lambda: PiecewiseArrivals([(1, 0.0)], Poisson), "Give numbers above 0"),
        (lambda: Bursty(0), "rate above 0"),
        (lambda: Bursty(1, 1.0), "factor above 1"),
        (lambda: Bursty(1, 2.0, 0.0), "length above 0"),
        (lambda: ClosedLoop(0), "Give 1 or more"),
        (lambda: ClosedLoop(1, -1), "Give 0 or more"),
        (lambda: Mix((0, 1)), "Give 1 or more"),
        (lambda: Mix((3, 2)), "Give 1 or more"),
        (lambda: Mix(timeout=0), "over before it began"),
        (lambda: Mix(timeout=1e-9), "Give 1 µs or more"),
        (lambda: ServiceModel(alpha=1e300), "0 or more, 1e.06 at most"),
        (lambda: RecordedArrivals([]), "nothing arrives"),
        (lambda: one_request(), "never ends"),
        (lambda: one_request(requests=1, warmup=1), "leaves nothing"),
        (lambda: one_request(requests=1, replicas=0), "Give 1"),
    ],
)
def test_what_cannot_be_is_refused(wrong, said):
    with pytest.raises(UsageError, match=said):
        wrong()


def solved(rate, target, strategy=Dynamic, requests=6000):
    def run(replicas):
        return simulate(Poisson(rate), PLAIN, strategy, LIMITS, replicas=replicas, requests=requests)

    return solve(run, target, alone_s=PLAIN.seconds(1), offered=rate, capacity=PLAIN.capacity(64))


def test_the_answer_is_the_smallest_number_of_replicas_that_meets_the_target():
    solution = solved(60_000, 0.006)
    enough = {trial.replicas: trial.met for trial in solution.tried}
    assert (enough[solution.replicas], enough[solution.replicas - 1]) == (True, False)
    assert list(enough) == sorted(enough)
    assert f"{solution.replicas} replicas serve" in solution.answer
    assert f"{solution.replicas - 1} do not (p95 " in solution.answer


@pytest.mark.parametrize(
    ("rate", "target", "strategy", "tried", "said"),
    [
        (1000, 0.001, Dynamic, 0, "No number of replicas can: one request alone takes 2.05 ms"),
        (1000, 0.010, lambda: Dynamic(max_wait=0.05), 9, "No number of replicas was found"),
        (1e9, 0.05, Dynamic, 0, "Over 1,024 replicas would be needed"),
    ],
    ids=["below one request's time", "a strategy that waits too long", "more than anybody has"],
)
def test_a_target_out_of_reach_is_said_after_few_trials(rate, target, strategy, tried, said):
    solution = solved(rate, target, strategy, requests=2000)
    assert (solution.replicas, said in solution.answer) == (None, True)
    assert len(solution.tried) <= tried


def test_a_fit_follows_steps_and_never_falls():
    model = ServiceModel(beta=1e-3, step_rows=64, step_s=2e-3)
    found = ServiceModel.of_batches([(rows, model.seconds(rows)) for rows in (1, 32, 64, 65, 100, 128)])
    assert found.seconds(32) == pytest.approx(1e-3)
    assert found.seconds(100) == pytest.approx(3e-3, rel=0.25)
    dice = random.Random(3)
    noise = ServiceModel.of_batches([(rows, 0.001 * dice.uniform(0.5, 1.5)) for rows in range(1, 65)])
    times = [noise.seconds(rows) for rows in range(1, 200)]
    assert times == sorted(times)
    assert times[0] > 0


@pytest.mark.parametrize(
    ("model", "most", "expected"),
    [
        pytest.param(PLAIN, 64, 64 / 5.2e-3, id="a line"),
        pytest.param(ServiceModel(beta=1e-3, step_rows=16, step_s=1e-3), 40, 16_000, id="steps: just before one"),
        pytest.param(ServiceModel(points=[(1, 1e-3), (8, 1e-3), (16, 9e-3)]), 16, 8000, id="a knee"),
        pytest.param(ServiceModel(beta=1e-3, failures=0.5), 10, 5000, id="failures"),
        pytest.param(ServiceModel(beta=1e-3, turn_s=1e-3), 10, 5000, id="the engine's own time"),
    ],
)
def test_the_capacity_is_that_of_the_best_size(model, most, expected):
    assert model.capacity(most) == pytest.approx(expected)
    best = max((1 - model.failures) * n / (model.seconds(n) + model.turn(1)) for n in range(1, most + 1))
    assert model.capacity(most) >= best - 1e-6


@pytest.fixture
def recorded(tmp_path):
    """Record a simulation; the trace's path, and what came of it."""

    def run(load, service, strategy=Dynamic, limits=LIMITS, **course):
        recorders = []

        def record():
            recorders.append(Recorder(path, limits, "dynamic"))
            return recorders[-1]

        path = tmp_path / "t.jsonl"
        outcome = simulate(load, service, strategy, limits, warmup=0, recorder=record, **course)
        for recorder in recorders:
            recorder.close()
        merge_trace(path)
        return path, outcome

    return run


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_trace_tells_the_engines_own_time(recorded, replicas):
    service = ServiceModel(alpha=50e-6, beta=2e-3, turn_s=200e-6, turn_request_s=5e-6)
    path, _ = recorded(Poisson(6000 * replicas), service, requests=6000 * replicas, replicas=replicas)
    found = fitted(path).service
    assert found.turn_s == pytest.approx(200e-6, rel=0.05)
    assert found.turn_request_s == pytest.approx(5e-6, rel=0.1)
    assert found.seconds(16) == pytest.approx(service.seconds(16), rel=0.02)


@pytest.mark.parametrize(
    ("load", "strategy", "in_flight"),
    [
        pytest.param(Poisson(3000), Full, 1, id="a strategy that waits until a batch is full"),
        pytest.param(Poisson(6000), Dynamic, 2, id="two lanes, which tell nothing"),
        pytest.param(ClosedLoop(16, 0.002), Dynamic, 1, id="clients that are waited for"),
        pytest.param(ClosedLoop(16, 0.0005), Dynamic, 1, id="clients that are nearly always waited for"),
    ],
)
def test_waiting_for_company_is_not_taken_for_the_engines_own_time(recorded, load, strategy, in_flight):
    path, _ = recorded(load, PLAIN, strategy, Limits(64, in_flight), requests=4000)
    assert fitted(path).service.turn(8) == pytest.approx(0, abs=5e-6)


@pytest.mark.parametrize("limits", [Limits(32, 1), Limits(32, 2)])
def test_the_engines_own_time_delays_answers(limits):
    services = ServiceModel(beta=2e-3), ServiceModel(beta=2e-3, turn_s=1e-3)
    fast, late = (simulate(ClosedLoop(1), one, Dynamic, limits, requests=100).latency_s["mean"] for one in services)
    assert late - fast == pytest.approx(1e-3)


def test_a_report_and_a_trace_of_a_simulation_give_its_model_back(recorded, tmp_path):
    service = ServiceModel(alpha=100e-6, beta=3e-3, jitter=0.1, failures=0.02)
    path, outcome = recorded(Poisson(3000), service, limits=Limits(32, 2), requests=6000)
    assert len(read(path).arrivals) == 6000
    report = {"batches": {**batches_section(outcome.snapshot), "rows_max": 20}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    traced, reported = fitted(path), fitted(tmp_path / "report.json")
    assert (traced.limits, traced.largest, reported.largest) == (Limits(32, 2), outcome.max_batch_rows, 20)
    assert traced.service.jitter == pytest.approx(0.1, rel=0.2)
    assert traced.service.failures == pytest.approx(0.02, abs=0.01)
    for rows in (3, 6, 12):
        assert traced.service.seconds(rows) == pytest.approx(service.seconds(rows), rel=0.06)
        assert reported.service.seconds(rows) == pytest.approx(service.seconds(rows), rel=0.06)
