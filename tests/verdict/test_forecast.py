"""What the verdict predicts with: the curve of batch times, the bounds, and the replay of a run."""

import math
from dataclasses import replace

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_runs import a_run, lane

from gpuinfer.report.evidence import Curve, bounds, cap, curve_of
from gpuinfer.report.forecast import QueueSystem, alike, forecast, rows_per_s, systems_of

FLAT = Curve([(64, 0.020), (512, 0.020)])  # a batch costs the same whatever its size, up to 512 rows


def a_system(**changes):
    plain = {"search_s": [0.001] * 4, "shares": [100] * 4, "blocks": 2, "rows": 64.0, "lanes": 1, "curve": FLAT}
    return QueueSystem(**{**plain, **changes})


def test_the_curve_goes_through_its_points_and_the_roofline():
    curve = Curve([(64, 0.020), (512, 0.040)])  # at a point, between two, beyond the last, and below the first
    assert [curve.seconds(rows) for rows in (64, 288, 1024, 8)] == pytest.approx(
        [0.020, 0.030, 0.080, 0.0175], rel=1e-3
    )
    lanes = {"forward 0": {"forward": 5.0}, "forward 1": {"forward": 5.0}}
    best = {"rows_per_s": 20_000.0, "at_rows": 400, "arrangement": "2 forwards × 1 thread"}
    run = a_run("", wall_s=10.0, lanes=lanes, batch_s={64: (500, 10.0)}, roofline=best)
    assert curve_of(run).points == [(64, pytest.approx(0.020)), (400, pytest.approx(0.040))]


sizes = st.dictionaries(st.integers(1, 5000), st.tuples(st.integers(1, 100), st.floats(1e-6, 10)), min_size=1)


@given(sizes, st.floats(1, 10_000), st.floats(1, 10_000))
def test_a_larger_batch_never_takes_less_time(batch_s, one, other):
    curve = curve_of(a_run("", wall_s=10.0, batch_s=batch_s))
    low, high = sorted((one, other))
    assert curve.seconds(low) <= curve.seconds(high) * (1 + 1e-9)


def test_the_bounds_are_those_of_the_laws():
    run = a_run(
        "", wall_s=10.0, lanes=[lane("search", search=8.0), lane("forward 0", forward=5.0)], requests=1000,
        rows_per_s=6400.0, batch_s={64: (1000, 5.0)}, latency_s=0.006, cores=2, cpu_s=10.0,
        facts={"workers": 1, "blocks": 2, "offered_rows_per_s": 7000.0},
    )  # fmt: skip
    assert bounds(run, curve_of(run)) == {
        "forward": pytest.approx(64 / 0.005),  # one batch of 64 rows after the other
        "outstanding": pytest.approx(128 / 0.010),  # both blocks in one batch
        "search": pytest.approx(6400 / 0.8),  # U = X D
        "cores": pytest.approx(6400 / 0.5),
        "arrival": 7000.0,
        "concurrency": pytest.approx(2 * 64 / (0.008 + 0.005)),  # N / (ΣD + Z)
    }


@pytest.mark.parametrize(
    ("full", "free", "rows_outstanding", "felt"),
    [
        pytest.param(9, 1, 1000, 64, id="full batches and more outstanding than fits"),
        pytest.param(9, 1, 64, math.inf, id="full batches of all that is outstanding"),
        pytest.param(1, 9, 1000, math.inf, id="batches that are seldom full"),
    ],
)
def test_a_cap_is_one_that_is_felt(full, free, rows_outstanding, felt):
    lanes, counts = [lane("forward 0", wall_s=1.0, forward=1.0)], {"full": full, "free": free}
    facts = {"rows_outstanding": rows_outstanding}
    assert cap(a_run("", wall_s=1.0, lanes=lanes, batch_s={64: (10, 1.0)}, reasons=counts, facts=facts)) == felt


LONELY = {"search_s": [0.01, 10.0], "shares": [100, 1], "blocks": 1, "wait_s": 0.07}


@pytest.mark.parametrize(
    ("changes", "rate"),
    [
        pytest.param({}, 256 / 0.020, id="busy lanes: half of all blocks a batch, while the others search"),
        pytest.param({"cap": 64.0}, 64 / 0.020, id="a cap of one block"),
        pytest.param({"cap": 64.0, "lanes": 2}, 128 / 0.020, id="a cap of one block, two lanes"),
        pytest.param({"search_s": [0.1] * 4}, 4 * 64 / 0.1, id="slow searches: workers that are never idle"),
        pytest.param({"blocks": 1, "search_s": [0.02], "shares": [300]}, 64 / 0.04, id="one block: there and back"),
        pytest.param(LONELY, 64 * 100 / (100 * 0.1), id="a wait costs what it lasts"),
    ],
)
def test_a_replay_does(changes, rate):
    assert rows_per_s([a_system(**changes)]) == pytest.approx(rate, rel=0.1)


systems = st.builds(
    QueueSystem,
    search_s=st.lists(st.floats(0, 0.1), min_size=3, max_size=3),
    shares=st.lists(st.floats(0, 60), min_size=3, max_size=3),
    blocks=st.integers(1, 4),
    rows=st.floats(1, 512),
    lanes=st.integers(1, 3),
    curve=st.just(Curve([(1, 0.01), (512, 0.05)])),
    cap=st.just(math.inf) | st.floats(1, 1024),
    wait_s=st.sampled_from([0.0, 0.02]),
)


@settings(deadline=None, max_examples=examples(50))
@given(systems)
def test_no_replay_beats_the_laws(system):
    done = [max(1, round(share)) for share in system.shares]
    rate = rows_per_s([system])
    lanes = system.lanes * system.curve.rate(512) * 1.001
    search = min(sum(done) * system.rows / (0.9 * seconds * count + 1e-9)
                 for seconds, count in zip(system.search_s, done, strict=True))  # fmt: skip
    assert 0 < rate <= min(lanes, search) * (1 + 1e-6)


def test_a_forecast_compares_replays_as_far_as_they_fit():
    searches = [lane(f"worker {n}: search", {"search": 100}, search=9.9 if n == 0 else 2.0) for n in range(4)]
    known = {"wall_s": 10.0, "requests": 400, "rows_per_s": 64 * 40, "batch_s": {64: (400, 4.0)}}
    run = a_run("", lanes=[*searches, lane("forward 0", forward=4.0)], facts={"workers": 4, "blocks": 2}, **known)
    gain = forecast(run, systems_of(run, curve_of(run)), alike)
    assert gain.expected == pytest.approx(10.0 / 4.0, rel=0.1)  # then the model is busy all the time
    assert gain.low <= gain.expected <= gain.high

    elsewhere = replace(run, rows_per_s=300.0)
    assert forecast(elsewhere, systems_of(run, curve_of(run)), alike).expected is None  # the replay does not fit
    for clients in (0, 0.4):  # too few to replay
        alone = a_run("", lanes=[lane("forward 0", forward=4.0)], facts={"clients": clients}, **known)
        assert systems_of(alone, curve_of(alone)) == []

    lanes = [lane(f"worker {n}: {name}", {kind: 100}, **{kind: 5.0}) for n in range(3)
             for name, kind in (("search", "search"), ("forward 0", "forward"))]  # fmt: skip
    counts = {"requests": 300, "rows_per_s": 1920.0, "batch_s": {64: (300, 15.0)}, "facts": {"workers": 3}}
    each = a_run("", wall_s=10.0, lanes=lanes, **counts)
    found = systems_of(each, curve_of(each))  # a queue of its own for each process with forward lanes
    assert [(len(system.search_s), system.lanes, system.blocks) for system in found] == [(1, 1, 1)] * 3
    assert rows_per_s(found) == pytest.approx(1920.0, rel=0.1)
