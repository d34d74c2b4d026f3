"""What one run is compared by, how sure a handful of runs lets one be, what a search makes of it, and whether answers
are the model's own.
"""

import math
import random
from dataclasses import replace
from statistics import median

import numpy as np
import pytest
from bench_plugins import CrookedBlocks, Liar, Swapper
from helpers import AtOnce, Counting
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.api import ModelSpec, Progress, Setup
from gpuinfer.backends.central import Central
from gpuinfer.backends.inprocess import InProcess
from gpuinfer.lab.bench.measurement import LATENCY, SpeedMeter, interval, rate_to_the_end, ratio, ratio_of_turns
from gpuinfer.lab.bench.parity import BLOCKS, check_parity, difference
from gpuinfer.lab.bench.tuning import climb_ladder, ladder
from gpuinfer.runtime.run import RunPlan, RunUpdate
from gpuinfer.stats import Histogram, Snapshot
from gpuinfer.strategies.dynamic import Dynamic

pytestmark = pytest.mark.usefixtures("children_forked")

# Intervals

speeds = st.floats(0.1, 1e7)


@given(st.lists(speeds, min_size=2, max_size=20))
def test_the_median_lies_within_its_interval(values):
    found = interval(values)
    assert found.median == median(values)
    assert found.low <= found.median * (1 + 1e-9)
    assert found.high >= found.median * (1 - 1e-9)


@given(st.lists(st.tuples(speeds, st.floats(0.5, 2.0)), min_size=2, max_size=9))
def test_what_slows_both_runs_of_a_pair_does_not_touch_their_ratio(pairs):
    theirs, ours = [speed for speed, _ in pairs], [speed * times for speed, times in pairs]
    assert ratio(ours, theirs).median == pytest.approx(median(times for _, times in pairs))


@pytest.mark.parametrize("n", [2, 3, 5, 6, 9, 20])
def test_the_interval_holds_the_truth_in_95_of_100_series(n):
    noise = random.Random(n)
    series = 4000
    held = sum(interval([100 * math.exp(noise.gauss(0, 0.1)) for _ in range(n)]).holds(100) for _ in range(series))
    assert held / series > 0.95 - 0.01


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_interval_of_turns_holds_the_truth_in_95_of_100_series_whatever_the_drift(n):
    """Turns A B B A …, each with noise of 5 %: those of a machine that keeps its pace, and of one that slows down."""
    dice = random.Random(100 * n)
    for drift in (0.0, 0.02):
        held, series = 0, 3000
        for _ in range(series):
            rates = ([], [])
            for turn in range(2 * n):
                which = (0, 1, 1, 0)[turn % 4]
                rates[which].append(math.exp(0.4 * which - drift * turn + dice.gauss(0, 0.05)))
            held += ratio_of_turns(rates[1], rates[0]).holds(math.exp(0.4))
        assert held / series > 0.95 - 0.01


@pytest.mark.parametrize("values", [[5.0], [5.0, 0.0]], ids=["one run", "a run that did nothing"])
def test_without_noise_to_go_by_there_is_no_interval(values):
    found = interval(values)
    assert (found.known, found.ends) == (False, None)
    assert found.holds(1e9)


# Rates


def look(elapsed_s, counts=(), rows=0, facts=(), latency=()):
    seen = Histogram()
    for seconds in latency:
        seen.add(seconds)
    snapshot = Snapshot(rows=rows, latency=seen.to_wire())
    return RunUpdate(Progress(0, counts=dict(counts), facts=dict(facts)), snapshot, elapsed_s, 0.0, "running", None)


@pytest.mark.parametrize(
    ("seconds", "slow_until", "step", "found"),
    [
        pytest.param(5.0, 0.9, 1.0, pytest.approx(1000, rel=0.01), id="the start is left out"),
        pytest.param(5.0, 0.0, 300, pytest.approx(1000, rel=0.05), id="a counter that grows in blocks"),
        pytest.param(2.0, 0.0, 1200.0, pytest.approx(950, rel=0.06), id="that moves once: the whole run"),
        pytest.param(2.0, 0.0, 1e9, 900.0, id="that does not move: the whole run"),
    ],
)
def test_a_timed_run_has_the_speed_of_its_line(seconds, slow_until, step, found):
    meter, at = SpeedMeter(seconds), 0.0
    while True:
        count = 100 * min(at, slow_until) + 1000 * max(0.0, at - slow_until)
        if meter.enough(look(at, {"evaluations": count // step * step})):
            break
        at += 0.1
    throughput = {"evaluations_per_s": 900.0, "simulations_per_s": 400.0, "games_per_min": 9.0}
    assert meter.rate({"throughput": throughput}) == ("evaluations_per_s", found)


def test_without_such_counters_the_rows_that_were_answered_are():
    meter, rows = SpeedMeter(1.0), 0
    while not meter.enough(look(rows / 100, {"games": 1}, rows=rows)):
        rows += 10
    throughput = {"evaluations_per_s": 90.0, "rows_per_s": 90.0, "games_per_min": 9.0}
    assert meter.rate({"throughput": throughput}) == ("evaluations_per_s", pytest.approx(100))


@pytest.mark.parametrize(
    ("throughput", "found"),
    [
        ({"rows_per_s": 9.0, "games_per_min": 3.0}, ("games_per_min", 3.0)),
        ({"games_per_min": 0.0, "rows_per_s": 9.0}, ("rows_per_s", 9.0)),
        ({"questions_per_s": 2.0}, ("questions_per_s", 2.0)),
        ({}, ("", 0.0)),
    ],
)
def test_a_run_to_its_end_has_the_speed_of_its_report(throughput, found):
    assert rate_to_the_end({"throughput": throughput}) == found
    assert SpeedMeter(3.0).rate({"throughput": throughput}) == found


def test_a_load_from_outside_is_judged_by_its_latencies_past_the_start_and_clients_by_rows():
    meter, facts = SpeedMeter(10.0), {"offered_rows_per_s": 200.0}
    slow = [1.0] * 50  # at the start, while the first batches warm up
    for at in range(11):
        meter.enough(look(at, rows=200 * at, facts=facts, latency=slow + [0.01] * (100 * (at - 1))))
    report = {"throughput": {"rows_per_s": 190.0}, "latency_s": {"p95": 0.9}}
    assert meter.rate(report) == (LATENCY, pytest.approx(0.01, rel=0.02))
    assert meter.served(report) == pytest.approx(200)
    assert meter.of_load
    nothing = SpeedMeter(1.0)
    nothing.enough(look(1.0, facts=facts))
    assert nothing.rate({"throughput": {}, "latency_s": {}}) == (LATENCY, 0.0)
    for seconds in (4.0, None):
        meter = SpeedMeter(seconds)
        for at in range(1, 5):
            meter.enough(look(at, rows=50 * at, facts={"clients": 8}))
        report = {"throughput": {"evaluations_per_s": 50.0, "rows_per_s": 50.0}, "latency_s": {}}
        assert meter.rate(report) == ("rows_per_s", pytest.approx(50.0))


# The bracketed search, on speeds that are formulas


@pytest.mark.parametrize(
    ("arguments", "rungs", "start"),
    [
        pytest.param((1, 2, 2), ["1", "2"], 1, id="two cores"),
        pytest.param((1, 6, 6), ["1", "2", "4", "6"], 3, id="the last rung is the most, a doubling or not"),
        pytest.param((100, 800, 300), ["100", "200", "400", "800"], 2, id="the nearest by ratio"),
        pytest.param((5, 5, 5), ["5"], 0, id="nothing to choose"),
    ],
)
def test_a_ladder_doubles_from_the_least_to_the_most(arguments, rungs, start):
    found = ladder("workers", *arguments)
    assert (list(found.rungs), found.start) == (rungs, start)


@given(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9), st.integers(0, 9))
def test_the_peak_is_found_wherever_it_is(games, best_games, rows, best_rows):
    """Of a speed that falls by a quarter for each doubling away from it."""
    asked, peaks = [], {"games": (2**games, 2**best_games), "rows": (2**rows, 2**best_rows)}

    def rate(point):
        asked.append(point)
        return 1000 * 0.75 ** sum(abs(math.log2(int(point.get(one, own)) / best)) for one, (own, best) in peaks.items())

    found = climb_ladder({}, [ladder("games", 1, 512, 2**games), ladder("rows", 1, 512, 2**rows)], rate)
    assert {one: int(found.get(one, own)) for one, (own, _) in peaks.items()} == {
        one: best for one, (_, best) in peaks.items()
    }
    assert len(asked) <= 1 + 2 * 2 + abs(games - best_games) + abs(rows - best_rows)


def test_a_gain_within_the_noise_is_no_reason_to_move_and_what_cannot_run_ends_its_ladder_alone():
    def rate(point):
        return None if "workers" in point else 200.0 if point.get("games") == "16" else 100.0

    assert climb_ladder({}, [ladder("games", 1, 64, 8)], lambda point: 102.0 if point else 100.0) == {}
    assert climb_ladder({}, [ladder("workers", 1, 8, 4), ladder("games", 1, 64, 8)], rate) == {"games": "16"}


# Whether answers are the model's own

SPEC = ModelSpec("blobnet-small", inputs=40, input_dtype="uint8", arguments={"actions": 8, "seats": 2})


def parity_of(backend, spec=SPEC, strategy=AtOnce, dtype="float32", **options):
    class Asks(Counting):
        def model(self):
            return spec

    setup = Setup(model=spec, devices=("cpu",), dtype=dtype, seed=3)
    return check_parity(RunPlan(Asks(), backend(setup, **options), strategy(), {}), lambda update: None)


def test_the_models_own_answers_hold():
    parity = parity_of(InProcess, threads=1)
    assert (parity.holds, parity.rows, parity.tolerance) == (True, sum(BLOCKS), 1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("backend", "changes", "dtype", "holds"),
    [
        pytest.param(InProcess, {}, "bfloat16", True, id="16 bits are given more room"),
        pytest.param(Liar, {}, "float32", False, id="a little off"),
        pytest.param(Swapper, {}, "float32", False, id="rows mixed up"),
        *(
            pytest.param(InProcess, {"inputs": 43, "input_dtype": kind}, "float32", True, id=f"{kind}, no whole bytes")
            for kind in ("int8", "float32", "bits")
        ),
    ],
)
def test_rows_of_every_dtype_are_checked(backend, changes, dtype, holds):
    parity = parity_of(backend, replace(SPEC, **changes), dtype=dtype, threads=1)
    assert parity.holds is holds
    assert parity.tolerance == pytest.approx(0.03125 if dtype == "bfloat16" else 1e-5)
    assert holds or parity.difference > 5e-4


@pytest.mark.thorough
def test_what_lies_in_the_backends_own_memory_is_checked_too():
    spec = replace(SPEC, input_dtype="float32")
    assert parity_of(Central, spec, Dynamic, in_flight=1).holds
    assert not parity_of(CrookedBlocks, spec, Dynamic, in_flight=1).holds


@pytest.mark.parametrize(
    ("one", "other", "apart"),
    [
        pytest.param([1.0], [1.5], 1 / 3, id="relative where the right answer is large"),
        pytest.param([0.0], [0.25], 0.25, id="absolute where it is small"),
        pytest.param([np.nan], [1.0], math.inf, id="no number"),
        pytest.param([], [], 0.0, id="nothing"),
        pytest.param([1.0], [1.0, 1.0], math.inf, id="another shape"),
        pytest.param([1.0, -np.inf], [1.0, -np.inf], 0.0, id="masked moves are equal"),
        pytest.param([-np.inf, 1.0], [1.0, -np.inf], math.inf, id="a mask in another place is not"),
    ],
)
def test_differences(one, other, apart):
    assert difference([np.array(one, np.float32)], [np.array(other, np.float32)]) == pytest.approx(apart)
