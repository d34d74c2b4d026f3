"""`priority` under twice the load that can be served, simulated."""

import pytest

from gpuinfer.api import Limits, Priority
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.lab.simulate import Mix, Poisson, simulate
from gpuinfer.stats import summarise
from gpuinfer.strategies.priority import ByPriority

LIMITS = Limits(64)
FLAT = ServiceModel(alpha=10e-6, beta=10e-3)
BY_ROW = ServiceModel(alpha=0.2e-3, beta=2e-3)
VARYING = ServiceModel(alpha=0.1e-3, beta=3e-3, jitter=0.1)


def p99(outcome):
    return summarise(outcome.snapshot.classes["high"]["latency"])["p99"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("service", "high", "rows"),
    [
        pytest.param(FLAT, 0.3, (1, 1), id="rows cost nothing"),
        pytest.param(BY_ROW, 0.02, (1, 1), id="rows cost, high comes rarely"),
        pytest.param(BY_ROW, 0.2, (1, 1), id="rows cost, high is a fifth"),
        pytest.param(BY_ROW, 0.45, (1, 1), id="rows cost, high nearly uses up its share"),
        pytest.param(VARYING, 0.3, (1, 1), id="times vary"),
        pytest.param(BY_ROW, 0.3, (1, 16), id="blocks"),
    ],
)
def test_under_twice_the_load(service, high, rows):
    """High is as it would be alone but for one full batch; low keeps its share; the backend is kept busy."""
    capacity = service.capacity(LIMITS.max_rows)
    others = (2 - high) / 2
    classes = {Priority.HIGH: high / 2, Priority.NORMAL: others / 2, Priority.LOW: others / 2}
    mean_rows = sum(rows) / 2
    alone_load = Poisson(high * capacity, Mix(rows, {Priority.HIGH: 1.0}))
    alone = simulate(alone_load, service, ByPriority, LIMITS, requests=5_000, seed=1)
    load = Poisson(2 * capacity, Mix(rows, classes))
    mixed = simulate(load, service, ByPriority, LIMITS, duration=max(4.0, 800 * mean_rows / high / capacity), seed=2)
    assert p99(mixed) <= p99(alone) + service.seconds(LIMITS.max_rows)
    counts = mixed.snapshot.classes
    served = sum(count["rows"] for count in counts.values())
    assert counts["low"]["rows"] >= 0.95 * 0.2 * served
    assert mixed.served_rows_per_s >= 0.9 * capacity
    assert sum(counts["high"]["errors"].values()) == 0
    assert sum(counts["low"]["errors"].values()) > 0


@pytest.mark.thorough
def test_slots_are_filled_by_shares():
    limits = Limits(max_rows=8, slots=16, in_flight=4)
    classes = {Priority.HIGH: 0.4, Priority.NORMAL: 0.3, Priority.LOW: 0.3}
    load = Poisson(4 * BY_ROW.capacity(8) * 4, Mix(classes=classes))
    counts = simulate(load, BY_ROW, ByPriority, limits, requests=30_000, max_queue_rows=512).snapshot.classes
    served = [counts[name]["rows"] for name in ("high", "normal", "low")]
    assert [rows / sum(served) for rows in served] == pytest.approx([0.5, 0.3, 0.2], abs=0.03)
