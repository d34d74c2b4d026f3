"""`gpuinfer simulate` as people and scripts meet it."""

import json
import os
from pathlib import Path

import pytest

from gpuinfer.cli import simulation_options
from gpuinfer.engine.trace_reader import read

pytestmark = pytest.mark.usefixtures("empty_folder")

MODEL = ["--alpha", "50us", "--beta", "2ms"]
SMALL = ["simulate", "--rate", "2000", *MODEL, "--requests", "2000"]


def test_one_simulation_shows_latency_throughput_batches_and_reasons(gpuinfer):
    code, out, err = gpuinfer(*SMALL, "--target", "50ms")
    assert (code, err) == (0, "")
    for said in ("p95", "in the queue", "throughput", "batches", "cut because", "busy", "capacity 12,308 rows/s"):
        assert said in out
    assert "the target of 50 ms for p95 is met" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_document_stands_alone_and_is_the_same_again(gpuinfer):
    code, out, _ = gpuinfer(*SMALL, "--json", "-", "--seed", "3")
    document = json.loads(out)
    assert (code, document["schema"], document["solve"]) == (0, "gpuinfer.simulation/1", None)
    (run,) = document["runs"]
    assert run["offered"]["requests"] == 1900
    assert run["throughput"]["rows_per_s"] == pytest.approx(2000, rel=0.1)
    assert 0 < run["latency_s"]["p50"] <= run["latency_s"]["p95"] <= run["latency_s"]["max"]
    assert sum(run["batches"]["reasons"].values()) == run["batches"]["count"]
    assert gpuinfer(*SMALL, "--json", "-", "--seed", "3")[1] == out
    assert gpuinfer(*SMALL, "--json", "-", "--seed", "4")[1] != out


def test_a_sweep_is_a_grid_with_a_row_each(gpuinfer):
    words = ["simulate", *MODEL, "--requests", "500", "--json", "o.json"]
    code, out, err = gpuinfer(*words, "--sweep", "max_wait=0,5ms", "--sweep", "rate=100,1k", "--target", "7ms")
    assert code == 0
    assert "4 settings" in out
    assert "4 of 4 · max wait 5ms, rate 1k" in err
    runs = json.loads(Path("o.json").read_text())["runs"]
    assert [run["settings"] for run in runs] == [
        {"max_wait": wait, "rate": rate} for wait in ("0", "5ms") for rate in ("100", "1k")
    ]
    assert [run["met"] for run in runs] == [True, True, False, False]
    assert max(map(len, out.splitlines())) <= 80


def test_a_strategy_s_option_that_is_also_a_flag_is_swept_by_its_full_name(gpuinfer):
    code, _, _ = gpuinfer(*SMALL, "--sweep", "strategy.max_rows=1,2", "--json", "o.json", "--quiet")
    runs = json.loads(Path("o.json").read_text())["runs"]
    assert code == 0
    assert [run["batches"]["rows_max"] for run in runs] == [1, 2]
    code, _, _ = gpuinfer(*SMALL, "--sweep", "max_rows=1,2", "--json", "o.json", "--quiet")
    assert [run["capacity_rows_per_s"] for run in json.loads(Path("o.json").read_text())["runs"]] == [
        pytest.approx(1 / 2.05e-3),
        pytest.approx(2 / 2.1e-3),
    ]


def test_solving_prints_a_table_and_a_sentence(gpuinfer):
    words = ["simulate", "--arrivals", "poisson", "--rate", "20000", *MODEL, "--requests", "5000", "--plot", "p.png"]
    code, out, err = gpuinfer(*words, "--solve", "replicas", "--target", "50ms", "--json", "o.json")
    assert code == 0
    assert "2 replicas serve" in " ".join(out.split())
    assert json.loads(Path("o.json").read_text())["solve"]["replicas"] == 2
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    assert "plot: p.png" in err


def test_a_target_out_of_reach_is_an_answer_and_a_check_that_did_not_hold(gpuinfer):
    code, out, _ = gpuinfer(*SMALL, "--solve", "replicas", "--target", "1ms", "--plot", "p.svg")
    assert code == 4
    assert "No number of replicas can" in out
    assert not Path("p.svg").exists()


@pytest.mark.sample
@pytest.mark.parametrize("words", [[], ["--sweep", "max_wait=0,5ms"], ["--sweep", "routing=random,round-robin"]])
def test_plots_are_the_same_for_the_same_result(gpuinfer, words):
    assert gpuinfer(*SMALL, *words, "--plot", "a.svg")[0] == 0
    assert gpuinfer(*SMALL, *words, "--plot", "b.svg")[0] == 0
    assert Path("a.svg").read_text().lstrip().startswith("<?xml")
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()


def test_a_simulation_is_recorded_replayed_and_fitted(gpuinfer):
    words = ["simulate", "--arrivals", "closed", "--clients", "8", "--think", "5ms", *MODEL, "--rows", "1-4"]
    code, _, err = gpuinfer(*words, "--requests", "500", "--classes", "high=0.5,low=0.5", "--trace", "t.jsonl")
    assert code == 0
    assert "trace:" in err
    assert "500 requests" in err
    trace = read("t.jsonl")
    assert [len(trace.arrivals), len(trace.settles)] == [500, 500]
    code, out, _ = gpuinfer(
        "simulate", "--replay", "t.jsonl", "--service", "t.jsonl", "--warmup", "0", "--json", "-", "--max-rows", "64"
    )
    (run,) = json.loads(out)["runs"]
    assert run["offered"]["requests"] == 500
    assert set(run["classes"]) == {"high", "low"}
    assert run["batches"]["seconds"]["1"] == pytest.approx(2.05e-3, rel=0.02)


@pytest.mark.parametrize(
    "words",
    [
        ["--arrivals", "bursty", "--burst", "3", "--burst-s", "20ms"],
        ["--replicas", "3", "--routing", "power-of-two", "--in-flight", "2"],
        ["--steps", "16:1ms", "--jitter", "0.2", "--failures", "0.01", "--drift", "2x@1s"],
        ["--timeout", "3ms", "--sources", "10", "--max-queue-rows", "64"],
        ["--duration", "500ms", "--warmup", "0"],
        ["--arrivals", "constant"],
    ],
    ids=" ".join,
)
def test_flags_work_together(gpuinfer, words):
    assert gpuinfer(*SMALL, *words)[0] == 0


def test_the_engines_own_time_takes_the_place_of_what_a_trace_says(gpuinfer):
    words = [*SMALL, "--turn", "500us", "--rate", "8k", "--requests", "4000"]
    assert gpuinfer(*words, "--trace", "t.jsonl")[0] == 0
    fitted = ["simulate", "--clients", "1", "--service", "t.jsonl", "--requests", "100", "--json", "-"]
    (learnt,), (none,) = (json.loads(gpuinfer(*fitted, *more)[1])["runs"] for more in ([], ["--turn", "0"]))
    assert learnt["latency_s"]["mean"] - none["latency_s"]["mean"] == pytest.approx(500e-6, rel=0.05)


def test_a_sweep_reads_a_file_once(gpuinfer, monkeypatch):
    assert gpuinfer(*SMALL, "--trace", "t.jsonl")[0] == 0
    read, seen = simulation_options.replayed, []
    monkeypatch.setattr(simulation_options, "replayed", lambda path: seen.append(path) or read(path))
    assert gpuinfer("simulate", "--replay", "t.jsonl", *MODEL, "--sweep", "strategy=dynamic,adaptive")[0] == 0
    assert len(seen) == 1


def test_a_target_that_only_the_few_who_are_answered_meet_is_missed(gpuinfer):
    words = ["simulate", "--rate", "20k", *MODEL, "--requests", "5000", "--timeout", "5ms", "--target", "50ms"]
    code, out, _ = gpuinfer(*words, "--json", "o.json")
    (run,) = json.loads(Path("o.json").read_text())["runs"]
    assert code == 0
    assert run["latency_s"]["p95"] < 0.05
    assert run["served_share"] < 0.9
    assert run["met"] is False
    assert "is met by what is answered, but" in " ".join(out.split())


def test_ctrl_c_ends_it_as_stopped(gpuinfer, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulation_options, "simulate", interrupted)
    assert gpuinfer(*SMALL, "--json", "o.json")[0] == 3
    assert not Path("o.json").exists()


BARE = ["simulate", "--rate", "2000"]
REFUSED = {
    "negative alpha": ([*BARE, "--alpha", "-5us"], "--alpha: '-5us' is less than 0. Give 0 or more"),
    "negative beta": ([*BARE, "--beta", "-1"], "--beta: '-1' is less than 0"),
    "no time at all": ([*BARE, "--alpha", "0", "--beta", "0"], "Give alpha or beta, or both"),
    "no service model": (BARE, "Give --alpha 50us --beta 2ms, say, or --service FILE"),
    "no number": ([*BARE, "--alpha", "fast"], "--alpha: 'fast' is not a number"),
    "infinite": ([*BARE, "--beta", "inf"], "is not a finite number"),
    "all fail": ([*BARE, *MODEL, "--failures", "1"], "is not less than 1"),
    "steps": ([*BARE, *MODEL, "--steps", "64"], "Give rows and a time, such as 64:1ms"),
    "steps of no row": ([*BARE, *MODEL, "--steps", "0:1ms"], "Give 1 row or more"),
    "drift": ([*BARE, *MODEL, "--drift", "2x"], "Give a factor and a time, such as 2x@30s"),
    "rate 0": (["simulate", "--rate", "0", *MODEL], "--rate: '0' is not more than 0"),
    "rate that is none": (["simulate", "--rate", "many", *MODEL], "--rate: 'many' is not a number"),
    "half a schedule": (["simulate", "--schedule", "5:1s,7", *MODEL], "--schedule 200:8s,3000:8s"),
    "a schedule of silence": (["simulate", "--schedule", "0:1s", *MODEL], "a rate of 0 brings no request"),
    "a schedule and a rate": ([*SMALL, "--schedule", "5:1s"], "here or in gpuinfer.toml. Give one of them"),
    "no rate": (["simulate", *MODEL], "needs --rate. Give --rate 2000"),
    "no clients": (["simulate", "--arrivals", "closed", *MODEL], "Give --clients 8"),
    "closed with a rate alone": ([*SMALL, "--arrivals", "closed"], "needs --clients, not --rate. Give --clients 8"),
    "closed with a rate": (
        [*SMALL, "--arrivals", "closed", "--clients", "2"],
        "each say what the load is, here or in gpuinfer.toml. Give one of them",
    ),
    "unknown arrivals": ([*SMALL, "--arrivals", "poison"], "Did you mean 'poisson'"),
    "unknown routing": ([*SMALL, "--routing", "round-robbin"], "Did you mean 'round-robin'"),
    "unknown strategy": ([*SMALL, "--strategy", "dynamik"], "Did you mean 'dynamic'"),
    "unknown option": ([*SMALL, "-S", "max_wiat=1"], "Did you mean 'max_wait'"),
    "unknown flag": ([*SMALL, "--rat", "1"], "has no flag '--rat'"),
    "unknown class": ([*SMALL, "--classes", "hgih=1"], "Did you mean 'high'"),
    "shares over 1": ([*SMALL, "--classes", "high=1,low=1"], "add up to 2. Give shares of 0 to 1 that add up to 1"),
    "share that is none": ([*SMALL, "--classes", "high=x"], "'x' is no number. Write it as --classes high=0.2"),
    "rows": ([*SMALL, "--rows", "a-b"], "Give a number such as 8, or a range such as 1-8"),
    "half a row": ([*SMALL, "--rows", "1.5"], "Give a number such as 8"),
    "too many rows": ([*SMALL, "--rows", "65"], "Raise --max-rows"),
    "no requests": ([*SMALL[:-1], "0"], "Give 1 or more"),
    "unknown sweep": ([*SMALL, "--sweep", "max_wiat=1,2"], "Did you mean 'max_wait'"),
    "sweep without values": ([*SMALL, "--sweep", "max_wait"], "Write --sweep max_wait=VALUE,VALUE"),
    "sweep of a bad value": ([*SMALL, "--sweep", "max_wait=1,-1"], "is less than 0"),
    "sweep of what is given": ([*SMALL, "--sweep", "rate=1,2"], "both name values of 'rate'"),
    "one sweep twice": ([*SMALL, "--sweep", "in_flight=1", "--sweep", "in_flight=2"], "Give all its values in one"),
    "sweep of the plot": ([*SMALL, "--sweep", "plot=a.png,b.png"], "no setting to sweep named 'plot'"),
    "sweep and solve": (
        [*SMALL, "--sweep", "in_flight=1,2", "--solve", "replicas", "--target", "1s"],
        "Leave one of them out",
    ),
    "solve without a target": ([*SMALL, "--solve", "replicas"], "Give --target 50ms, or -S latency_target=50ms"),
    "solve and replicas": (
        [*SMALL, "--solve", "replicas", "--target", "1s", "--replicas", "2"],
        "Leave one of them out",
    ),
    "solve of what is none": ([*SMALL, "--solve", "gpus"], "Choose from replicas"),
    "plot of another kind": ([*SMALL, "--plot", "p.gif"], "Give a file such as p.png"),
    "plot nowhere": ([*SMALL, "--plot", "nowhere/p.png"], "mkdir -p nowhere"),
    "trace of a sweep": ([*SMALL, "--sweep", "in_flight=1,2", "--trace", "t"], "--trace records one simulation"),
    "trace to a stream": ([*SMALL, "--trace", "-"], "in a file. Name one"),
    "trace and report in one": ([*SMALL, "--trace", "o", "--json", "./o"], "Give each a file of its own"),
    "plot and report in one": ([*SMALL, "--plot", "o.png", "--json", "./o.png"], "Give each a file of its own"),
    "replay of a device": (["simulate", "--replay", "/dev/zero", *MODEL], "it is no plain file"),
    "service of a device": ([*BARE, "--service", "/dev/zero"], "it is no plain file"),
    "think of nobody": ([*SMALL, "--think", "1ms"], "--think is for --clients"),
    "deadlines of a recorded load": (
        ["simulate", "--replay", "t", *MODEL, "--timeout", "1ms"],
        "means nothing to --replay. Leave --timeout out",
    ),
    "endless alpha": ([*BARE, "--alpha", "1e300"], "is more than 1e+06"),
    "next to no time": ([*BARE, "--alpha", "1e-300"], "a batch that takes no time cannot be"),
    "endless jitter": ([*SMALL, "--jitter", "1e200"], "is more than 10"),
    "endless drift": ([*SMALL, "--drift", "1e300x@1s"], "cannot be"),
    "next to no rate": (["simulate", "--rate", "1e-300", *MODEL], "Give a rate above 0"),
    "empty bursts": ([*SMALL, "--arrivals", "bursty", "--burst-s", "1e-9"], "Give longer ones"),
    "an empty schedule": (["simulate", "--schedule", ",", *MODEL], "a schedule of nothing"),
    "endless rows": ([*SMALL, "--rows", "1" + "0" * 400], "no request has so many rows"),
    "endless requests": ([*SMALL[:-1], "1" + "0" * 400], "or less"),
    "endless batches": ([*SMALL, "--max-rows", "1" + "0" * 400], "or less"),
    "no number of a timeout": ([*SMALL, "--timeout", "nan"], "--timeout"),
    "trace nowhere": ([*SMALL, "--trace", "nowhere/t"], "there is no folder"),
    "replay of nothing": (["simulate", "--replay", "none.jsonl", *MODEL], "there is no trace none.jsonl"),
    "trace arrivals of nothing": (["simulate", "--arrivals", "trace", *MODEL], "Give --replay FILE"),
    "replay and poisson": ([*SMALL, "--arrivals", "poisson", "--replay", "t"], "Give one of them"),
    "service and alpha": ([*SMALL, "--service", "r.json"], "--service says how long a batch takes, and so does"),
    "service of nothing": ([*BARE, "--service", "none.json"], "there is no file none.json"),
}


@pytest.mark.parametrize(("words", "said"), REFUSED.values(), ids=REFUSED)
def test_bad_input_is_refused_with_the_cure(gpuinfer, words, said):
    code, out, err = gpuinfer(*words)
    assert (code, out) == (2, "")
    assert said in " ".join(err.split())
    assert len(err.splitlines()) <= 3
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(lambda lines: lines[:-1], "cut off", id="truncated"),
        pytest.param(lambda lines: [lines[0].replace("trace/1", "trace/2"), *lines[1:]], "another version", id="newer"),
        pytest.param(lambda lines: [*lines[:2], "nonsense\n", *lines[2:]], "line 3", id="garbled"),
        pytest.param(lambda lines: ["not a trace\n"], "is no trace", id="no trace"),
    ],
)
def test_a_damaged_trace_is_refused(gpuinfer, change, said):
    assert gpuinfer(*SMALL, "--trace", "t.jsonl")[0] == 0
    lines = Path("t.jsonl").read_text().splitlines(keepends=True)
    Path("t.jsonl").write_text("".join(change(lines)))
    code, out, err = gpuinfer("simulate", "--replay", "t.jsonl", *MODEL)
    assert (code, out) == (2, "")
    assert said in err


def test_a_folder_that_cannot_be_written_is_refused_before_anything_is_simulated(gpuinfer, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, out, err = gpuinfer(*SMALL, "--plot", "p.png")
    assert (code, out) == (2, "")
    assert "--plot p.png cannot be written" in err
