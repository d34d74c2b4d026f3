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


@pytest.fixture
def simulated(gpuinfer):
    """Its runs, when `gpuinfer simulate` ends with 0."""

    def run(*words):
        code, out, err = gpuinfer(*words, "--json", "-")
        assert code == 0, err
        return json.loads(out)["runs"]

    return run


def test_one_simulation_shows_latency_throughput_batches_and_reasons(gpuinfer):
    code, out, err = gpuinfer(*SMALL, "--target", "50ms")
    assert (code, err) == (0, "")
    for said in ("p95", "in the queue", "throughput", "batches", "cut because", "busy", "capacity 12,308 rows/s"):
        assert said in out
    assert "the target of 50 ms for p95 is met" in out
    assert max(map(len, out.splitlines())) <= 80


def test_the_document_stands_alone_and_is_the_same_again(gpuinfer):
    out = {seed: gpuinfer(*SMALL, "--json", "-", "--seed", str(seed))[1] for seed in (3, 4)}
    assert gpuinfer(*SMALL, "--json", "-", "--seed", "3")[1] == out[3] != out[4]
    document = json.loads(out[3])
    assert (document["schema"], document["solve"]) == ("gpuinfer.simulation/1", None)
    (run,) = document["runs"]
    assert run["offered"]["requests"] == 1900
    assert run["throughput"]["rows_per_s"] == pytest.approx(2000, rel=0.1)
    assert 0 < run["latency_s"]["p50"] <= run["latency_s"]["p95"] <= run["latency_s"]["max"]
    assert sum(run["batches"]["reasons"].values()) == run["batches"]["count"]


def test_a_sweep_is_a_grid_with_a_row_each(gpuinfer, simulated, monkeypatch):
    words = ["simulate", *MODEL, "--requests", "500", "--json", "o.json"]
    code, out, err = gpuinfer(*words, "--sweep", "max_wait=0,5ms", "--sweep", "rate=100,1k", "--target", "7ms")
    assert (code, "4 settings" in out, "4 of 4 · max wait 5ms, rate 1k" in err) == (0, True, True)
    found = [(run["settings"]["max_wait"], run["settings"]["rate"], run["met"]) for run in read_runs()]
    assert found == [("0", "100", True), ("0", "1k", True), ("5ms", "100", False), ("5ms", "1k", False)]
    assert max(map(len, out.splitlines())) <= 80
    by_option = simulated(*SMALL, "--sweep", "strategy.max_rows=1,2", "--quiet")
    assert [run["batches"]["rows_max"] for run in by_option] == [1, 2]
    by_flag = simulated(*SMALL, "--sweep", "max_rows=1,2", "--quiet")
    assert [run["capacity_rows_per_s"] for run in by_flag] == pytest.approx([1 / 2.05e-3, 2 / 2.1e-3])
    assert gpuinfer(*SMALL, "--trace", "t.jsonl")[0] == 0
    replayed, seen = simulation_options.replayed, []
    monkeypatch.setattr(simulation_options, "replayed", lambda path: seen.append(path) or replayed(path))
    simulated("simulate", "--replay", "t.jsonl", *MODEL, "--sweep", "strategy=dynamic,adaptive", "--quiet")
    assert len(seen) == 1  # a file is read once


def read_runs():
    return json.loads(Path("o.json").read_text())["runs"]


def test_solving_prints_a_table_and_a_sentence(gpuinfer):
    words = ["simulate", "--arrivals", "poisson", "--rate", "20000", *MODEL, "--requests", "5000", "--plot", "p.png"]
    code, out, err = gpuinfer(*words, "--solve", "replicas", "--target", "50ms", "--json", "o.json")
    assert (code, "2 replicas serve" in " ".join(out.split()), "plot: p.png" in err) == (0, True, True)
    assert json.loads(Path("o.json").read_text())["solve"]["replicas"] == 2
    assert Path("p.png").read_bytes().startswith(b"\x89PNG")
    code, out, _ = gpuinfer(*SMALL, "--solve", "replicas", "--target", "1ms", "--plot", "p.svg")  # out of reach
    assert (code, "No number of replicas can" in out, Path("p.svg").exists()) == (4, True, False)


@pytest.mark.sample
@pytest.mark.parametrize("words", [[], ["--sweep", "max_wait=0,5ms"], ["--sweep", "routing=random,round-robin"]])
def test_plots_are_the_same_for_the_same_result(gpuinfer, words):
    for name in ("a.svg", "b.svg"):
        assert gpuinfer(*SMALL, *words, "--plot", name)[0] == 0
    assert Path("a.svg").read_text().lstrip().startswith("<?xml")
    assert Path("a.svg").read_bytes() == Path("b.svg").read_bytes()


def test_a_simulation_is_recorded_replayed_and_fitted(gpuinfer, simulated):
    words = ["simulate", "--arrivals", "closed", "--clients", "8", "--think", "5ms", *MODEL, "--rows", "1-4"]
    code, _, err = gpuinfer(*words, "--requests", "500", "--classes", "high=0.5,low=0.5", "--trace", "t.jsonl")
    assert (code, "trace:" in err, "500 requests" in err) == (0, True, True)
    assert [len(read("t.jsonl").arrivals), len(read("t.jsonl").settles)] == [500, 500]
    replayed = ["simulate", "--replay", "t.jsonl", "--service", "t.jsonl", "--warmup", "0", "--max-rows", "64"]
    (run,) = simulated(*replayed)
    assert (run["offered"]["requests"], set(run["classes"])) == (500, {"high", "low"})
    assert run["batches"]["seconds"]["1"] == pytest.approx(2.05e-3, rel=0.02)


@pytest.mark.parametrize(
    "words",
    [
        "--arrivals bursty --burst 3 --burst-s 20ms",
        "--replicas 3 --routing power-of-two --in-flight 2",
        "--steps 16:1ms --jitter 0.2 --failures 0.01 --drift 2x@1s",
        "--timeout 3ms --sources 10 --max-queue-rows 64",
        "--duration 500ms --warmup 0",
        "--arrivals constant",
    ],
)
def test_flags_work_together(gpuinfer, words):
    assert gpuinfer(*SMALL, *words.split())[0] == 0


def test_the_engines_own_time_takes_the_place_of_what_a_trace_says(gpuinfer, simulated):
    words = [*SMALL, "--turn", "500us", "--rate", "8k", "--requests", "4000"]
    assert gpuinfer(*words, "--trace", "t.jsonl")[0] == 0
    fitted = ["simulate", "--clients", "1", "--service", "t.jsonl", "--requests", "100"]
    (learnt,), (none,) = simulated(*fitted), simulated(*fitted, "--turn", "0")
    assert learnt["latency_s"]["mean"] - none["latency_s"]["mean"] == pytest.approx(500e-6, rel=0.05)


def test_a_target_that_only_the_few_who_are_answered_meet_is_missed(gpuinfer):
    words = ["simulate", "--rate", "20k", *MODEL, "--requests", "5000", "--timeout", "5ms", "--target", "50ms"]
    code, out, _ = gpuinfer(*words, "--json", "o.json")
    (run,) = read_runs()
    assert (code, run["met"], "is met by what is answered, but" in " ".join(out.split())) == (0, False, True)
    assert (run["latency_s"]["p95"] < 0.05, run["served_share"] < 0.9) == (True, True)


def test_ctrl_c_ends_it_as_stopped(gpuinfer, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(simulation_options, "simulate", interrupted)
    assert gpuinfer(*SMALL, "--json", "o.json")[0] == 3
    assert not Path("o.json").exists()


BARE, RATED, PLAIN = "--rate 2000", "--rate 2000 --alpha 50us --beta 2ms", "--alpha 50us --beta 2ms"
ENDLESS = "1" + "0" * 400
REFUSED = {
    f"{BARE} --alpha -5us": "--alpha: '-5us' is less than 0. Give 0 or more",
    f"{BARE} --alpha 0 --beta 0": "Give alpha or beta, or both",
    BARE: "Give --alpha 50us --beta 2ms, say, or --service FILE",
    f"{BARE} --alpha fast": "--alpha: 'fast' is not a number",
    f"{BARE} --beta inf": "is not a finite number",
    f"{BARE} --alpha 1e300": "is more than 1e+06",
    f"{BARE} --alpha 1e-300": "a batch that takes no time cannot be",
    f"{BARE} --service /dev/zero": "it is no plain file",
    f"{BARE} --service none.json": "there is no file none.json",
    f"{RATED} --failures 1": "is not less than 1",
    f"{RATED} --steps 64": "Give rows and a time, such as 64:1ms",
    f"{RATED} --steps 0:1ms": "Give 1 row or more",
    f"{RATED} --drift 2x": "Give a factor and a time, such as 2x@30s",
    f"{RATED} --drift 1e300x@1s": "cannot be",
    f"{RATED} --jitter 1e200": "is more than 10",
    f"{PLAIN} --rate 0": "--rate: '0' is not more than 0",
    f"{PLAIN} --rate many": "--rate: 'many' is not a number",
    f"{PLAIN} --rate 1e-300": "Give a rate above 0",
    f"{PLAIN} --schedule 5:1s,7": "--schedule 200:8s,3000:8s",
    f"{PLAIN} --schedule 0:1s": "a rate of 0 brings no request",
    f"{PLAIN} --schedule ,": "a schedule of nothing",
    f"{RATED} --schedule 5:1s": "here or in gpuinfer.toml. Give one of them",
    PLAIN: "needs --rate. Give --rate 2000",
    f"{PLAIN} --arrivals closed": "Give --clients 8",
    f"{RATED} --arrivals closed": "needs --clients, not --rate. Give --clients 8",
    f"{RATED} --arrivals closed --clients 2": "each say what the load is, here or in gpuinfer.toml. Give one of them",
    f"{RATED} --arrivals poison": "Did you mean 'poisson'",
    f"{RATED} --arrivals bursty --burst-s 1e-9": "Give longer ones",
    f"{RATED} --routing round-robbin": "Did you mean 'round-robin'",
    f"{RATED} --strategy dynamik": "Did you mean 'dynamic'",
    f"{RATED} -S max_wiat=1": "Did you mean 'max_wait'",
    f"{RATED} --rat 1": "has no flag '--rat'",
    f"{RATED} --classes hgih=1": "Did you mean 'high'",
    f"{RATED} --classes high=1,low=1": "add up to 2. Give shares of 0 to 1 that add up to 1",
    f"{RATED} --classes high=x": "'x' is no number. Write it as --classes high=0.2",
    f"{RATED} --rows a-b": "Give a number such as 8, or a range such as 1-8",
    f"{RATED} --rows 1.5": "Give a number such as 8",
    f"{RATED} --rows 65": "Raise --max-rows",
    f"{RATED} --rows {ENDLESS}": "no request has so many rows",
    f"{RATED} --requests 0": "Give 1 or more",
    f"{RATED} --requests {ENDLESS}": "or less",
    f"{RATED} --max-rows {ENDLESS}": "or less",
    f"{RATED} --timeout nan": "--timeout",
    f"{RATED} --think 1ms": "--think is for --clients",
    f"{RATED} --sweep max_wiat=1,2": "Did you mean 'max_wait'",
    f"{RATED} --sweep max_wait": "Write --sweep max_wait=VALUE,VALUE",
    f"{RATED} --sweep max_wait=1,-1": "is less than 0",
    f"{RATED} --sweep rate=1,2": "both name values of 'rate'",
    f"{RATED} --sweep in_flight=1 --sweep in_flight=2": "Give all its values in one",
    f"{RATED} --sweep plot=a.png,b.png": "no setting to sweep named 'plot'",
    f"{RATED} --sweep in_flight=1,2 --solve replicas --target 1s": "Leave one of them out",
    f"{RATED} --sweep in_flight=1,2 --trace t": "--trace records one simulation",
    f"{RATED} --solve replicas": "Give --target 50ms, or -S latency_target=50ms",
    f"{RATED} --solve replicas --target 1s --replicas 2": "Leave one of them out",
    f"{RATED} --solve gpus": "Choose from replicas",
    f"{RATED} --plot p.gif": "Give a file such as p.png",
    f"{RATED} --plot nowhere/p.png": "mkdir -p nowhere",
    f"{RATED} --plot o.png --json ./o.png": "Give each a file of its own",
    f"{RATED} --trace -": "in a file. Name one",
    f"{RATED} --trace o --json ./o": "Give each a file of its own",
    f"{RATED} --trace nowhere/t": "there is no folder",
    f"{RATED} --arrivals poisson --replay t": "Give one of them",
    f"{RATED} --service r.json": "--service says how long a batch takes, and so does",
    f"{PLAIN} --replay /dev/zero": "it is no plain file",
    f"{PLAIN} --replay t --timeout 1ms": "means nothing to --replay. Leave --timeout out",
    f"{PLAIN} --replay none.jsonl": "there is no trace none.jsonl",
    f"{PLAIN} --arrivals trace": "Give --replay FILE",
    f"{BARE} --service empty": "is no trace",
    f"{BARE} --service list": "neither a report nor a trace",
    f"{BARE} --service no-times": "holds no batch times",
    f"{BARE} --service bad-size": "holds no batch times",
    f"{BARE} --service below-0": "holds no batch times",
    f"{BARE} --service endless": "holds no batch times",
    f"{BARE} --service pipe": "cannot be read",
    f"{PLAIN} --replay newer": "another version",
}
FILES = {
    "empty": "",
    "list": "[1]",
    "no-times": '{"batches": 7}',
    "bad-size": '{"batches": {"seconds": {"x": 1}}}',
    "below-0": '{"batches": {"seconds": {"4": -1}}}',
    "endless": f'{{"batches": {{"seconds": {{"1": {ENDLESS}}}}}}}',
    "newer": '{"schema": "gpuinfer.trace/9"}\n["a"]\n',
}


@pytest.mark.parametrize(("words", "said"), REFUSED.items(), ids=[words[:60] for words in REFUSED])
def test_bad_input_is_refused_with_the_cure(gpuinfer, words, said):
    for name in words.split():
        if name in FILES:
            Path(name).write_text(FILES[name])
        elif name == "pipe":
            os.mkfifo(name)
    code, out, err = gpuinfer("simulate", *words.split())
    assert (code, out, said in " ".join(err.split())) == (2, "", True), err
    assert len(err.splitlines()) <= 3


def test_a_damaged_trace_and_a_folder_that_cannot_be_written_are_refused(gpuinfer, monkeypatch):
    assert gpuinfer(*SMALL, "--trace", "t.jsonl")[0] == 0
    lines = Path("t.jsonl").read_text().splitlines(keepends=True)
    for damaged, said in ((lines[:-1], "cut off"), ([*lines[:2], "nonsense\n", *lines[2:]], "line 3")):
        Path("t.jsonl").write_text("".join(damaged))
        code, out, err = gpuinfer("simulate", "--replay", "t.jsonl", *MODEL)
        assert (code, out, said in err) == (2, "", True)
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    code, out, err = gpuinfer(*SMALL, "--plot", "p.png")
    assert (code, out, "--plot p.png cannot be written" in err) == (2, "", True)
