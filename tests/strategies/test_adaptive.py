"""`adaptive`: a latency target kept where that can be, said where it cannot, and never at the cost of throughput."""

from __future__ import annotations

from functools import partial

import pytest

from gpuinfer.api import BatchRecord, Limits, Reason
from gpuinfer.backends.service_model import ServiceModel
from gpuinfer.lab.simulate import ClosedLoop, Poisson, simulate
from gpuinfer.strategies.adaptive import Adaptive
from gpuinfer.strategies.dynamic import Dynamic
from gpuinfer.testing.strategies import waiting

LINE = ServiceModel(alpha=0.0005, beta=0.005, jitter=0.1)
STEPS = ServiceModel(alpha=0.00005, beta=0.004, step_rows=64, step_s=0.006, jitter=0.05)
TARGET = 0.05


def taught(model=LINE, batches=40, **options):
    strategy = Adaptive(**options)
    for number in range(batches):
        rows = 1 + number % 16
        strategy.observe(BatchRecord(rows, rows, 0.0, model.seconds(rows), 0.0, Reason.FREE))
    return strategy


class Latencies:
    """A recorder that keeps when each request arrived and how long it took."""

    def __init__(self):
        self.found = []

    def arrived(self, request):
        pass

    def cut(self, requests, rows, reason, now):
        return 0

    def ran(self, batch, seconds, now):
        pass

    def settled(self, request, outcome, now):
        assert outcome == "ok"
        self.found.append((request.arrived, now - request.arrived))

    def close(self):
        pass

    def p95(self, since, until):
        chosen = sorted(seconds for arrived, seconds in self.found if since <= arrived < until)
        return chosen[int(0.95 * len(chosen))]


@pytest.mark.thorough
@pytest.mark.sample
@pytest.mark.parametrize("load", [0.05, 0.3, 0.6, 0.8])
@pytest.mark.parametrize("model", [LINE, STEPS], ids=["line", "steps"])
def test_the_target_is_met_where_a_fixed_setting_meets_it_and_nobody_waits_longer_on_average(model, load):
    rows = 128 if model is STEPS else 64
    arrivals = Poisson(load * rows / model.seconds(rows))
    run = partial(simulate, arrivals, model, limits=Limits(rows), requests=12_000, warmup=0.25, seed=5)
    fixed = [run(strategy=partial(Dynamic, max_wait=w, max_rows=r)) for w in (0, 0.005) for r in (16, 64)]
    adaptive = run(strategy=partial(Adaptive, latency_target=TARGET))
    assert min(one.latency_s["p95"] for one in fixed) > TARGET or adaptive.latency_s["p95"] <= TARGET
    assert adaptive.latency_s["mean"] <= 1.05 * min(one.latency_s["mean"] for one in fixed)


STEP_IN_LOAD = Poisson([(load * 64 / LINE.seconds(64), 4.0) for load in (0.08, 0.75, 0.08)])


@pytest.mark.parametrize(
    ("load", "more", "spans"),
    [
        pytest.param(STEP_IN_LOAD, {}, [(0, 4), (6, 8), (10, 12)], id="a step in load"),
        pytest.param(
            Poisson(0.2 * 64 / LINE.seconds(64)),
            {"duration": 12.0, "drift": ((6.0, 2.0),)},
            [(0, 6), (8, 12)],
            id="a service time that doubles",
        ),
    ],
)
def test_the_target_is_kept_again_after(load, more, spans):
    recorders = []
    build = partial(Adaptive, latency_target=TARGET)
    simulate(
        load, LINE, build, Limits(64), seed=3, recorder=lambda: recorders.append(Latencies()) or recorders[-1], **more
    )
    for since, until in spans:
        assert recorders[0].p95(since, until) <= TARGET


@pytest.mark.parametrize(
    "load",
    [ClosedLoop(1), ClosedLoop(64), Poisson(1700), Poisson(300)],
    ids=["one client", "64 clients", "overload", "light"],
)
def test_a_target_that_cannot_be_kept_is_said_once_and_costs_no_throughput(load):
    run = partial(simulate, load, LINE, limits=Limits(64), requests=4000, seed=1)
    vain, free = run(strategy=partial(Adaptive, latency_target=0.002)), run(strategy=Adaptive)
    said = [notice for notice in vain.notices if "latency_target" in notice]
    assert len(said) == 1
    assert "latency_target=2ms cannot be kept: a batch of 1 row" in said[0]
    assert vain.served_rows_per_s >= 0.95 * free.served_rows_per_s


def test_it_waits_for_company_only_as_long_as_the_oldest_deadline_allows():
    strategy = taught(latency_target=TARGET, batches=400)
    crowd = {"live": 60, "thinking": 50, "think_s": 0.004}
    relaxed = strategy.cut_at(waiting([1.0, 1.001], **crowd))
    deadlines = [1.0 + LINE.seconds(3) + 0.001, 9.0]
    pressed = strategy.cut_at(waiting([1.0, 1.001], deadlines=deadlines, **crowd))
    assert 1.001 < relaxed < 1.02
    assert 1.0 <= pressed <= 1.0011
    assert strategy.reason(waiting([1.0, 1.001], now=pressed, deadlines=deadlines, **crowd)) is Reason.DEADLINE


def test_a_batch_is_no_larger_than_the_target_allows_unless_that_could_not_serve_what_arrives():
    strategy = taught(LINE, 400, latency_target=0.010)
    slow, fast = waiting([1.0] * 16, arrival_rate=100.0), waiting([1.0] * 16, arrival_rate=5000.0)
    assert 8 <= len(strategy.select(slow)) <= 10
    assert strategy.reason(slow) is Reason.CAP
    assert len(strategy.select(fast)) == 16


def test_blocks_that_never_add_up_to_a_size_are_not_cut_short_to_see_it():
    strategy = Adaptive()
    view = waiting([1.0] * 5, rows=100, max_rows=1024)
    sizes = []
    for _ in range(60):
        rows = sum(request.rows for request in strategy.select(view))
        strategy.account(strategy.select(view), view.now)
        strategy.observe(BatchRecord(rows, rows // 100, 1.0, 0.005 + 1e-5 * rows, 0.0, Reason.FREE))
        sizes.append(rows)
    assert set(sizes[:30]) == {200, 500}
    assert set(sizes[30:]) == {500}
