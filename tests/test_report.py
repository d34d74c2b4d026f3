"""The report: its arithmetic, its schema, and that a ledger always adds up."""

import importlib
import json
import math
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuinfer.api import Progress, Reason, Roofline, Setup
from gpuinfer.cli.screen.final_panel import panel_rows
from gpuinfer.host import machine
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.report.document import json_schema
from gpuinfer.report.report import Run, batches_section, build, evidence, rates_section, schema, time_s
from gpuinfer.serving.health import RecentCounters, counter_stats
from gpuinfer.stats import Histogram, Snapshot, merge_snapshots, since

seconds = st.floats(0, 1e6, allow_nan=False)
ledgers = st.lists(
    st.dictionaries(st.sampled_from(["idle", "search", "forward", "transfer", "other"]), seconds), max_size=20
)


def lanes_of(ledger):
    return tuple({"name": f"lane {number}", "stations": stations} for number, stations in enumerate(ledger))


def histogram(*values):
    filled = Histogram()
    for value in values:
        filled.add(value)
    return filled.to_wire()


def a_run(**changes):
    plain = {
        "workload": "selfplay",
        "backend": "inprocess",
        "strategy": "dynamic",
        "started_at": "2025-01-01T00:00:00+00:00",
        "setup_s": 1.5,
        "wall_s": 10.0,
        "status": "done",
        "setup": Setup(),
        "snapshot": Snapshot(),
        "progress": Progress(0),
    }
    return Run(**{**plain, **changes})


FULL = Snapshot(
    requests=30,
    rows=9000,
    batches={100: 10, 400: 20},
    reasons={"full": 20, "clients": 10},
    latency=histogram(0.01, 0.02, 0.04),
    queue_wait=histogram(0.001),
    errors={"expired": 2},
    lanes=lanes_of([{"search": 8.0, "idle": 1.0}, {"forward": 6.0, "idle": 4.0}]),
    rss_peak_mb=123.0,
    device={"name": "NVIDIA H200", "utilisation": 0.5, "allocated_mb": 10.0, "reserved_mb": 20.0},
)


MODEL = {"model": "tiny", "slots": 4, "context": 64, "estimated_bytes": 1000, "measured_bytes": None}
GENERATED = Snapshot(
    requests=8,
    rows=8,
    batches={1: 10, 4: 30},
    batch_s={1: [10, 0.5], 4: [30, 3.0]},
    slots=4,
    lanes=({"name": "forward 0", "stations": {"prefill": 1.0, "forward": 2.5, "idle": 6.5}},),
    device={"name": "a CPU", "model": MODEL, "tokens": {"input": 80, "output": 130}},
)


@given(ledgers, st.floats(0, 1e6))
def test_the_stations_sum_to_the_wall_clock_times_the_lanes(ledger, wall_s):
    total = time_s(lanes_of(ledger), wall_s)
    assert all(spent >= 0 for spent in total.values())
    assert math.isclose(math.fsum(total.values()), wall_s * len(ledger), rel_tol=1e-9, abs_tol=1e-9)


@given(ledgers)
def test_a_ledger_that_fits_the_clock_keeps_every_station_as_it_was(ledger):
    wall_s = max((math.fsum(stations.values()) for stations in ledger), default=0.0)
    total = time_s(lanes_of(ledger), wall_s)
    for station in {name for stations in ledger for name in stations} - {"idle"}:
        assert math.isclose(total[station], math.fsum(s.get(station, 0) for s in ledger), rel_tol=1e-9)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, id="nothing happened"),
        pytest.param({"wall_s": 0.0, "status": "failed"}, id="it failed before the clock started"),
        pytest.param({"snapshot": FULL, "progress": Progress(7, 9, "games", {"games": 7.0})}, id="a full run"),
        pytest.param(
            {"snapshot": FULL, "roofline": Roofline(1000.0, 512, "1 forward × 2 threads")}, id="with a roofline"
        ),
        pytest.param({"snapshot": GENERATED, "workload": "generate"}, id="a model with slots"),
        pytest.param({"settings": {"out": None, "path": sys}}, id="settings that are not plain"),
    ],
)
def test_every_report_fits_the_schema(changes):
    report = build(a_run(**changes))
    jsonschema.validate(report, schema())
    assert json.loads(json.dumps(report, allow_nan=False)) == report


@pytest.mark.parametrize(
    ("told", "shares"),
    [
        pytest.param(CoreTime(6.0, 8.0, 1.0), (6.0, 2.0, 1.0), id="all that was counted"),
        pytest.param(CoreTime(1e3, 1e4, 1e4), (None, 0.0, 0.0), id="more than there was"),
    ],
)
def test_the_cores_sum_to_the_wall_clock_times_their_number(told, shares):
    found = build(a_run(cores=told, snapshot=Snapshot(cpu_wait_s=3.0)))["cores"]
    all_s = 10.0 * found["count"]
    busy, others, stolen = shares
    assert (found["busy_s"], found["others_s"], found["stolen_s"]) == (all_s if busy is None else busy, others, stolen)
    assert sum(found[name] for name in ("busy_s", "others_s", "stolen_s", "idle_s")) == pytest.approx(all_s)
    assert found["waiting_s"] == 3.0


def test_threads_that_waited_for_one_another_are_told_and_idle_as_the_benchmark_counts_them(monkeypatch):
    """To the system they were busy: 12 of the 17 seconds were computed in."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    share_idle = importlib.import_module("real_ours").share_idle
    monkeypatch.setattr(machine, "cores", lambda: 2)
    spun = {"threads": 2, "steps": {"threads_busy_s": 12.0, "threads_waited_s": 5.0}}
    run = a_run(cores=CoreTime(17.0, 18.0, 0.0), snapshot=Snapshot(cpu_s=17.0, device=spun))
    found = build(run)["cores"]
    assert (found["threads_waited_s"], found["idle_s"]) == (5.0, 2.0)
    assert share_idle(found, 10.0) == pytest.approx(evidence(run).idle_cores / 2) == pytest.approx(0.35)


def test_the_schema_is_the_one_of_the_types_and_misses_every_field():
    assert schema() == json_schema()  # else: make reference
    check = jsonschema.Draft202012Validator(schema())
    report = build(a_run())
    for field in schema()["required"]:
        assert not check.is_valid({name: value for name, value in report.items() if name != field}), field


def test_the_schema_knows_every_reason_and_is_itself_valid():
    jsonschema.Draft202012Validator.check_schema(schema())
    known = schema()["properties"]["batches"]["properties"]["reasons"]["properties"]
    assert set(known) == {reason.value for reason in Reason}


def test_rates_count_from_the_start_of_the_clock():
    progress = Progress(40, counts={"games": 40, "simulations": 5000})
    run = a_run(snapshot=FULL, progress=progress, counts_before={"games": 10, "simulations": 1000})
    assert rates_section(run) == {
        "games_per_min": 180.0,
        "simulations_per_s": 400.0,
        "rows_per_s": 900.0,
        "requests_per_s": 3.0,
        "evaluations_per_s": 900.0,
    }


def test_stations_are_told_with_their_visits_busy_time_and_servers():
    lanes = (
        {"name": "worker 0: search", "stations": {"search": 6.0, "idle": 4.0}, "visits": {"search": 30, "idle": 30}},
        {"name": "worker 1: search", "stations": {"search": 3.0, "idle": 7.0}, "visits": {"search": 12, "idle": 12}},
        {"name": "forward 0", "stations": {"forward": 4.0, "transfer": 1.0}, "visits": {"forward": 8, "transfer": 9}},
    )
    assert build(a_run(snapshot=Snapshot(lanes=lanes)))["stations"] == {
        "search": {"visits": 42, "busy_s": 9.0, "servers": 2},
        "forward": {"visits": 8, "busy_s": 4.0, "servers": 1},
        "transfer": {"visits": 9, "busy_s": 1.0, "servers": 1},
    }


def test_the_verdicts_commands_name_options_of_the_plugins_in_force():
    plugins = {"backends": {"inprocess": {"threads": None}, "other": {}}, "strategies": {"dynamic": {"max_wait": 0}}}
    settings = {**plugins, "selfplay": {"games": 3, "workers": None, "batch_size": None}}
    run = a_run(
        settings=settings,
        snapshot=Snapshot(device={"in_force": {"threads": 2}}),
        progress=Progress(0, facts={"workers": 5}),
    )
    assert evidence(run).options == {
        "-B": {"threads": 2},
        "-S": {"max_wait": 0},
        "--": {"games": 3, "workers": 5, "batch_size": None, "dtype": "float32"},
    }
    assert evidence(a_run()).options == {"-B": {}, "-S": {}, "--": {"dtype": "float32"}}


def test_what_generates_tells_tokens_slots_and_its_model_and_evaluates_nothing():
    counts = {"input_tokens": 80, "output_tokens": 130}
    report = build(a_run(snapshot=GENERATED, progress=Progress(8, 8, counts=counts)))
    assert report["throughput"] == {
        "input_tokens_per_s": 8.0,
        "output_tokens_per_s": 13.0,
        "rows_per_s": 0.8,
        "requests_per_s": 0.8,
    }
    assert (report["batches"]["slots"], report["batches"]["occupancy"]) == (4, pytest.approx(130 / 40 / 4))
    assert report["model"] == MODEL


def test_replicas_have_slots_of_their_own():
    both = merge_snapshots([GENERATED, GENERATED])
    assert both.slots == 8
    assert batches_section(both)["occupancy"] == batches_section(GENERATED)["occupancy"]
    assert evidence(a_run(snapshot=both)).slots == 4
    assert since(both, GENERATED).slots == 8


def test_batches_are_told_by_their_size():
    told = batches_section(FULL)
    assert (told["count"], told["rows_mean"], told["rows_p50"], told["rows_max"]) == (30, 300.0, 400, 400)
    assert told["sizes"] == {"128": 10, "512": 20}
    assert told["reasons"]["full"] == 20
    assert told["reasons"]["drain"] == 0


counters = st.dictionaries(st.integers(1, 5), st.integers(1, 9))
times = st.lists(st.floats(1e-6, 1e3), max_size=5)


@given(counters, counters, times, times)
def test_what_was_counted_since_is_what_was_added(sizes, more, early, late):
    then = Snapshot(requests=len(sizes), batches=sizes, latency=histogram(*early))
    added = Snapshot(requests=len(more), batches=more, latency=histogram(*late))
    difference = since(merge_snapshots([then, added]), then)
    assert difference.requests == len(more)
    assert difference.batches == more
    assert difference.latency["counts"] == added.latency["counts"]
    assert math.isclose(difference.latency["total"], added.latency["total"], rel_tol=1e-6, abs_tol=1e-9)


def test_tokens_and_steps_are_counted_on_from_an_earlier_moment():
    def at(tokens, **steps):
        return Snapshot(device={"name": "cpu", "tokens": {"output": tokens}, "steps": steps})

    late = since(at(50, rows=9, idle=2), at(20, rows=4, idle=2))
    assert late.device == {"name": "cpu", "tokens": {"output": 30}, "steps": {"rows": 5, "idle": 0}}
    assert since(at(50, rows=9), Snapshot()).device["tokens"] == {"output": 50}
    recent = RecentCounters()
    recent.take(1.0, at(20))
    recent.take(3.0, at(50))
    assert counter_stats(Snapshot(), *recent.window(), 0.0)["throughput"]["output_tokens_per_s"] == 15.0


def test_a_report_tells_what_came_of_a_diffusion_models_forwards():
    steps = {"rows": 40, "idle": 4, "positions": 4_000, "tokens": 1_000, "committed": 120, "output_tokens": 100}
    both = merge_snapshots([Snapshot(slots=4, device={"steps": steps})] * 2)
    told = build(a_run(snapshot=both))
    jsonschema.validate(told, schema())
    assert told["unmasking"] == {
        "forwards": 80, "idle_forwards": 8, "committed_tokens": 240, "useful_tokens": 200, "positions": 8_000,
        "computed_positions": 2_000, "tokens_per_forward": 2.5, "idle_share": 0.1, "computed_share": 0.25,
    }  # fmt: skip
    (row,) = [row for row in panel_rows(told) if row.name == "forwards"]
    assert row.text == "80, 2.5 useful tokens each, 10% committed nothing, 25% of positions computed anew"
    assert build(a_run(snapshot=GENERATED))["unmasking"] is None


def test_a_report_needs_no_torch():
    loaded = "import sys, gpuinfer.runtime.run; from gpuinfer.report import report"
    code = f"{loaded}; report.schema(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
