"""What a load brings: the same requests for the same seed, as its options say."""

import itertools
import math
import random
from collections import Counter

import pytest
from counts import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from gpuinfer.api import Priority, Setup
from gpuinfer.engine.arrivals import PiecewiseArrivals, Poisson, classes_of
from gpuinfer.errors import UnknownName, UsageError
from gpuinfer.workloads.load import Load


def asked(seed=0, **options):
    return list(Load(Setup(seed=seed), **options).asked())


def times(asks):
    return [ask.at for ask in asks]


@pytest.mark.parametrize("arrivals", ["poisson", "constant", "bursty"])
def test_a_rate_brings_about_so_many_rows_within_the_duration(arrivals):
    asks = asked(rate=1000, arrivals=arrivals, rows="1-3", duration=20, burst_s=0.01)
    assert sum(ask.rows for ask in asks) == pytest.approx(20_000, rel=0.15)
    assert asks[0].at >= 0
    assert asks[-1].at < 20
    assert times(asks) == sorted(times(asks))


@pytest.mark.parametrize("options", [{"rate": 50}, {"rate": 50, "arrivals": "bursty"}, {"schedule": ["50:2s", "9:1s"]}])
def test_one_seed_is_one_load(options):
    full = {**options, "rows": "1-8", "classes": "high=0.5,low=0.5", "sources": 3}
    assert asked(3, **full) == asked(3, **full)
    assert asked(3, **full) != asked(4, **full)


def test_a_live_load_is_the_simulators():
    dice = random.Random("5/arrivals")  # as `simulate` draws them
    assert asked(5, rate=100, requests=50) == list(itertools.islice(Poisson(100).asks(dice), 50))


def test_constant_arrivals_are_apart_by_the_time_of_their_rows():
    assert times(asked(rate=100, arrivals="constant", rows="4", requests=3)) == pytest.approx([0, 0.04, 0.08])


@pytest.mark.parametrize("arrivals", ["poisson", "constant", "bursty"])
def test_a_schedule_has_its_rates_one_after_the_other(arrivals):
    asks = asked(schedule=["100:10s", "0:5s", "1000:10s"], arrivals=arrivals, burst_s=0.01)
    counts = [sum(begin <= ask.at < end for ask in asks) for begin, end in ((0, 10), (10, 15), (15, 25), (25, 1e9))]
    assert counts[0] == pytest.approx(1000, rel=0.2)
    assert counts[2] == pytest.approx(10_000, rel=0.2)
    assert (counts[1], counts[3]) == (0, 0)


def test_requests_are_of_the_classes_rows_and_senders_that_were_asked_for():
    asks = asked(rate=1000, classes="high=0.2,low=0.8", rows="2-5", sources=4, timeout=0.5, requests=2000)
    classes = Counter(ask.priority for ask in asks)
    assert classes[Priority.HIGH] == pytest.approx(400, rel=0.2)
    assert classes[Priority.NORMAL] == 0
    assert {ask.rows for ask in asks} == {2, 3, 4, 5}
    assert {ask.client for ask in asks} == {f"source {number}" for number in range(4)}
    assert {ask.timeout for ask in asks} == {0.5}


@given(
    pieces=st.lists(st.tuples(st.sampled_from([0.0, 1.0, 50.0, 333.0]), st.floats(0.01, 2.0)), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
@settings(max_examples=examples(40), deadline=None)
def test_the_pieces_of_a_schedule_keep_their_order_and_their_time(pieces, seed):
    if not any(rate for rate, _ in pieces):
        with pytest.raises(UsageError, match="rate of 0"):
            PiecewiseArrivals(pieces, Poisson)
        return
    load = PiecewiseArrivals(pieces, Poisson)
    found = times(load.asks(random.Random(seed)))
    assert found == sorted(found)
    assert all(0 <= at < load.duration for at in found)
    assert load.rows_per_s * load.duration == pytest.approx(sum(rate * seconds for rate, seconds in pieces))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param({"rate": 5, "clients": 5}, "--rate and --clients", id="two loads"),
        pytest.param({"replay": "x", "schedule": ["5:1s"]}, "--schedule and --replay", id="two other loads"),
        pytest.param({"rate": 5, "think": 1}, "Leave --think out", id="a think time of nobody"),
        pytest.param({"clients": 5, "sources": 1}, "Leave --sources out", id="senders beside clients"),
        pytest.param({"clients": 5, "burst": 2}, "is for --rate or --schedule", id="bursts of clients"),
        pytest.param({"replay": "x", "timeout": 2}, "Leave --timeout out", id="deadlines of a recorded load"),
        pytest.param({"rate": 1e-300}, "Give a rate above 0", id="a rate of next to nothing"),
        pytest.param({"rate": 1, "arrivals": "bursty", "burst_s": 1e-9}, "Give longer ones", id="empty bursts"),
        pytest.param({"schedule": []}, "a schedule of nothing", id="an empty schedule"),
        pytest.param({"schedule": ["1:1e300"]}, "cannot be", id="a schedule for ever"),
        pytest.param({"rate": 5, "timeout": 1e-12}, "over before it began", id="no time for an answer"),
        pytest.param({"rows": "0"}, "--rows 0", id="no rows"),
        pytest.param({"rows": "8-1"}, "1-8", id="rows backwards"),
        pytest.param({"rows": "many"}, "--rows many", id="rows that are no number"),
        pytest.param({"classes": "high=0.5,low=0.4"}, "add up to 0.9", id="shares that are not all"),
        pytest.param({"classes": "high=-1,low=2"}, "0 to 1", id="a negative share"),
        pytest.param({"classes": "high=x"}, "'x' is no number", id="a share that is no number"),
        pytest.param({"schedule": ["200"]}, "no number", id="a rate without a time"),
        pytest.param({"schedule": ["200:0s"]}, "cannot be", id="a piece without time"),
        pytest.param({"schedule": ["0:5s"]}, "rate of 0", id="a schedule of nothing"),
        pytest.param({"features": 8}, "Add --model module:factory", id="features of a built-in model"),
        pytest.param({"weights": "nowhere"}, "no file 'nowhere'", id="weights that are not there"),
        pytest.param({"replay": "nowhere"}, "nowhere", id="a trace that is not there"),
    ],
)
def test_a_load_that_cannot_be_is_refused_with_the_cure(options, said):
    with pytest.raises(UsageError, match=said):
        Load(**options)


def test_an_unknown_class_or_model_is_told_the_nearest():
    with pytest.raises(UnknownName, match="Did you mean 'high'"):
        classes_of("hihg=1")
    with pytest.raises(UnknownName, match="Did you mean 'blobnet'"):
        Load(model="blobnett")


@pytest.mark.parametrize(
    "options", [{"rate": 0}, {"rate": -5}, {"clients": 0}, {"duration": 0}, {"timeout": 0}, {"rate": math.inf}]
)
def test_options_out_of_bounds_are_refused(options):
    with pytest.raises(ValidationError):
        Load(**options)


@pytest.mark.parametrize(
    ("options", "inputs", "dtype", "sizes"),
    [
        pytest.param({}, 256, "uint8", {"actions", "seats"}, id="the built-in networks"),
        pytest.param({"model": "m:f"}, 256, "uint8", {"actions", "seats"}, id="a factory for cards"),
        pytest.param({"model": "m:f", "features": 8}, 8, "float32", set(), id="any factory"),
    ],
)
def test_the_model_is_asked_for_rows_of_its_kind(options, inputs, dtype, sizes):
    spec = Load(**options).model()
    assert (spec.inputs, spec.input_dtype, set(spec.arguments)) == (inputs, dtype, sizes)
