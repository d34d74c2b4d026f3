"""Loads from outside are compared by latency, of which less is better, among those that keep up."""

from dataclasses import replace

import jsonschema
import pytest
from bench_outcomes import a_report, outcome

from gpuinfer.api import Progress
from gpuinfer.lab.bench.bench_document import bench_document, bench_schema, variants_below
from gpuinfer.lab.bench.bench_tables import bench_page
from gpuinfer.lab.bench.comparison import compare_variants
from gpuinfer.lab.bench.measurement import LATENCY, SpeedMeter
from gpuinfer.lab.bench.series import SeriesPlan
from gpuinfer.runtime.run import RunUpdate
from gpuinfer.stats import Histogram, Snapshot

MS = 1e-3
CLEAR = {"a": [20 * MS, 21 * MS, 19 * MS], "b": [10 * MS, 10.4 * MS, 9.6 * MS]}


def latencies(values, served=None, **more):
    """The outcome of a load from outside: p95 latencies by variant, and rows/s where they are not all 200."""
    made = outcome(values, **more)
    made.runs = [replace(one, metric=LATENCY, served=rows_of(served, one), of_load=True) for one in made.runs]
    return made


def rows_of(served, run):
    """Rows/s of this run: 200 unless they are given, as one number or for each repeat."""
    given = (served or {}).get(run.variant, 200.0)
    return given[run.repeat] if isinstance(given, list) else given


def document(made):
    return bench_document("engine", made, compare_variants(made), SeriesPlan(), "2025-01-01T00:00:00+00:00")


@pytest.mark.parametrize(
    ("served", "winner"),
    [
        pytest.param(199.0, "b", id="keeps up"),
        pytest.param([196.0, 199.0, 195.0], "b", id="keeps up as far as the noise tells"),
        pytest.param(190.0, "a", id="falls behind"),
        pytest.param([150.0, 140.0, 160.0], "a", id="falls behind with all the noise"),
    ],
)
def test_who_does_not_keep_up_cannot_win(served, winner):
    made = latencies(CLEAR, {"b": served})
    assert compare_variants(made).winner.name == winner
    assert ("behind" in dict(bench_page(document(made)).notes)) == (winner == "a")


@pytest.mark.parametrize(
    ("least", "slow"), [(0.9, []), (1.5, []), (2.5, ["b"])], ids=["no worse", "half as long", "not that much better"]
)
def test_fail_under_asks_for_a_lower_latency(least, slow):
    assert variants_below(document(latencies(CLEAR)), least) == slow
    worse = {"a": CLEAR["b"], "b": CLEAR["a"]}
    assert variants_below(document(latencies(worse)), 0.9) == ["b"]


@pytest.mark.parametrize(
    ("made", "said"),
    [
        pytest.param(latencies(CLEAR), "b wins: the p95 latency of a is 2.0", id="a winner"),
        pytest.param(latencies(CLEAR, {"b": 100.0}), "a wins: it alone keeps up with the load.", id="the only one"),
        pytest.param(latencies({"a": [2 * MS], "b": [1 * MS]}), "b was fastest, but one run", id="one run"),
        pytest.param(
            latencies({"a": [20 * MS, 10 * MS], "b": [19 * MS, 12 * MS]}), "(the p95 latency of a is", id="a tie"
        ),
    ],
)
def test_the_verdict_speaks_of_latencies(made, said):
    assert said in document(made)["verdict"]


def test_the_table_of_a_load_shows_what_became_of_its_requests():
    made = document(latencies(CLEAR))
    jsonschema.validate(made, bench_schema())
    page = bench_page(made)
    rows = [dict(zip(page.table.columns, row, strict=True)) for row in page.table.rows]
    assert [row["p95"] for row in rows] == ["20 ms", "10 ms"]
    assert rows[1][""] == "★ b"
    assert rows[1]["rows/s"] == "200"
    assert rows[1]["×"] == "2.00"
    assert rows[1]["cut"] == "full 100%"
    assert page.about.startswith("p95 latency, median of 3 runs")
    assert {len(row) for row in page.brief.rows} == {len(page.brief.columns)} == {8}
    assert "20 ms" in page.markdown()


# What a run is compared by


def seen(*latencies_s):
    histogram = Histogram()
    for seconds in latencies_s:
        histogram.add(seconds)
    return histogram.to_wire()


def look(elapsed_s, facts, rows=0, latency=()):
    snapshot = Snapshot(rows=rows, latency=seen(*latency))
    return RunUpdate(Progress(0, facts=facts), snapshot, elapsed_s, 0.0, "running", None)


def test_a_load_from_outside_is_judged_by_its_latencies_past_the_start():
    meter, facts = SpeedMeter(10.0), {"offered_rows_per_s": 200.0}
    slow = [1.0] * 50  # at the start, while the first batches warm up
    for at in range(11):
        meter.enough(look(at, facts, 200 * at, slow + [0.01] * (100 * (at - 1))))
    report = {**a_report(200), "throughput": {"rows_per_s": 190.0}}
    assert meter.rate(report) == (LATENCY, pytest.approx(0.01, rel=0.02))
    assert meter.served(report) == pytest.approx(200)
    assert meter.of_load


@pytest.mark.parametrize("seconds", [4.0, None], ids=["timed", "to its end"])
def test_clients_that_wait_are_judged_by_rows(seconds):
    meter = SpeedMeter(seconds)
    for at in range(1, 5):
        meter.enough(look(at, {"clients": 8}, 50 * at))
    report = {"throughput": {"evaluations_per_s": 50.0, "rows_per_s": 50.0}, "latency_s": {}}
    assert meter.rate(report) == ("rows_per_s", pytest.approx(50.0))


def test_a_load_of_which_nothing_was_answered_has_no_latency():
    meter = SpeedMeter(1.0)
    meter.enough(look(1.0, {"offered_rows_per_s": 5.0}))
    assert meter.rate({"throughput": {}, "latency_s": {}}) == (LATENCY, 0.0)
