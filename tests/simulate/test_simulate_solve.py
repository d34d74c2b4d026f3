"""How many replicas it takes, and service models fitted to what runs have left."""

import json
import random

import pytest

from gpuinfer.api import Limits
from gpuinfer.errors import UsageError
from gpuinfer.report import service_times
from gpuinfer.service import ServiceModel
from gpuinfer.simulate import Poisson, simulate
from gpuinfer.simulate.fitting import fitted
from gpuinfer.simulate.solving import solve
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.trace.merge import merge
from gpuinfer.trace.recorder import Recorder

PLAIN = ServiceModel(alpha=50e-6, beta=2e-3)


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


def test_numbers_below_the_load_are_not_tried():
    solution = solved(20_000, 0.05)
    assert [trial.replicas for trial in solution.tried] == [2]
    assert "1 does not (offered 20,000 > capacity 12,308 rows/s)" in solution.answer


def test_one_replica_may_be_enough():
    assert solved(1000, 0.05).replicas == 1


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


def test_batches_that_fail_cannot_be_served_by_more_replicas():
    solution = solved(1000, 0.05, service=ServiceModel(beta=2e-3, failures=0.3), requests=2000)
    assert solution.replicas is None
    assert "is served" in solution.answer


# Service models


@pytest.mark.parametrize("jitter", [0.0, 0.1])
@pytest.mark.parametrize("most", [8, 64])
def test_a_fit_finds_the_model_again(jitter, most):
    model, dice = ServiceModel(alpha=50e-6, beta=2e-3, jitter=jitter), random.Random(1)
    sizes = [dice.randint(1, most) for _ in range(4000)]
    found = ServiceModel.of_batches([(rows, model.draw(rows, dice)) for rows in sizes], failures=0.02)
    assert found.jitter == pytest.approx(jitter, abs=0.02)
    assert found.failures == 0.02
    for rows in (1, 3, 8, 20, 64, 128):
        assert found.seconds(rows) == pytest.approx(model.seconds(rows), rel=0.06)


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


def test_one_size_alone_costs_by_the_row_beyond_it():
    found = ServiceModel.of_batches([(16, 0.004)] * 5)
    assert found.seconds(16) == pytest.approx(0.004)
    assert found.seconds(1) == pytest.approx(0.004)
    assert found.seconds(32) == pytest.approx(0.008)


@pytest.mark.parametrize(
    ("model", "most", "expected"),
    [
        pytest.param(PLAIN, 64, 64 / 5.2e-3, id="a line"),
        pytest.param(ServiceModel(beta=1e-3, step_rows=16, step_s=1e-3), 40, 16_000, id="steps: just before one"),
        pytest.param(ServiceModel(points=[(1, 1e-3), (8, 1e-3), (16, 9e-3)]), 16, 8000, id="a knee"),
        pytest.param(ServiceModel(beta=1e-3, failures=0.5), 10, 5000, id="failures"),
    ],
)
def test_the_capacity_is_that_of_the_best_size(model, most, expected):
    assert model.capacity(most) == pytest.approx(expected)
    assert model.capacity(most) >= max((1 - model.failures) * n / model.seconds(n) for n in range(1, most + 1)) - 1e-6


def test_a_report_and_a_trace_of_a_simulation_give_its_model_back(tmp_path):
    service = ServiceModel(alpha=100e-6, beta=3e-3, jitter=0.1, failures=0.02)
    recorders = []

    def record():
        recorders.append(Recorder(tmp_path / "t.jsonl", Limits(32, 2), "dynamic"))
        return recorders[-1]

    outcome = simulate(Poisson(3000), service, Dynamic, Limits(32, 2), requests=6000, warmup=0, recorder=record)
    for recorder in recorders:
        recorder.close()
    assert merge(tmp_path / "t.jsonl").requests == 6000
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
    with pytest.raises(UsageError, match="cannot be read"):
        fitted(tmp_path)
