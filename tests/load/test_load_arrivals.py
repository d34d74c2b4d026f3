"""What a load brings: the same requests for the same seed, as its options say; and the options that cannot be."""

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
from gpuinfer.engine.arrivals import PiecewiseArrivals, Poisson
from gpuinfer.errors import UsageError
from gpuinfer.workloads.load import Load


def asked(seed=0, **options):
    return list(Load(Setup(seed=seed), **options).asked())


def times(asks):
    return [ask.at for ask in asks]


@pytest.mark.parametrize("arrivals", ["poisson", "constant", "bursty"])
def test_a_rate_brings_about_so_many_rows_and_a_schedule_its_rates_in_turn(arrivals):
    asks = asked(rate=1000, arrivals=arrivals, rows="1-3", duration=20, burst_s=0.01)
    assert sum(ask.rows for ask in asks) == pytest.approx(20_000, rel=0.15)
    assert asks[0].at >= 0
    assert asks[-1].at < 20
    assert times(asks) == sorted(times(asks))
    found = times(asked(schedule=["100:10s", "0:5s", "1000:10s"], arrivals=arrivals, burst_s=0.01))
    counts = [sum(begin <= at < end for at in found) for begin, end in ((0, 10), (10, 15), (15, 25), (25, 1e9))]
    assert counts == [pytest.approx(1000, rel=0.2), 0, pytest.approx(10_000, rel=0.2), 0]


@pytest.mark.parametrize("options", [{"rate": 50}, {"rate": 50, "arrivals": "bursty"}, {"schedule": ["50:2s", "9:1s"]}])
def test_one_seed_is_one_load(options):
    full = {**options, "rows": "1-8", "classes": "high=0.5,low=0.5", "sources": 3}
    assert asked(3, **full) == asked(3, **full) != asked(4, **full)


def test_a_live_load_is_the_simulators_and_constant_arrivals_are_evenly_apart():
    dice = random.Random("5/arrivals")  # as `simulate` draws them
    assert asked(5, rate=100, requests=50) == list(itertools.islice(Poisson(100).asks(dice), 50))
    assert times(asked(rate=100, arrivals="constant", rows="4", requests=3)) == pytest.approx([0, 0.04, 0.08])


def test_requests_are_of_the_classes_rows_and_senders_that_were_asked_for():
    asks = asked(rate=1000, classes="high=0.2,low=0.8", rows="2-5", sources=4, timeout=0.5, requests=2000)
    classes = Counter(ask.priority for ask in asks)
    assert classes == {Priority.HIGH: pytest.approx(400, rel=0.2), Priority.LOW: pytest.approx(1600, rel=0.2)}
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
        ({"rate": 5, "clients": 5}, "--rate and --clients"),
        ({"replay": "x", "schedule": ["5:1s"]}, "--schedule and --replay"),
        ({"rate": 5, "think": 1}, "Leave --think out"),
        ({"clients": 5, "sources": 1}, "Leave --sources out"),
        ({"clients": 5, "burst": 2}, "is for --rate or --schedule"),
        ({"replay": "x", "timeout": 2}, "Leave --timeout out"),
        ({"rate": 1e-300}, "Give a rate above 0"),
        ({"rate": 1, "arrivals": "bursty", "burst_s": 1e-9}, "Give longer ones"),
        ({"schedule": []}, "a schedule of nothing"),
        ({"schedule": ["1:1e300"]}, "cannot be"),
        ({"schedule": ["200"]}, "no number"),
        ({"schedule": ["200:0s"]}, "cannot be"),
        ({"schedule": ["0:5s"]}, "rate of 0"),
        ({"rate": 5, "timeout": 1e-12}, "over before it began"),
        ({"rows": "0"}, "--rows 0"),
        ({"rows": "8-1"}, "1-8"),
        ({"rows": "many"}, "--rows many"),
        ({"classes": "high=0.5,low=0.4"}, "add up to 0.9"),
        ({"classes": "high=-1,low=2"}, "0 to 1"),
        ({"classes": "high=x"}, "'x' is no number"),
        ({"classes": "hihg=1"}, "Did you mean 'high'"),
        ({"model": "blobnett"}, "Did you mean 'blobnet'"),
        ({"features": 8}, "Add --model module:factory"),
        ({"weights": "nowhere"}, "no file 'nowhere'"),
        ({"replay": "nowhere"}, "nowhere"),
    ],
)
def test_a_load_that_cannot_be_is_refused_with_the_cure(options, said):
    with pytest.raises(UsageError, match=said):
        Load(**options)


@pytest.mark.parametrize(
    "options", [{"rate": 0}, {"rate": math.inf}, {"clients": 0}, {"duration": 0}, {"timeout": 0}], ids=str
)
def test_options_out_of_bounds_are_refused(options):
    with pytest.raises(ValidationError):
        Load(**options)


@pytest.mark.parametrize(
    ("options", "inputs", "dtype", "sizes"),
    [
        ({}, 256, "uint8", {"actions", "seats"}),
        ({"model": "m:f"}, 256, "uint8", {"actions", "seats"}),  # of cards
        ({"model": "m:f", "features": 8}, 8, "float32", set()),
    ],
)
def test_the_model_is_asked_for_rows_of_its_kind(options, inputs, dtype, sizes):
    spec = Load(**options).model()
    assert (spec.inputs, spec.input_dtype, set(spec.arguments)) == (inputs, dtype, sizes)
