"""The speed of a run that is stopped in full swing: its start is left out, and steps do not bend it."""

import pytest

from gpuinfer.api import Progress
from gpuinfer.lab.bench.measurement import SpeedMeter, rate_to_the_end
from gpuinfer.runtime.run import RunUpdate
from gpuinfer.stats import Snapshot


def look(elapsed_s, counts=(), rows=0, setup=False):
    return RunUpdate(
        Progress(0, counts=dict(counts), setup=setup), Snapshot(rows=rows), elapsed_s, 0.0, "running", None
    )


def watched(seconds, counter, rate_after_start, slow_until=0.0, step=1.0):
    """A meter that has watched a counter grow, in steps, at a tenth of the speed until `slow_until`."""
    meter, at = SpeedMeter(seconds), 0.0
    while True:
        count = 0.1 * rate_after_start * min(at, slow_until) + rate_after_start * max(0.0, at - slow_until)
        if meter.enough(look(at, {counter: count // step * step})):
            return meter
        at += 0.1


def report(**throughput):
    return {"throughput": throughput}


def test_the_start_is_left_out():
    meter = watched(5.0, "evaluations", 1000, slow_until=0.9)
    assert meter.rate(report(evaluations_per_s=900.0)) == ("evaluations_per_s", pytest.approx(1000, rel=0.01))


def test_a_counter_that_grows_in_blocks_has_the_speed_of_its_line():
    meter = watched(5.0, "evaluations", 1000, step=300)
    assert meter.rate(report(evaluations_per_s=900.0))[1] == pytest.approx(1000, rel=0.05)


@pytest.mark.parametrize("step", [1.0, 60.0, 1e9], ids=["that moves often", "that moves once", "not seen to move"])
def test_every_timed_run_of_a_kind_is_told_in_the_same_metric(step):
    told = report(evaluations_per_s=45.0, simulations_per_s=400.0, games_per_min=9.0)
    assert watched(2.0, "evaluations", 50, step=step).rate(told) == ("evaluations_per_s", pytest.approx(47.5, abs=3))


def test_without_such_counters_the_rows_that_were_answered_are():
    meter, rows = SpeedMeter(1.0), 0
    while not meter.enough(look(rows / 100, {"games": 1}, rows=rows)):
        rows += 10
    told = report(evaluations_per_s=90.0, rows_per_s=90.0, games_per_min=9.0)
    assert meter.rate(told) == ("evaluations_per_s", pytest.approx(100))


@pytest.mark.parametrize(
    ("throughput", "found"),
    [
        pytest.param({"rows_per_s": 9.0, "games_per_min": 3.0}, ("games_per_min", 3.0), id="games first"),
        pytest.param({"games_per_min": 0.0, "rows_per_s": 9.0}, ("rows_per_s", 9.0), id="what there was any of"),
        pytest.param({"questions_per_s": 2.0}, ("questions_per_s", 2.0), id="a count of the workload's own"),
        pytest.param({}, ("", 0.0), id="nothing"),
    ],
)
def test_a_run_to_its_end_has_the_speed_of_its_report(throughput, found):
    assert rate_to_the_end(report(**throughput)) == found
    assert SpeedMeter(3.0).rate(report(**throughput)) == found
