"""How many replicas it takes, and service models fitted to what runs have left."""

import json
import math
import os
import random
from pathlib import Path

import pytest

from gpuinfer.api import Limits, QueueView, Strategy
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.engine.trace_merge import merge_trace
from gpuinfer.engine.trace_reader import read
from gpuinfer.engine.trace_recorder import Recorder
from gpuinfer.errors import UsageError
from gpuinfer.lab.simulate import ClosedLoop, Poisson, simulate
from gpuinfer.lab.simulate.fitting import fitted, of_trace
from gpuinfer.lab.simulate.outcome import solve
from gpuinfer.report.report import service_times
from gpuinfer.strategies.dynamic import Dynamic

PLAIN, PLAIN_LIMITS = ServiceModel(alpha=50e-6, beta=2e-3), Limits(64)


class Gathering(Strategy):
    """Waits until a batch is full, however long that takes."""

    def cut_at(self, queue: QueueView) -> float:
        return queue.now if queue.rows >= queue.limits.max_rows else math.inf


def solved(rate, target, *, service=PLAIN, strategy=Dynamic, requests=6000, max_rows=64):
    def run(replicas):
        return simulate(Poisson(rate), service, strategy, Limits(max_rows), replicas=replicas, requests=requests)

    return solve(run, target, alone_s=service.seconds(1), offered=rate, capacity=service.capacity(max_rows))


def test_the_answer_is_the_smallest_number_that_meets_the_target():
    solution = solved(60_000, 0.006)
    assert solution.replicas is not None
    enough = {trial.replicas: trial.met for trial in solution.tried}
    assert enough[solution.replicas]
    assert not enough[solution.replicas - 1]
    assert list(enough) == sorted(enough)
    assert f"{solution.replicas} replicas serve" in solution.answer
    assert f"{solution.replicas - 1} do not (p95 " in solution.answer


def test_a_target_below_the_time_of_one_request_is_refused_at_once():
    solution = solved(1000, 0.001)
    assert solution.replicas is None
    assert not solution.tried
    assert "No number of replicas can: one request alone takes 2.05 ms" in solution.answer


def test_a_strategy_that_waits_too_long_is_noticed():
    solution = solved(1000, 0.010, strategy=lambda: Dynamic(max_wait=0.05), requests=2000)
    assert solution.replicas is None
    assert "No number of replicas was found" in solution.answer
    assert len(solution.tried) < 10


def test_more_replicas_than_anybody_has_are_not_tried():
    solution = solved(1e9, 0.05)
    assert solution.replicas is None
    assert not solution.tried
    assert "Over 1,024 replicas would be needed" in solution.answer


# Service models


def test_a_fit_follows_steps():
    model = ServiceModel(beta=1e-3, step_rows=64, step_s=2e-3)
    found = ServiceModel.of_batches([(rows, model.seconds(rows)) for rows in (1, 32, 64, 65, 100, 128)])
    assert found.seconds(32) == pytest.approx(1e-3)
    assert found.seconds(100) == pytest.approx(3e-3, rel=0.25)


def test_a_fit_to_noise_never_falls():
    dice = random.Random(3)
    found = ServiceModel.of_batches([(rows, 0.001 * dice.uniform(0.5, 1.5)) for rows in range(1, 65)])
    times = [found.seconds(rows) for rows in range(1, 200)]
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


def recorded(path, load, service, strategy=Dynamic, limits=PLAIN_LIMITS, **how):
    """The trace of a simulation, and what came of it."""
    recorders = []

    def record():
        recorders.append(Recorder(path, limits, "dynamic"))
        return recorders[-1]

    outcome = simulate(load, service, strategy, limits, warmup=0, recorder=record, **how)
    for recorder in recorders:
        recorder.close()
    merge_trace(path)
    return read(path), outcome


@pytest.mark.parametrize("replicas", [1, 3])
def test_a_trace_tells_the_engines_own_time(tmp_path, replicas):
    service = ServiceModel(alpha=50e-6, beta=2e-3, turn_s=200e-6, turn_request_s=5e-6)
    load = Poisson(6000 * replicas)
    trace, _ = recorded(tmp_path / "t.jsonl", load, service, requests=6000 * replicas, replicas=replicas)
    found = of_trace(trace).service
    assert found.turn_s == pytest.approx(200e-6, rel=0.05)
    assert found.turn_request_s == pytest.approx(5e-6, rel=0.1)
    assert found.seconds(16) == pytest.approx(service.seconds(16), rel=0.02)


@pytest.mark.parametrize(
    ("load", "strategy", "in_flight"),
    [
        pytest.param(Poisson(3000), Gathering, 1, id="a strategy that waits until a batch is full"),
        pytest.param(Poisson(6000), Dynamic, 2, id="two lanes, which tell nothing"),
        pytest.param(ClosedLoop(16, 0.002), Dynamic, 1, id="clients that are waited for"),
        pytest.param(ClosedLoop(16, 0.0005), Dynamic, 1, id="clients that are nearly always waited for"),
    ],
)
def test_waiting_for_company_is_not_taken_for_the_engines_own_time(tmp_path, load, strategy, in_flight):
    service = ServiceModel(alpha=50e-6, beta=2e-3)
    trace, _ = recorded(tmp_path / "t.jsonl", load, service, strategy, Limits(64, in_flight), requests=4000)
    found = of_trace(trace).service
    assert found.turn(8) == pytest.approx(0, abs=5e-6)


@pytest.mark.parametrize("limits", [Limits(32, 1), Limits(32, 2)])
def test_the_engines_own_time_delays_answers(limits):
    plain, slow = ServiceModel(beta=2e-3), ServiceModel(beta=2e-3, turn_s=1e-3)
    fast, late = (
        simulate(ClosedLoop(1), service, Dynamic, limits, requests=100).latency_s["mean"] for service in (plain, slow)
    )
    assert late - fast == pytest.approx(1e-3)


def test_a_report_and_a_trace_of_a_simulation_give_its_model_back(tmp_path):
    service = ServiceModel(alpha=100e-6, beta=3e-3, jitter=0.1, failures=0.02)
    trace, outcome = recorded(tmp_path / "t.jsonl", Poisson(3000), service, limits=Limits(32, 2), requests=6000)
    assert len(trace.arrivals) == 6000
    report = {"batches": {"seconds": service_times(outcome.snapshot.batch_s), "rows_max": 20}}
    (tmp_path / "report.json").write_text(json.dumps(report))
    traced, reported = fitted(tmp_path / "t.jsonl"), fitted(tmp_path / "report.json")
    assert traced.limits == Limits(32, 2)
    assert traced.largest == outcome.max_batch_rows
    assert reported.largest == 20
    assert traced.service.jitter == pytest.approx(0.1, rel=0.2)
    assert traced.service.failures == pytest.approx(0.02, abs=0.01)
    for rows in (3, 6, 12):
        assert traced.service.seconds(rows) == pytest.approx(service.seconds(rows), rel=0.06)
        assert reported.service.seconds(rows) == pytest.approx(service.seconds(rows), rel=0.06)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        pytest.param("", "is no trace", id="empty"),
        pytest.param("{}", "is no trace", id="an object of nothing"),
        pytest.param("[1]", "neither a report nor a trace", id="a list"),
        pytest.param('{"batches": {}}', "holds no batch times", id="a report without times"),
        pytest.param('{"batches": {"seconds": {"x": 1}}}', "holds no batch times", id="times of no size"),
        pytest.param('{"batches": {"seconds": {"4": -1}}}', "holds no batch times", id="a time below 0"),
        pytest.param('{"batches": 7}', "holds no batch times", id="no batches"),
        pytest.param('{"batches": {"seconds": {"1e999": 1}}}', "holds no batch times", id="an endless size"),
        pytest.param(f'{{"batches": {{"seconds": {{"1": 1{"0" * 400}}}}}}}', "holds no", id="an endless time"),
        pytest.param('{"schema": "gpuinfer.trace/9"}\n["a"]\n', "of another version", id="a trace of another version"),
    ],
)
def test_a_file_that_says_nothing_of_a_backend_is_refused(tmp_path, text, said):
    (tmp_path / "x").write_text(text)
    with pytest.raises(UsageError, match=said):
        fitted(tmp_path / "x")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(UsageError, match="there is no file"):
        fitted(tmp_path / "x")
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(UsageError, match="cannot be read"):
            fitted(place)
