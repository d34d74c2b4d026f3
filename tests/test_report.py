"""The report: its arithmetic, its schema, that a ledger always adds up, and how the screen shows it."""

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
from gpuinfer.cli.screen.live_view import device_shares, on_cores
from gpuinfer.host import machine
from gpuinfer.host.cpu_contention import CoreTime
from gpuinfer.report.document import json_schema
from gpuinfer.report.report import Run, batches_section, build, evidence, rates_section, schema, time_s
from gpuinfer.report.report_sections import core_shares, model_lines
from gpuinfer.rollouts.steps import STALL_CAUSES
from gpuinfer.serving.health import RecentCounters, counter_stats
from gpuinfer.stats import Histogram, Snapshot, merge_snapshots, of_model, since

seconds = st.floats(0, 1e6, allow_nan=False)
ledgers = st.lists(
    st.dictionaries(st.sampled_from(["idle", "search", "forward", "transfer", "other"]), seconds), max_size=20
)
VALIDATOR = jsonschema.Draft202012Validator(schema())


def lanes_of(ledger):
    return tuple({"name": f"lane {number}", "stations": stations} for number, stations in enumerate(ledger))


def histogram(*values):
    filled = Histogram()
    for value in values:
        filled.add(value)
    return filled.to_wire()


def a_run(**changes):
    plain = {
        "workload": "selfplay", "backend": "inprocess", "strategy": "dynamic", "setup": Setup(),
        "started_at": "2025-01-01T00:00:00+00:00", "setup_s": 1.5, "wall_s": 10.0, "status": "done",
        "snapshot": Snapshot(), "progress": Progress(0),
    }  # fmt: skip
    return Run(**{**plain, **changes})


def shown(report, name):
    return [row.text for row in panel_rows(report) if row.name == name]


FULL = Snapshot(
    requests=30, rows=9000, batches={100: 10, 400: 20}, reasons={"full": 20, "clients": 10},
    latency=histogram(0.01, 0.02, 0.04), queue_wait=histogram(0.001), errors={"expired": 2}, rss_peak_mb=123.0,
    lanes=lanes_of([{"search": 8.0, "idle": 1.0}, {"forward": 6.0, "idle": 4.0}]),
    device={"name": "NVIDIA H200", "utilisation": 0.5, "allocated_mb": 10.0, "reserved_mb": 20.0},
)  # fmt: skip
MODEL = {"model": "tiny", "slots": 4, "context": 64, "estimated_bytes": 1000, "measured_bytes": None}
GENERATED = Snapshot(
    requests=8, rows=8, batches={1: 10, 4: 30}, batch_s={1: [10, 0.5], 4: [30, 3.0]}, slots=4,
    lanes=({"name": "forward 0", "stations": {"prefill": 1.0, "forward": 2.5, "idle": 6.5}},),
    device={"name": "a CPU", "model": MODEL, "tokens": {"input": 80, "output": 130}},
)  # fmt: skip
PLAYED = {"calls": 800.0, "games_failed": 1.0, "groups_in_flight": 2.0, "environment_share": 0.05}
TRAINED = {
    **PLAYED, "steps": 10.0, "trained_groups": 40.0, "wait_s": 0.2, "train_s": 9.5, "adapter_load_s": 0.3,
    "step_rollout_s": 20.0, "buffer_depth": 4.0, "buffer_batch": 4.0, "buffer_waiting": 3.0, "max_staleness": 1.0,
    "staleness_mean": 0.5, "staleness_max": 1.0, "policy_version": 10.0, "adapter_loads": 10.0, "kl": 0.02,
    "kl_coefficient": 0.1, "stall: adapter load": 0.3,
}  # fmt: skip


def of_games(facts):
    """The report of a run that played games for training, with such facts."""
    lanes = (
        {"name": "forward 0", "stations": {"prefill": 1.0, "forward": 4.0, "idle": 5.0}},
        {"name": "beside other: forward 0", "stations": {"prefill": 2.0, "idle": 8.0}},
    )
    snapshot = Snapshot(
        requests=800, rows=800, slots=16, batches={4: 700}, batch_s={4: [700, 7.0]}, latency=histogram(0.05),
        lanes=lanes, device={"model": {"model": "tiny"}, "beside": {"other": {"model": "other", "slots": 16}}},
    )  # fmt: skip
    counts = {"games": 40, "output_tokens": 8000, "input_tokens": 20_000}
    progress = Progress(10, 10, "groups", counts=counts, facts=facts)
    return build(a_run(workload="rollouts", snapshot=snapshot, progress=progress))


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
    VALIDATOR.validate(report)
    assert json.loads(json.dumps(report, allow_nan=False)) == report


facts_of_games = st.dictionaries(
    st.sampled_from(sorted({*TRAINED, "groups_limited", *(f"stall: {kind}" for kind in STALL_CAUSES)})),
    st.floats(0, 1e9),
)


@given(facts_of_games)
def test_whatever_a_run_of_games_says_of_itself_a_verdict_and_a_report_come(facts):
    report = of_games(facts)
    VALIDATOR.validate(report)
    assert report["bottleneck"]["gain"]["low"] <= report["bottleneck"]["gain"]["high"]


def test_the_schema_is_the_one_of_the_types_and_misses_every_field():
    assert schema() == json_schema()  # else: make reference
    VALIDATOR.check_schema(schema())
    report = build(a_run())
    for field in schema()["required"]:
        assert not VALIDATOR.is_valid({name: value for name, value in report.items() if name != field}), field
    known = schema()["properties"]["batches"]["properties"]["reasons"]["properties"]
    assert set(known) == {reason.value for reason in Reason}


def test_sections_of_a_run_of_rows():
    progress = Progress(40, counts={"games": 40, "simulations": 5000})
    counts_before = {"games": 10, "simulations": 1000}  # when the clock started
    assert rates_section(a_run(snapshot=FULL, progress=progress, counts_before=counts_before)) == {
        "games_per_min": 180.0, "simulations_per_s": 400.0, "rows_per_s": 900.0, "requests_per_s": 3.0,
        "evaluations_per_s": 900.0,
    }  # fmt: skip
    told = batches_section(FULL)
    assert (told["count"], told["rows_mean"], told["rows_p50"], told["rows_max"]) == (30, 300.0, 400, 400)
    assert told["sizes"] == {"128": 10, "512": 20}
    assert (told["reasons"]["full"], told["reasons"]["drain"]) == (20, 0)
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


def test_sections_of_a_run_that_generates():
    counts = {"input_tokens": 80, "output_tokens": 130}
    report = build(a_run(snapshot=GENERATED, progress=Progress(8, 8, counts=counts)))
    assert report["throughput"] == {
        "input_tokens_per_s": 8.0, "output_tokens_per_s": 13.0, "rows_per_s": 0.8, "requests_per_s": 0.8,
    }  # fmt: skip
    assert (report["batches"]["slots"], report["batches"]["occupancy"]) == (4, pytest.approx(130 / 40 / 4))
    assert (report["model"], report["unmasking"]) == (MODEL, None)
    both = merge_snapshots([GENERATED, GENERATED])  # replicas have slots of their own
    assert (both.slots, since(both, GENERATED).slots, evidence(a_run(snapshot=both)).slots) == (8, 8, 4)
    assert batches_section(both)["occupancy"] == batches_section(GENERATED)["occupancy"]

    steps = {"rows": 40, "idle": 4, "positions": 4_000, "tokens": 1_000, "committed": 120, "output_tokens": 100}
    report = build(a_run(snapshot=merge_snapshots([Snapshot(slots=4, device={"steps": steps})] * 2)))
    VALIDATOR.validate(report)
    assert report["unmasking"] == {
        "forwards": 80, "idle_forwards": 8, "committed_tokens": 240, "useful_tokens": 200, "positions": 8_000,
        "computed_positions": 2_000, "tokens_per_forward": 2.5, "idle_share": 0.1, "computed_share": 0.25,
    }  # fmt: skip
    assert shown(report, "forwards") == [
        "80, 2.5 useful tokens each, 10% committed nothing, 25% of positions computed anew"
    ]


def test_sections_of_a_run_of_games():
    report = of_games(TRAINED)
    found = report["rollouts"]
    assert (found["tokens_per_game"], found["tokens_per_call"], found["inference_s"]) == (200, 10, pytest.approx(5.0))
    assert found["output_tokens_per_s"] == {"wall": pytest.approx(800), "inference": pytest.approx(1600)}
    assert found["trainer"]["wait_share"] == pytest.approx(0.02)
    assert found["trainer"]["stalls"] == {"adapter load": pytest.approx(0.03)}
    assert of_games({})["rollouts"] is None
    assert of_games(PLAYED)["rollouts"]["trainer"] is None
    assert of_games(PLAYED)["beside"] == {"other": {"model": "other", "slots": 16}}
    said = "\n".join(f"{row.name}: {row.text}" for row in panel_rows(report))
    for words in (
        "200 tokens a game, 10 a call, 2.0 groups at once",
        "10 steps, waited 200 ms, 2% of its time",
        "3 of 4 groups, staleness 0.5, most 1 of 1",
        "of the trainer's time: adapter load 3%",
        "beside: other, 16 slots",
    ):
        assert words in said


def test_the_verdicts_commands_name_options_of_the_plugins_in_force():
    plugins = {"backends": {"inprocess": {"threads": None}, "other": {}}, "strategies": {"dynamic": {"max_wait": 0}}}
    settings = {**plugins, "selfplay": {"games": 3, "workers": None, "batch_size": None}}
    snapshot, progress = Snapshot(device={"in_force": {"threads": 2}}), Progress(0, facts={"workers": 5})
    assert evidence(a_run(settings=settings, snapshot=snapshot, progress=progress)).options == {
        "-B": {"threads": 2},
        "-S": {"max_wait": 0},
        "--": {"games": 3, "workers": 5, "batch_size": None, "dtype": "float32"},
    }
    assert evidence(a_run()).options == {"-B": {}, "-S": {}, "--": {"dtype": "float32"}}


# Counters since a mark

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


# Several models


def of(kind, share, requests, had_s, waited_s):
    device = {"turns": {"had_s": had_s, "waited_s": waited_s}, "tokens": {"output": 5 * requests}}
    waits = histogram(*[0.01] * requests)
    return of_model(Snapshot(requests=requests, rows=requests, queue_wait=waits, device=device), kind, share)


def test_each_of_several_models_has_a_line():
    both = Snapshot(models={"chat": of("text", 2.0, 30, 6.0, 1.0), "net": of("rows", 1.0, 10, 2.0, 3.0)})
    chat, net = model_lines(both, 10.0)
    assert (chat["device_share"], net["device_share"]) == (0.75, 0.25)
    assert (chat["rows_per_s"], chat["output_tokens"], net["turn_wait_s"]) == (3.0, 150, 3.0)
    twice = merge_snapshots([both, both])
    assert [(line["device_s"], line["share"]) for line in model_lines(twice, 1.0)] == [(12.0, 2.0), (4.0, 1.0)]
    assert model_lines(since(twice, both), 1.0) == model_lines(both, 1.0)
    assert Snapshot.from_wire(both.to_wire()) == both
    line = "chat: 150 tokens, 75% of the device time, waited 10.0 ms in the queue, 1 s for turns"
    assert line in shown({"models": model_lines(both, 10.0)}, "models")
    assert list(device_shares(both)) == ["device: chat 75%, net 25%"]
    assert list(device_shares(Snapshot())) == []
    lanes = ({"name": "worker 1: forward 0", "stations": {"forward": 2.0, "idle": 9.0}}, {"name": "a", "stations": {}})
    assert of_model(Snapshot(lanes=lanes), "rows", 1.0)["device_s"] == 2.0  # without turns: of the forward lanes


# Whose the cores were

LANES = ({"name": "search", "stations": {"search": 6.0, "idle": 4.0}, "ran": {"search": 3.0}},
         {"name": "forward 0", "stations": {"forward": 8.0}, "ran": {"forward": 4.0, "transfer": 0.5}})  # fmt: skip


@pytest.fixture
def two_cores(monkeypatch):
    monkeypatch.setattr(machine, "cores", lambda: 2)


def cores_of(ours=10.0, others=6.0, **more):
    """Of ten seconds on two cores."""
    return core_shares(Snapshot(lanes=LANES, **more), 10.0, CoreTime(ours, ours + others, 1.0))


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


@pytest.mark.usefixtures("two_cores")
def test_the_cores_are_shared_out_whole():
    found = cores_of()
    assert (found["busy_s"], found["others_s"], found["stolen_s"], found["idle_s"]) == (10.0, 6.0, 1.0, 3.0)
    assert found["stations"] == {"search": 3.0, "forward": 4.0, "transfer": 0.5}
    assert on_cores(found) == {
        **found["stations"], "around it": 2.5, "other programs": 6.0, "other machines": 1.0, "idle": 3.0,
    }  # fmt: skip
    for ours, threads, forward in ((12.0, 1, 4.0), (12.0, 2, 8.0), (10.0, 2, 6.5), (12.0, 9, 8.5)):
        # The threads of a forward are one station: each ran as long as the first, but no longer than anything ran.
        assert cores_of(ours, device={"threads": threads})["stations"]["forward"] == forward
    few = cores_of(ours=3.0)["stations"]  # no more than what the program ran
    assert (sum(few.values()), few["search"]) == (pytest.approx(3.0), pytest.approx(1.2))
    (time,) = shown({"cores": cores_of(ours=19.0, others=0.0)}, "time")  # lanes take turns, so each waits most of it
    assert time.startswith("of 2 cores: around it")
    assert "idle" not in time
    unknown = core_shares(Snapshot(lanes=LANES, cpu_s=7.5), 10.0, None)
    assert unknown["idle_s"] is None
    assert shown({"cores": unknown}, "time") == ["forward 53%, search 40%, transfer 7%"]


@pytest.mark.usefixtures("two_cores")
def test_threads_that_waited_for_one_another_are_idle_as_the_benchmark_counts_them(monkeypatch):
    """To the system they were busy: 12 of the 17 seconds were computed in."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent.parent / "benchmarks"))
    share_idle = importlib.import_module("real_ours").share_idle
    spun = {"threads": 2, "steps": {"threads_busy_s": 12.0, "threads_waited_s": 5.0}}
    run = a_run(cores=CoreTime(17.0, 18.0, 0.0), snapshot=Snapshot(cpu_s=17.0, device=spun))
    found = build(run)["cores"]
    assert (found["threads_waited_s"], found["idle_s"]) == (5.0, 2.0)
    assert share_idle(found, 10.0) == pytest.approx(evidence(run).idle_cores / 2) == pytest.approx(0.35)


def test_a_report_needs_no_torch():
    loaded = "import sys, gpuinfer.runtime.run; from gpuinfer.report import report"
    code = f"{loaded}; report.schema(); print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
