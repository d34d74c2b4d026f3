"""Figures of a run, from records that were written by hand."""

from __future__ import annotations

from array import array

import pytest

from gpuinfer.errors import UsageError
from gpuinfer.lab.serve_bench.load_summary import LoadRun, keeps_promises, promises, routes, summarised
from gpuinfer.lab.serve_bench.load_tables import medians
from gpuinfer.lab.serve_bench.requests import RequestRecord


def record(due, ended, *, first=None, tokens=None, error=None, lag_s=0.0):
    one = RequestRecord(due)
    one.ended, one.error, one.tokens, one.lag_s = ended, error, tokens, lag_s
    if first is not None:
        one.first, one.last, one.events = first, ended, array("d", [first, ended])
    return one


def test_rates_count_what_ended_within_the_window_and_latencies_what_was_due_after_the_warm_up():
    records = [record(9.5, 10.5), record(10.0, 11.0), record(11.0, 11.5), record(11.9, 13.0)]
    figures = summarised(LoadRun(records, began=10.0, ended=12.0), {})
    assert figures["requests_per_s"] == 1.5
    assert (figures["requests"], figures["e2e_s"]["max"]) == (3, pytest.approx(1.1))


def test_tokens_count_by_when_they_came():
    """Ten tokens from 11 to 13, half of them within the window that ends at 12."""
    run = LoadRun([record(10.0, 13.0, first=11.0, tokens=10)], began=10.0, ended=12.0)
    assert summarised(run, {})["output_tokens_per_s"] == 2.5


@pytest.mark.parametrize(
    ("cpu", "lag", "saturated"),
    [
        pytest.param(0.3, 0.0, False, id="at ease"),
        pytest.param(0.97, 0.0, True, id="no core left"),
        pytest.param(0.3, 0.2, True, id="late"),
        pytest.param(0.3, 0.001, False, id="late, but by nothing that matters"),
    ],
)
def test_when_the_sender_is_not_to_be_trusted(cpu, lag, saturated):
    records = [record(10.0, 11.0, lag_s=lag) for _ in range(10)]
    assert summarised(LoadRun(records, 10.0, 12.0, cpu), {})["sender"]["saturated"] is saturated


def test_promises():
    assert promises("ttft:200ms, tpot:20ms,e2e:1s") == {"ttft": 0.2, "tpot": 0.02, "e2e": 1.0}
    one = record(0.0, 3.0, first=1.0, tokens=5)
    assert keeps_promises(one, {"ttft": 1.0, "tpot": 0.5, "e2e": 3.0})
    assert not keeps_promises(one, {"e2e": 2.9})
    assert keeps_promises(record(0.0, 3.0), {"ttft": 0.1})  # not streamed: nobody can tell
    assert not keeps_promises(record(0.0, 0.1, error="timeout"), {"e2e": 1.0})


@pytest.mark.parametrize("text", ["", "ttft", "ttft:", "ttft:soon", "tftt:1s", "e2e:0s", "e2e:-1s"])
def test_what_promises_nothing(text):
    with pytest.raises(UsageError, match="Write --goodput ttft:200ms"):
        promises(text)


def test_routes_by_replica():
    one, two, three = (record(0.0, 1.0) for _ in range(3))
    one.route = "replica=1; why=least-loaded 3<5; attempt=1"
    two.route = "replica=10; why=sticky; attempt=1"
    three.route = "replica=1; why=least-loaded 0=0; attempt=2"
    assert routes([one, two, three, record(0.0, 1.0)]) == {
        "1": {"least-loaded": 1, "least-loaded, repeated": 1},
        "10": {"sticky": 1},
    }


def test_the_middle_of_several_runs():
    runs = [
        {"a": 1.0, "b": {"p50": 3.0}, "c": None, "errors": {"HTTP 429": 1}, "d": [1.0, 2.0], "e": False},
        {"a": 2.0, "b": {}, "c": None, "errors": {}, "d": [], "e": True},
        {"a": 9.0, "b": {"p50": 5.0}, "c": None, "errors": {"HTTP 429": 2}, "d": [3.0, 4.0], "e": False},
    ]
    assert medians(runs) == {
        "a": 2.0, "b": {"p50": 4.0}, "c": None, "errors": {"HTTP 429": 3}, "d": [2.0, 3.0], "e": True
    }  # fmt: skip
