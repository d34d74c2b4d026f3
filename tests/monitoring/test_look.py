"""A look says what happened between two snapshots, in little room."""

from __future__ import annotations

import json

import pytest
from monitoring.synthetic import Server, worker

from gpuinfer.serving.monitoring.live_page import MOST_PLACES, MOST_WORKERS, live_view
from gpuinfer.stats import Histogram, Snapshot, summarise


def test_rates_and_percentiles_are_those_of_the_time_between():
    server = Server()
    before, now = server.step(60.0, requests=10), server.step(2.0, requests=100)
    seen = live_view(now, before, 2.0)
    assert seen["rates"]["requests"] == 50.0
    assert seen["rates"]["output_tokens"] == 100 * 48 / 2
    assert seen["totals"]["requests"] == 110
    assert sum(seen["batches"]["sizes"].values()) == 100
    assert sum(seen["batches"]["reasons"].values()) == 100
    assert seen["batches"]["slots"] == 32
    shares = {place["station"]: place["share"] for place in seen["places"] if place["lane"] == "forward"}
    assert shares["forward"] == pytest.approx(0.72, abs=0.05)
    assert sum(shares.values()) == pytest.approx(1.0)


def test_the_maximum_is_of_the_time_between_too():
    early, late = Histogram(), Histogram()
    for histogram in (early, late):
        histogram.add(30.0)
    for seconds in (0.1, 0.2):
        late.add(seconds)
    seen = live_view(Snapshot(latency=late.to_wire()), Snapshot(latency=early.to_wire()), 1.0)["latency_s"]
    assert seen["max"] == pytest.approx(0.2, rel=0.02)
    assert seen["mean"] == pytest.approx(0.15)


def test_without_an_earlier_one_it_is_since_the_start():
    now = Server().step(10.0, requests=80)
    seen = live_view(now, None, 10.0)
    assert seen["rates"]["requests"] == 8.0
    assert seen["latency_s"]["p50"] == summarise(now.latency)["p50"]


def test_where_nothing_moved_there_are_no_figures():
    now = Server().step(10.0)
    seen = live_view(now, now, 5.0)
    assert set(seen["rates"].values()) == {0.0}
    assert seen["latency_s"] == seen["first_token_s"] == seen["batches"]["sizes"] == {}
    assert live_view(now, now, 0.0)["rates"] == {}


def test_counters_that_fell_count_as_not_moved():
    before, now = Server(1).step(100.0, requests=900), Server(2).step(1.0, requests=3)
    seen = live_view(now, before, 1.0)
    assert min(seen["rates"].values()) == 0.0
    assert all(times > 0 for times in seen["batches"]["sizes"].values())
    assert all(0 <= place["share"] <= 1 for place in seen["places"])


def test_it_is_small_and_plain_whatever_names_there_are():
    long = "<img src=x onerror=alert(1)>" * 1000
    stations = {f"{number} {long}": 1.0 for number in range(500)}
    told = Server(model=long).snapshot(
        failure=long,
        notices=(long,) * 50,
        lanes=({"name": f"{long} 0", "stations": stations},),
        device={"name": long, "utilisation": object()},
    )
    workers = [worker(number, url=long, last_event={"kind": long}) for number in range(3 * MOST_WORKERS)]
    seen = live_view(told, None, 1.0, workers, {"model": long, "odd": [long]})
    assert len(seen["workers"]) == MOST_WORKERS
    assert len(seen["places"]) == MOST_PLACES
    text = json.dumps(seen, allow_nan=False)
    assert len(text) < 1000 * MOST_WORKERS
    assert len(json.dumps(live_view(Server().step(), None, 1.0, [worker(0), worker(1)]))) < 2500


def test_sizes_are_told_by_doublings():
    seen = live_view(Snapshot(batches={1: 5, 2: 1, 3: 2, 4: 3, 33: 1}), None, 1.0)
    assert seen["batches"]["sizes"] == {"1": 5, "2": 1, "4": 5, "64": 1}
